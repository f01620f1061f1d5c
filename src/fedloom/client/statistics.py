"""Batch norm's statistics as a device has them: over its own examples, every batch counting the same."""

import torch
from torch import Tensor

from ..tensors import Tensors, combine, per_device
from .client import Client


@torch.no_grad()
def batch_sums(client: Client, weights: Tensors, max_batches: int | None) -> tuple[dict[str, Tensor], Tensor]:
    """Sums of every batch's statistics over the plan, and how many batches each device had: [K]."""
    devices = len(client.seen_labels)
    total = {name: torch.zeros(devices, *shape) for name, shape in client.model.statistics().items()}
    batches = torch.zeros(devices, dtype=torch.int32)
    for step in client.plan[:max_batches]:
        seen = client.model.batch_statistics(weights, client.batch(step).x)
        counts = step.working.bool() & finite(seen)  # one example on one pixel has no variance to tell
        for name, sums in total.items():
            sums += torch.where(per_device(counts, sums), seen[name], 0)
        batches += counts
    return total, batches


def own_statistics(client: Client, weights: Tensors) -> dict[str, Tensor]:
    """A device's own weights with the statistics of its own data, unless they have come with some."""
    if client.model.statistics().keys() <= weights.keys():
        return dict(weights)
    total, batches = batch_sums(client, weights, None)
    return {**weights, **combine(lambda one: one / per_device(batches.to(one), one), total)}


def finite(tensors: Tensors) -> Tensor:
    """Which devices' tensors are finite throughout: [K]."""
    each = [torch.isfinite(tensor).reshape(len(tensor), -1).all(1) for tensor in tensors.values()]
    return torch.stack(each).all(0)
