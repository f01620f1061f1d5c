"""Definitions of the metrics, and the row that an evaluation writes. Rows are written before any averaging."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

HIGHER_IS_BETTER = ("accuracy", "initial", "personalized")  # all others, such as losses and costs: lower is better


@dataclass(frozen=True)
class Row:
    round: int
    candidate: str  # name of the evaluated target
    tier: str
    device: str  # empty: not of a single device
    test: str  # "global": the test set; "local": devices' own examples; "unseen": those of holdout devices
    metric: str
    value: float


def metric_sign(metric: str) -> int:
    """1 if higher values of the metric are better, else -1."""
    return 1 if metric.startswith(HIGHER_IS_BETTER) else -1


def is_correct(logits: Tensor, labels: Tensor) -> Tensor:
    """[..., classes], [...] -> booleans; the lowest of several classes with equal logits is predicted."""
    return logits.argmax(-1) == labels


def percent(correct: float, total: float) -> float:
    return 100.0 * correct / total if total else float("nan")


def log_loss(logits: Tensor, labels: Tensor) -> float:
    """Mean cross entropy."""
    return float(F.cross_entropy(logits.double(), labels))


def perplexity_from_loss(mean_loss: float) -> float:
    """exp(mean_loss), infinite if that overflows."""
    return float(torch.tensor(mean_loss, dtype=torch.float64).exp())


def unigram_perplexity(train_tokens: Tensor, test_tokens: Tensor, classes: int) -> float:
    """Perplexity of a model that knows only token frequencies; a token that never occurs counts as occurring once."""
    counts = torch.bincount(train_tokens.flatten(), minlength=classes).clamp_min(1).double()
    return float((-(counts / counts.sum()).log()[test_tokens.flatten()]).mean().exp())


def per_group(values: Tensor, groups: Tensor, count: int) -> Tensor:
    """Sums of `values` by group number: [count]."""
    return torch.zeros(count, dtype=torch.float64).index_add_(0, groups, values.double())
