"""Metrics of models that predict at every position, from sums that add up over devices.

So a device uploads a few sums instead of its predictions for every token.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from ..client import Batch, shaped
from ..data import IGNORED, Preparation
from ..tensors import Tensors
from .metrics import is_correct, percent, perplexity_from_loss

LARGEST_LOSS = 1e17  # stands for an infinite loss, since engines refuse values that are not finite

SEQUENCE_SUMS = shaped(
    rows=((), torch.float64),
    log_exponentials=((), torch.float64),  # log of the sum over batches of rows * exp(mean loss)
    total=((), torch.float64),
    loss=((), torch.float64),
    correct=((), torch.float64),
    hidden_total=((), torch.float64),
    hidden_loss=((), torch.float64),
    hidden_correct=((), torch.float64),
)


def score_positions(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """[..., classes], [...] -> the loss of every prediction, and whether it is correct."""
    losses = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none")
    return losses.view(labels.shape), is_correct(logits, labels)


def find_masked(preparation: Preparation, x: Tensor) -> Tensor | None:
    """Which positions are masked; None if the preparation never masks tokens."""
    return None if preparation.mask_token is None else x == preparation.mask_token


def row_sums(
    losses: Tensor, correct: Tensor, masked: Tensor | None, counted: Tensor | None = None
) -> dict[str, Tensor]:
    """Sums over the positions that count: [devices, rows, ...] each -> [devices, rows].

    The loss of a position whose label is to be ignored is zero, and its prediction is not correct.
    """
    masked = torch.zeros_like(correct) if masked is None else masked
    counted = torch.ones_like(correct) if counted is None else counted
    masked = masked & counted
    values = {
        "total": counted,
        "loss": losses,
        "correct": correct,
        "hidden_total": masked,
        "hidden_loss": torch.where(masked, losses, 0.0),
        "hidden_correct": correct & masked,
    }
    return {name: value.double().flatten(2).sum(2) for name, value in values.items()}


def device_sums(rows: Tensors, real: Tensor, batch_size: int) -> dict[str, Tensor]:
    """Sums over rows that are not padding: [devices, rows] each -> [devices].

    Perplexity is defined by batches of `batch_size` rows, whatever the batches of the forward passes were.
    """
    kept = {name: torch.where(real, sums, 0.0) for name, sums in rows.items()}
    batches = (sums.split(batch_size, 1) for sums in (kept["loss"], kept["total"], real))
    logs = [
        count.sum(1).double().log() + loss.sum(1) / total.sum(1).clamp_min(1)
        for loss, total, count in zip(*batches, strict=True)
    ]
    result = {"rows": real.sum(1).double(), "log_exponentials": torch.stack(logs).logsumexp(0)}
    return {**result, **{name: sums.sum(1) for name, sums in kept.items()}}


def sum_over_batches(
    predictions: Iterable[tuple[Batch, Tensor, Tensor]], preparation: Preparation, devices: int, batch_size: int
) -> dict[str, Tensor]:
    """The sums of devices' predictions: batches, logits, and which rows are not padding."""
    parts = [
        (row_sums(*score_positions(logits, batch.y), find_masked(preparation, batch.x), batch.y != IGNORED), real)
        for batch, logits, real in predictions
    ]
    if not parts:
        empty = torch.zeros(devices, 0, 1)
        parts = [(row_sums(empty, empty > 0, None), torch.zeros(devices, 0, dtype=torch.bool))]
    rows = {name: torch.cat([part[name] for part, _ in parts], 1) for name in parts[0][0]}
    sums = device_sums(rows, torch.cat([real for _, real in parts], 1), batch_size)
    return {name: value.nan_to_num(nan=LARGEST_LOSS).clamp(-LARGEST_LOSS, LARGEST_LOSS) for name, value in sums.items()}


SEQUENCE_METRICS: Mapping[str, Sequence[str]] = {
    "perplexity": ("perplexity", "perplexity_of_mean", "perplexity_hidden"),
    "accuracy": ("accuracy", "accuracy_hidden"),
    "loss": ("loss",),
}
"""The metrics that can be computed from sums, and their rows."""

DEFAULT_SEQUENCE_METRICS = ("perplexity", "accuracy")


def sequence_metrics(sums: Sequence[Tensors], wanted: Sequence[str] = DEFAULT_SEQUENCE_METRICS) -> dict[str, float]:
    """Metrics over all devices' predictions, each with the same weight; empty if there are none."""
    total = {name: sum(float(one[name]) for one in sums) for name in (sums[0] if sums else ())}
    if not total.get("total"):
        return {}
    metrics = {
        "perplexity": sum(perplexity_from_loss(float(one["log_exponentials"])) for one in sums) / total["rows"],
        "perplexity_of_mean": perplexity_from_loss(total["loss"] / total["total"]),
        "accuracy": percent(total["correct"], total["total"]),
    }
    if total["hidden_total"]:
        metrics["perplexity_hidden"] = perplexity_from_loss(total["hidden_loss"] / total["hidden_total"])
        metrics["accuracy_hidden"] = percent(total["hidden_correct"], total["hidden_total"])
    metrics["loss"] = total["loss"] / total["total"]
    rows = [row for metric in wanted for row in SEQUENCE_METRICS[metric]]
    return {name: value for name, value in metrics.items() if name in rows}
