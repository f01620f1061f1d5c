"""Metrics of models that predict every pixel, from sums that add up over examples and devices.

The logits of all pixels of a test set would not fit into memory. An example has as sums how many of its pixels of a
class (row) are predicted as which class (column), and the sum of their losses.
"""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import functional as F

from ..client import Batch
from ..data import IGNORED


def sum_pixels(logits: Tensor, labels: Tensor) -> Tensor:
    """[..., height, width, classes], [..., height, width] -> [..., classes * classes + 1], in double precision."""
    classes, leading = logits.shape[-1], labels.shape[:-2]
    losses = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none", ignore_index=IGNORED)
    flat, counted = labels.flatten(), labels.flatten() != IGNORED
    examples = torch.arange(leading.numel(), device=flat.device).repeat_interleave(labels.shape[-2] * labels.shape[-1])
    cells = (examples * classes + flat.masked_fill(~counted, 0)) * classes + logits.argmax(-1).flatten()
    counts = torch.zeros(leading.numel() * classes**2, dtype=torch.int64, device=flat.device)
    counts = counts.index_add(0, cells, counted.long()).view(*leading, classes**2)
    return torch.cat([counts.double(), losses.view(*leading, -1).double().sum(-1, keepdim=True)], -1)


def sum_over_batches(
    predictions: Iterable[tuple[Batch, Tensor, Tensor]], devices: int, classes: int
) -> tuple[Tensor, Tensor]:
    """The sums over all examples of each device that are not padding, [K, sums], and how many there are, [K]."""
    sums = torch.zeros(devices, classes**2 + 1, dtype=torch.float64)
    examples = torch.zeros(devices, dtype=torch.float64)
    for batch, logits, real in predictions:
        sums, examples = sums.to(real.device), examples.to(real.device)
        sums += torch.where(real.unsqueeze(-1), sum_pixels(logits, batch.y), 0.0).sum(1)
        examples += real.sum(1)
    return sums, examples


def split_sums(sums: Tensor) -> tuple[Tensor, Tensor]:
    """Sums over examples -> how many pixels of a class are predicted as which, and their mean loss."""
    counts = sums[:-1].view(round((len(sums) - 1) ** 0.5), -1)
    return counts, sums[-1] / counts.sum()


def mean_loss(counts: Tensor, loss: Tensor) -> float:
    """Mean cross entropy over pixels."""
    return float(loss)


def accuracy(counts: Tensor, loss: Tensor) -> float:
    """Percent of the pixels that are predicted correctly."""
    return 100 * float(counts.diagonal().sum() / counts.sum())


def recalls(counts: Tensor, loss: Tensor) -> dict[str, float]:
    """Percent of the pixels of a class that are predicted correctly, by class; NaN for classes without pixels."""
    return {str(label): value for label, value in enumerate(_recalls(counts).tolist())}


def balanced_accuracy(counts: Tensor, loss: Tensor) -> float:
    """Mean recall in percent over classes that have pixels."""
    return float(_recalls(counts).nanmean())


def mean_iou(counts: Tensor, loss: Tensor) -> float:
    """Intersection over union in percent, mean over the classes that occur among labels or predictions."""
    union = counts.sum(0) + counts.sum(1) - counts.diagonal()
    return 100 * float((counts.diagonal()[union > 0] / union[union > 0]).mean())


def f1(average: str, counts: Tensor, loss: Tensor) -> float:
    """F1 score (Dice coefficient) in percent, over the classes that occur among labels or predictions."""
    hits, sizes = counts.diagonal(), counts.sum(0) + counts.sum(1)
    if average == "micro":
        return 100 * float(2 * hits.sum() / sizes.sum())
    occurring = sizes > 0
    scores, weights = 2 * hits[occurring] / sizes[occurring], counts.sum(1)[occurring]
    return 100 * float(scores.mean() if average == "macro" else (scores * weights).sum() / weights.sum())


def _recalls(counts: Tensor) -> Tensor:
    return 100 * counts.diagonal() / counts.sum(1)
