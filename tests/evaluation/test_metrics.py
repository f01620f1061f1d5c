"""Exact definitions: ties, empty tests, groups."""

import math

import pytest
import torch

from fedloom.evaluation.metrics import is_correct, per_group, percent, perplexity_from_loss, unigram_perplexity


def test_of_equal_logits_the_lowest_class_wins() -> None:
    logits = torch.tensor([[1.0, 1.0, 0.0], [0.0, 2.0, 2.0], [3.0, 3.0, 3.0]])
    assert is_correct(logits, torch.tensor([0, 1, 0])).tolist() == [True, True, True]
    assert is_correct(logits, torch.tensor([1, 2, 2])).tolist() == [False, False, False]


@pytest.mark.parametrize("classes", [5, 100, 1000])
def test_ties_are_broken_the_same_way_for_many_classes(classes: int) -> None:
    logits = torch.zeros(3, classes)
    logits[1, classes // 2 :] = 1.0
    logits[2, [classes - 1, 3]] = 7.0
    assert is_correct(logits, torch.tensor([0, classes // 2, 3])).tolist() == [True] * 3


def test_percent() -> None:
    assert percent(1, 8) == 12.5
    assert math.isnan(percent(0, 0))


def test_groups_are_summed_and_empty_ones_are_zero() -> None:
    found = per_group(torch.tensor([True, True, False, True]), torch.tensor([2, 0, 0, 2]), 4)
    assert found.tolist() == [1.0, 0.0, 2.0, 0.0]


def test_a_loss_beyond_all_bounds_is_an_infinite_perplexity():
    assert perplexity_from_loss(1.0) == pytest.approx(math.e)
    assert perplexity_from_loss(800.0) == perplexity_from_loss(math.inf) == math.inf


def test_one_who_knows_only_how_often_words_occur():
    seen, asked = torch.tensor([[0, 0, 0, 1]]), torch.tensor([0, 1, 2])
    expected = math.exp(-(math.log(3 / 5) + 2 * math.log(1 / 5)) / 3)
    assert unigram_perplexity(seen, asked, 3) == pytest.approx(expected)
