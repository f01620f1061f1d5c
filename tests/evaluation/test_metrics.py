"""Exact definitions: ties, empty tests, groups."""

import math

import pytest
import torch

from fedloom.evaluation.metrics import is_correct, per_group, percent, perplexity_from_loss, unigram_perplexity


def test_is_correct_equal_logits_predict_the_lowest_class() -> None:
    logits = torch.tensor([[1.0, 1.0, 0.0], [0.0, 2.0, 2.0], [3.0, 3.0, 3.0]])
    assert is_correct(logits, torch.tensor([0, 1, 0])).tolist() == [True, True, True]
    assert is_correct(logits, torch.tensor([1, 2, 2])).tolist() == [False, False, False]


@pytest.mark.parametrize("classes", [5, 100, 1000])
def test_is_correct_many_classes_predict_the_lowest_of_equals(classes: int) -> None:
    logits = torch.zeros(3, classes)
    logits[1, classes // 2 :] = 1.0
    logits[2, [classes - 1, 3]] = 7.0
    assert is_correct(logits, torch.tensor([0, classes // 2, 3])).tolist() == [True] * 3


def test_percent_of_nothing_is_nan() -> None:
    assert percent(1, 8) == 12.5
    assert math.isnan(percent(0, 0))


def test_per_group_empty_group_is_zero() -> None:
    found = per_group(torch.tensor([True, True, False, True]), torch.tensor([2, 0, 0, 2]), 4)
    assert found.tolist() == [1.0, 0.0, 2.0, 0.0]


def test_perplexity_from_loss_overflow_is_infinite():
    assert perplexity_from_loss(1.0) == pytest.approx(math.e)
    assert perplexity_from_loss(800.0) == perplexity_from_loss(math.inf) == math.inf


def test_unigram_perplexity_matches_a_hand_computation():
    seen, asked = torch.tensor([[0, 0, 0, 1]]), torch.tensor([0, 1, 2])
    expected = math.exp(-(math.log(3 / 5) + 2 * math.log(1 / 5)) / 3)
    assert unigram_perplexity(seen, asked, 3) == pytest.approx(expected)
