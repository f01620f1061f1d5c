"""Losses: one number per device, [K], reduced over every axis but the first."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from ..models import Model
from ..tensors import Tensors, combine, inner
from .client import Batch, Client


def label_loss(client: Client) -> Callable[[Tensors, Batch], Tensor]:
    """The ordinary objective: cross entropy of the model's last exit with the labels."""
    return lambda weights, batch: cross_entropy(client.model(weights, batch.x, batch.step_seeds).logits, batch)


def dummy_loss(model: Model) -> Callable[[Tensors, Batch], Tensor]:
    """For profiling and trials without labels: cross entropy of every exit with class 0."""

    def loss(weights: Tensors, batch: Batch) -> Tensor:
        exits = list(model(weights, batch.x, batch.step_seeds).exits.values())
        labeled = replace(batch, y=torch.zeros(exits[-1].shape[:-1], dtype=torch.int64))
        return torch.stack([cross_entropy(logits, labeled) for logits in exits]).sum(0)

    return loss


def cross_entropy(logits: Tensor, batch: Batch) -> Tensor:
    """[K, batch, ..., classes] -> [K], the mean over each device's batch and, if there are several, its positions."""
    losses = F.cross_entropy(
        logits.flatten(0, -2), batch.y.flatten(), reduction="none", label_smoothing=batch.label_smoothing
    )
    return losses.view_as(batch.y).flatten(1).mean(1)


def soft_cross_entropy(logits: Tensor, teacher: Tensor) -> Tensor:
    """[K], cross entropy with the teacher's detached probabilities: in-place distillation."""
    probabilities = teacher.detach().softmax(-1)
    return -(probabilities * logits.log_softmax(-1)).sum(-1).flatten(1).mean(1)


def distance(weights: Tensors, anchor: Tensors) -> Tensor:
    """[K], half the squared distance from the anchor: FedProx's proximal term."""
    difference = combine(lambda weight, start: weight - start, weights, anchor)
    return 0.5 * inner(difference, difference)


def mask_logits(logits: Tensor, seen_labels: Tensor, fill: float | None) -> Tensor:
    """Set the logits of classes that a device has not seen to `fill`; None: leave them.

    Shapes: [K, batch, ..., classes] and [K, classes].
    """
    if fill is None:
        return logits
    inner_axes = [1] * (logits.dim() - 2)
    return logits.masked_fill(~seen_labels.view(len(seen_labels), *inner_axes, logits.shape[-1]), fill)
