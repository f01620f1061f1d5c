"""Exact definitions of what is measured.

What a evaluation writes down: who was judged, on what, and how it did. Nothing is averaged before it is written.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


HIGHER_IS_BETTER = ("accuracy", "initial", "personalized")  # all others, such as losses and costs: lower is better


def metric_sign(metric: str) -> int:
    """1 if higher values of the metric are better, else -1."""
    return 1 if metric.startswith(HIGHER_IS_BETTER) else -1


def is_correct(logits: Tensor, labels: Tensor) -> Tensor:
    """[..., classes], [...] -> truth values; of equal logits the lowest class wins."""
    return logits.argmax(-1) == labels


def percent(correct: float, total: float) -> float:
    return 100.0 * correct / total if total else float("nan")


def log_loss(logits: Tensor, labels: Tensor) -> float:
    """Mean cross entropy."""
    return float(F.cross_entropy(logits.double(), labels))


def exponential(mean_loss: float) -> float:
    """Perplexity from a mean loss; a model that is lost beyond numbers has an infinite one."""
    return float(torch.tensor(mean_loss, dtype=torch.float64).exp())


def unigram_perplexity(seen: Tensor, asked: Tensor, classes: int) -> float:
    """Of a model that knows only how often each word occurs; a word that never does counts as if it did once."""
    counts = torch.bincount(seen.flatten(), minlength=classes).clamp_min(1).double()
    return float((-(counts / counts.sum()).log()[asked.flatten()]).mean().exp())


def per_group(values: Tensor, groups: Tensor, count: int) -> Tensor:
    """Sums of `values` by group number: [count]."""
    return torch.zeros(count, dtype=torch.float64).index_add_(0, groups, values.double())


@dataclass(frozen=True)
class Row:
    round: int
    candidate: str
    tier: str
    device: str  # empty: not one device's own
    test: str  # "global": the whole set; "local": devices' own examples; "unseen": those of devices that never train
    metric: str
    value: float
