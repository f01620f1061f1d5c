"""Exact definitions of what is measured."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F


def hits(logits: Tensor, labels: Tensor) -> Tensor:
    """[..., classes], [...] -> truth values; of equal logits the lowest class wins."""
    return logits.argmax(-1) == labels


def percent(correct: float, total: float) -> float:
    return 100.0 * correct / total if total else float("nan")


def log_loss(logits: Tensor, labels: Tensor) -> float:
    """Mean cross entropy."""
    return float(F.cross_entropy(logits.double(), labels))


def perplexities(losses: Tensor, batch_size: int) -> tuple[float, float]:
    """Of losses [rows, positions]: the mean over batches of the exponential of a batch's mean, weighted by rows, as
    HeteroFL reports it; and the exponential of the mean over all."""
    batches = [(float(batch.double().mean()), len(batch)) for batch in losses.split(batch_size)]
    mean_of_exponentials = sum(math.exp(mean) * rows for mean, rows in batches) / len(losses)
    return mean_of_exponentials, math.exp(float(losses.double().mean()))


def unigram_perplexity(seen: Tensor, asked: Tensor, classes: int) -> float:
    """Of a model that knows only how often each word occurs; a word that never does counts as if it did once."""
    counts = torch.bincount(seen.flatten(), minlength=classes).clamp_min(1).double()
    return float((-(counts / counts.sum()).log()[asked.flatten()]).mean().exp())


def per_group(values: Tensor, groups: Tensor, count: int) -> Tensor:
    """Sums of `values` by group number: [count]."""
    return torch.zeros(count, dtype=torch.float64).index_add_(0, groups, values.double())
