"""Batch-norm statistics over a device's own examples, every batch with the same weight."""

import torch
from torch import Tensor

from ..tensors import Tensors, combine, per_device
from .client import Client


@torch.no_grad()
def sum_batch_statistics(client: Client, weights: Tensors, max_batches: int | None) -> tuple[dict[str, Tensor], Tensor]:
    """Sums of the batches' means and variances over the plan, and the number of batches of each device: [K]."""
    devices = len(client.seen_labels)
    total = {name: torch.zeros(devices, *shape) for name, shape in client.model.statistics().items()}
    batches = torch.zeros(devices, dtype=torch.int32)
    for step in client.plan[:max_batches]:
        statistics = client.model.batch_statistics(weights, client.batch(step).x)
        counts = step.active.bool() & _is_finite(statistics)  # a single value has no variance
        for name, sums in total.items():
            sums += torch.where(per_device(counts, sums), statistics[name], 0)
        batches += counts
    return total, batches


def with_batchnorm_statistics(client: Client, weights: Tensors) -> dict[str, Tensor]:
    """The weights with the statistics of the device's own data, unless they contain statistics already."""
    if client.model.statistics().keys() <= weights.keys():
        return dict(weights)
    total, batches = sum_batch_statistics(client, weights, None)
    return {**weights, **combine(lambda sums: sums / per_device(batches.to(sums), sums), total)}


def _is_finite(tensors: Tensors) -> Tensor:
    """[K]: True for devices whose tensors are all finite."""
    each = [torch.isfinite(tensor).reshape(len(tensor), -1).all(1) for tensor in tensors.values()]
    return torch.stack(each).all(0)
