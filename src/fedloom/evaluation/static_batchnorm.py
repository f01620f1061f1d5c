"""Static batch norm's statistics: one question to the devices before a model is judged. HeteroFL, section 3.

Every batch counts the same: the statistics are the mean of batch means and the mean of unbiased batch variances.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from ..fleet import Ask, Device, Fleet, Reply, Tier, parameters
from ..models import Model
from ..settings import Count
from ..tensors import Parcel, Tensors, beside, combine
from ..training import Client, Layout, Outcome, Schedule, on_device, shaped


def sums(model: Model, inbox: Parcel) -> Layout:
    dtype = next(iter(inbox["weights"].values())).dtype
    return {name: (tuple(shape), dtype) for name, shape in model.statistics().items()}


@dataclass(frozen=True)
class StaticBatchNorm:
    """`pooled`: batches mix the data of all devices, as published, which only a simulation can. `per_device`: each
    device that can carry the model sums over its own batches. `max_batches` bounds what is looked at."""

    query: Literal["pooled", "per_device"] = "pooled"
    batch_size: Count = 50
    max_batches: Count | None = None

    def fill(self, models: Mapping[Tier, Tensors], fleet: Fleet, ask: Ask, round_number: int) -> dict[Tier, Tensors]:
        """Every tier's weights with the statistics they need to be judged, by one question for all."""
        task = replace(self.collect, schedule=Schedule(self.batch_size), address=("statistics", "collect"))
        inboxes = {
            device: {"weights": weights}
            for tier, weights in models.items()
            if tier.model.statistics()
            for device in ([fleet.pool(tier)] if self.query == "pooled" else _able(fleet, tier, round_number))
        }
        replies = sorted(ask(task, inboxes), key=lambda reply: reply.device.name) if inboxes else []
        of_tier = {tier: [reply for reply in replies if reply.device.tier == tier.name] for tier in models}
        return {tier: {**weights, **_mean(tier.model, of_tier[tier])} for tier, weights in models.items()}

    @on_device(sends={"sums": sums, "count": shaped(batches=((), torch.int32))})
    def collect(self, client: Client, inbox: Parcel) -> Outcome:
        total, batches = batch_sums(client, inbox["weights"], self.max_batches)
        return Outcome(send={"sums": total, "count": {"batches": batches}})


def _mean(model: Model, replies: Sequence[Reply]) -> Tensors:
    """Sums over counts; a model that has diverged has no statistics, and must not pass for one that has."""
    batches = sum(int(reply.sent["count"]["batches"]) for reply in replies)
    if not batches:
        return {name: torch.full(size, torch.nan) for name, size in model.statistics().items()}
    total = combine(lambda *each: torch.stack(each).double().sum(0), *(reply.sent["sums"] for reply in replies))
    return combine(lambda one: (one / batches).to(torch.get_default_dtype()), total)


@torch.no_grad()
def batch_sums(client: Client, weights: Tensors, max_batches: int | None) -> tuple[dict[str, Tensor], Tensor]:
    """Sums of every batch's statistics over the plan, and how many batches each device had: [K]."""
    devices = len(client.seen_labels)
    total = {name: torch.zeros(devices, *shape) for name, shape in client.model.statistics().items()}
    batches = torch.zeros(devices, dtype=torch.int32)
    for step in client.plan[:max_batches]:
        seen = client.model.batch_statistics(weights, client.batch(step).x)
        counts = step.working.bool() & finite(seen)  # one example on one pixel has no variance to tell
        total = {name: sums + torch.where(beside(counts, sums), seen[name], 0) for name, sums in total.items()}
        batches += counts
    return total, batches


def finite(tensors: Tensors) -> Tensor:
    """Which devices' tensors are finite throughout: [K]."""
    each = [torch.isfinite(tensor).reshape(len(tensor), -1).all(1) for tensor in tensors.values()]
    return torch.stack(each).all(0)


def own_statistics(client: Client, weights: Tensors) -> dict[str, Tensor]:
    """A device's own weights with the statistics of its own data."""
    if not client.model.statistics():
        return dict(weights)
    total, batches = batch_sums(client, weights, None)
    return {**weights, **combine(lambda one: one / beside(batches.to(one), one), total)}


def _able(fleet: Fleet, tier: Tier, round_number: int) -> list[Device]:
    """Devices that can carry this tier's model, each as if it were of this tier; all, where tiers are redrawn."""
    size = 0 if fleet.assignment == "redrawn" else parameters(tier.model.shapes())
    able = (d for d in fleet.devices(round_number) if parameters(d.model.shapes()) >= size)
    return [replace(d, tier=tier.name, model=tier.model, footprint=tier.footprint) for d in able]
