"""Losses: one number per device, reduced over every axis but the first."""

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional as F

from ..tensors import Tensors
from .client import Batch, Client


def label_loss(client: Client) -> Callable[[Tensors, Batch], Tensor]:
    """The ordinary objective: cross entropy of the model's last exit with the labels."""
    return lambda weights, batch: cross_entropy(client.model(weights, batch.x, batch.draws).logits, batch)


def cross_entropy(logits: Tensor, batch: Batch) -> Tensor:
    """[K, batch, classes] -> [K], the mean over each device's batch."""
    losses = F.cross_entropy(logits.flatten(0, 1), batch.y.flatten(), reduction="none")
    return losses.view_as(batch.y).mean(1)


def mask_logits(logits: Tensor, seen_labels: Tensor, fill: float | None) -> Tensor:
    """Give every class a device has not seen one logit: [K, batch, classes], [K, classes]. None: leave them be."""
    return logits if fill is None else logits.masked_fill(~seen_labels.unsqueeze(-2), fill)
