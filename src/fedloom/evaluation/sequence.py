"""Where a model answers at every position: sums from which perplexity and accuracy follow, and which add up over
devices, so that a device need not send what it thinks of each word."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from ..client import Batch, shaped
from ..data import Preparation
from ..tensors import Tensors
from .metrics import exponential, is_correct, percent

LARGEST_LOSS = 1e17  # a loss, of which the exponential is infinite; engines do not admit what is not finite, or absurd

SUMS = shaped(
    rows=((), torch.float64),
    log_exponentials=((), torch.float64),  # of the sum over batches, rows times the exponential of the mean loss
    total=((), torch.float64),
    loss=((), torch.float64),
    correct=((), torch.float64),
    hidden_total=((), torch.float64),
    hidden_loss=((), torch.float64),
    hidden_correct=((), torch.float64),
)


def score_positions(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """[..., classes], [...] -> the loss of every answer, and whether it is right."""
    losses = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none")
    return losses.view(labels.shape), is_correct(logits, labels)


def hidden_positions(preparation: Preparation, x: Tensor) -> Tensor | None:
    """Which positions the model does not see; None where nothing is ever hidden."""
    return None if preparation.mask_token is None else x == preparation.mask_token


def row_sums(losses: Tensor, right: Tensor, hidden: Tensor | None) -> dict[str, Tensor]:
    """Over positions: [devices, rows, ...] each -> [devices, rows]."""
    unseen = torch.zeros_like(right) if hidden is None else hidden
    each = {
        "total": torch.ones_like(right),
        "loss": losses,
        "correct": right,
        "hidden_total": unseen,
        "hidden_loss": torch.where(unseen, losses, 0.0),
        "hidden_correct": right & unseen,
    }
    return {name: one.double().flatten(2).sum(2) for name, one in each.items()}


def device_sums(rows: Tensors, real: Tensor, batch_size: int) -> dict[str, Tensor]:
    """Over rows: [devices, rows] each, `real` says which are no padding -> [devices]. `batch_size` rows make a batch,
    however many were judged at a time: perplexity must not depend on how much fits into memory."""
    held = {name: torch.where(real, one, 0.0) for name, one in rows.items()}
    batches = (one.split(batch_size, 1) for one in (held["loss"], held["total"], real))
    logs = [
        there.sum(1).double().log() + loss.sum(1) / total.sum(1).clamp_min(1)
        for loss, total, there in zip(*batches, strict=True)
    ]
    made = {"rows": real.sum(1).double(), "log_exponentials": torch.stack(logs).logsumexp(0)}
    return {**made, **{name: one.sum(1) for name, one in held.items()}}


def sum_over_batches(
    answers: Iterable[tuple[Batch, Tensor, Tensor]], preparation: Preparation, devices: int, batch_size: int
) -> dict[str, Tensor]:
    """The sums of what devices answered, batch by batch: questions, logits, and which of them are no padding."""
    parts = [
        (row_sums(*score_positions(logits, batch.y), hidden_positions(preparation, batch.x)), real)
        for batch, logits, real in answers
    ]
    if not parts:
        nothing = torch.zeros(devices, 0, 1)
        parts = [(row_sums(nothing, nothing > 0, None), torch.zeros(devices, 0, dtype=torch.bool))]
    rows = {name: torch.cat([part[name] for part, _ in parts], 1) for name in parts[0][0]}
    sums = device_sums(rows, torch.cat([real for _, real in parts], 1), batch_size)
    return {name: one.nan_to_num(nan=LARGEST_LOSS).clamp(-LARGEST_LOSS, LARGEST_LOSS) for name, one in sums.items()}


def position_metrics(sums: Sequence[Tensors]) -> dict[str, float]:
    """Of all devices' answers, counted alike; nothing where nothing was asked."""
    total = {name: sum(float(one[name]) for one in sums) for name in (sums[0] if sums else ())}
    if not total.get("total"):
        return {}
    found = {
        "perplexity": sum(exponential(float(one["log_exponentials"])) for one in sums) / total["rows"],
        "perplexity_of_mean": exponential(total["loss"] / total["total"]),
        "accuracy": percent(total["correct"], total["total"]),
    }
    if total["hidden_total"]:
        found["perplexity_hidden"] = exponential(total["hidden_loss"] / total["hidden_total"])
        found["accuracy_hidden"] = percent(total["hidden_correct"], total["hidden_total"])
    return found
