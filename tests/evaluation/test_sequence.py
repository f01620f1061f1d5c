"""Sums over positions, rows and devices, and what follows from them."""

import math

import pytest
import torch
from torch import Tensor

from fedloom.client import Batch
from fedloom.data import Preparation
from fedloom.evaluation.sequence import LARGEST_LOSS, device_sums, row_sums, sequence_metrics, sum_over_batches


def measured(losses: Tensor, batch_size: int) -> dict[str, float]:
    """Of one device's losses [rows, positions], none of them right, nothing hidden."""
    rows = row_sums(losses[None], torch.zeros(1, *losses.shape, dtype=torch.bool), None)
    return sequence_metrics([device_sums(rows, torch.ones(1, len(losses), dtype=torch.bool), batch_size)])


def test_sequence_metrics_both_perplexities_match_their_definitions() -> None:
    """Two batches of equal rows, with mean losses 1 and 2."""
    found = measured(torch.tensor([[0.5, 1.5], [1.0, 1.0], [2.0, 2.0], [1.0, 3.0]]), 2)
    assert (round(found["perplexity"], 6), round(found["perplexity_of_mean"], 6)) == (5.053669, 4.481689)


def test_device_sums_batches_are_weighted_by_rows() -> None:
    found = measured(torch.tensor([[1.0], [1.0], [2.0]]), 2)
    assert found["perplexity"] == pytest.approx((2 * math.e + math.exp(2)) / 3)


def test_sequence_metrics_single_batch_perplexities_are_equal() -> None:
    found = measured(torch.rand(5, 3), 5)
    assert found["perplexity"] == pytest.approx(found["perplexity_of_mean"])


def test_device_sums_padding_is_excluded() -> None:
    """Two devices: three rows, and one row with two of padding, whose losses are not even numbers."""
    losses = torch.tensor([[[1.0, 3.0], [2.0, 2.0], [4.0, 4.0]], [[5.0, 7.0], [torch.nan] * 2, [torch.inf] * 2]])
    real = torch.tensor([[True] * 3, [True, False, False]])
    right = torch.tensor([[[True, False], [True, True], [False, False]], [[False, True], [True, True], [True, True]]])
    hidden = torch.tensor([[[False, True], [False, False], [True, False]], [[True, False], [True, True], [True, True]]])
    sums = device_sums(row_sums(losses, right, hidden), real, 2)
    assert {name: one.tolist() for name, one in sums.items()} == {
        "rows": [3.0, 1.0],
        "log_exponentials": pytest.approx([math.log(2 * math.exp(2) + math.exp(4)), 6]),
        "total": [6.0, 2.0],
        "loss": [16.0, 12.0],
        "correct": [3.0, 1.0],
        "hidden_total": [2.0, 1.0],
        "hidden_loss": [7.0, 5.0],
        "hidden_correct": [0.0, 0.0],
    }
    each = [{name: one[device] for name, one in sums.items()} for device in (0, 1)]
    assert sequence_metrics(each) == pytest.approx(
        {
            "perplexity": (2 * math.exp(2) + math.exp(4) + math.exp(6)) / 4,
            "perplexity_of_mean": math.exp(28 / 8),
            "accuracy": 50.0,
            "perplexity_hidden": math.exp(4),
            "accuracy_hidden": 0.0,
        }
    )


def test_sum_over_batches_no_examples_has_no_metrics() -> None:
    none = sum_over_batches(iter(()), Preparation(), devices=2, batch_size=4)
    assert none.pop("log_exponentials").tolist() == [-LARGEST_LOSS] * 2  # of nothing at all
    assert all(one.tolist() == [0.0, 0.0] for one in none.values())
    assert sequence_metrics([{name: one[0] for name, one in none.items()}]) == sequence_metrics([]) == {}


@pytest.mark.parametrize("logit", [-1e30, -math.inf, math.nan])
def test_sum_over_batches_diverged_device_is_finite_with_infinite_perplexity(logit: float) -> None:
    """It must neither be refused, which would flatter those it is averaged with, nor stop the run."""
    logits = torch.zeros(2, 1, 3, 2)
    logits[1, 0, 0, 0] = logit
    batch = Batch(torch.zeros(2, 1, 3, dtype=torch.int64), torch.zeros(2, 1, 3, dtype=torch.int64))
    answers = [(batch, logits, torch.ones(2, 1, dtype=torch.bool))]
    sums = sum_over_batches(answers, Preparation(mask_token=1), devices=2, batch_size=4)
    assert all(bool((one.abs() <= LARGEST_LOSS).all()) for one in sums.values())
    sound, lost = ({name: one[device] for name, one in sums.items()} for device in (0, 1))
    assert sequence_metrics([sound])["perplexity"] == pytest.approx(2)
    assert sequence_metrics([lost])["perplexity"] == sequence_metrics([sound, lost])["perplexity"] == math.inf
    assert sequence_metrics([sound, lost])["perplexity_of_mean"] == math.inf
    assert sequence_metrics([sound])["accuracy"] == 100.0
