"""Definitions of the metrics, and the row that an evaluation writes. Rows are written before any averaging."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Row:
    round: int
    candidate: str  # name of the evaluated target
    tier: str
    device: str  # empty: not of a single device
    test: str  # "global": the test set; "local": devices' own examples; "unseen": those of holdout devices
    metric: str
    value: float


def is_correct(logits: Tensor, labels: Tensor) -> Tensor:
    """[..., classes], [...] -> booleans; the lowest of several classes with equal logits is predicted."""
    return logits.argmax(-1) == labels


def percent(correct: float, total: float) -> float:
    return 100.0 * correct / total if total else float("nan")


def log_loss(logits: Tensor, labels: Tensor) -> float:
    """Mean cross entropy."""
    return float(F.cross_entropy(logits.double(), labels))


def accuracy(logits: Tensor, labels: Tensor) -> float:
    return percent(float(is_correct(logits, labels).sum()), len(labels))


@dataclass(frozen=True)
class Metric:
    """A figure of a model's predictions on a test set: (logits [examples, classes], labels [examples]) -> value."""

    compute: Callable[[Tensor, Tensor], float]
    higher_is_better: bool = False


METRICS: Mapping[str, Metric] = {"accuracy": Metric(accuracy, higher_is_better=True), "loss": Metric(log_loss)}
"""Metrics on the global test set. An `Evaluator` takes any others."""

ACCURACIES = ("accuracy", "initial", "personalized")  # beginnings of row metrics that are accuracies


def metric_sign(metric: str, metrics: Mapping[str, Metric] = METRICS) -> int:
    """1 if higher values of the metric are better, else -1 (losses, costs)."""
    known = metrics.get(metric)
    return 1 if (known.higher_is_better if known else metric.startswith(ACCURACIES)) else -1


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


CostGain = tuple[float, float]
"""(cost, gain)."""


def pareto_front(points: Iterable[CostGain]) -> list[CostGain]:
    """The points that no other dominates, by cost: none costs no more, gains no less, and differs in one of them."""
    front: list[CostGain] = []
    for point in sorted(points, key=lambda point: (point[0], -point[1])):
        if not front or point[1] > front[-1][1] or point == front[-1]:
            front.append(point)
    return front


def hypervolume(points: Iterable[CostGain], reference: CostGain) -> float:
    """The area dominated by the points, up to the largest cost and down to the smallest gain of `reference`."""
    max_cost, min_gain = reference
    corners = pareto_front(point for point in points if point[0] <= max_cost and point[1] >= min_gain)
    steps = pairwise([*corners, (max_cost, min_gain)])
    return sum((next_cost - cost) * (gain - min_gain) for (cost, gain), (next_cost, _) in steps)
