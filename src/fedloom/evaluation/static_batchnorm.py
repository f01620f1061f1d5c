"""Static batch norm's statistics: one question to the devices before a model is judged. HeteroFL, section 3.

Every batch counts the same: the statistics are the mean of batch means and the mean of unbiased batch variances.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from ..fleet import Ask, Device, Fleet, Tier, parameters
from ..models import Model
from ..settings import Count
from ..tensors import Parcel, Tensors, beside, combine
from ..training import Client, Layout, Outcome, Schedule, on_device


def sums(model: Model, inbox: Parcel) -> Layout:
    dtype = next(iter(inbox["weights"].values())).dtype
    return {name: (tuple(shape), dtype) for name, shape in model.statistics().items()}


def one_count(model: Model, inbox: Parcel) -> Layout:
    return {"batches": ((), torch.float32)}


@dataclass(frozen=True)
class StaticBatchNorm:
    """`pooled`: batches mix the data of all devices, as published, which only a simulation can. `per_device`: each
    device that can carry the model sums over its own batches. `max_batches` bounds what is looked at."""

    query: Literal["pooled", "per_device"] = "pooled"
    batch_size: Count = 50
    max_batches: Count | None = None

    def fill(self, weights: Tensors, tier: Tier, fleet: Fleet, ask: Ask, round_number: int) -> Tensors:
        """The weights and the statistics they need to be judged, at one tier."""
        if not tier.model.statistics():
            return weights
        asked = [fleet.pool(tier)] if self.query == "pooled" else _able(fleet, tier, round_number)
        task = replace(self.collect, schedule=Schedule(self.batch_size))
        replies = list(ask(task, {device: {"weights": weights} for device in asked}))
        replies.sort(key=lambda reply: reply.device.name)
        batches = sum(reply.sent["count"]["batches"].double() for reply in replies)
        total = combine(lambda *each: torch.stack(each).double().sum(0), *(reply.sent["sums"] for reply in replies))
        return {**weights, **combine(lambda one: (one / batches).to(next(iter(weights.values())).dtype), total)}

    @on_device(sends={"sums": sums, "count": one_count})
    def collect(self, client: Client, inbox: Parcel) -> Outcome:
        total, batches = batch_sums(client, inbox["weights"], self.max_batches)
        return Outcome(send={"sums": total, "count": {"batches": batches}})


@torch.no_grad()
def batch_sums(client: Client, weights: Tensors, max_batches: int | None) -> tuple[dict[str, Tensor], Tensor]:
    """Sums of every batch's statistics over the plan, and how many batches each device had: [K]."""
    steps = client.plan[:max_batches]
    total: dict[str, Tensor] = {}
    for step in steps:
        seen = client.model.batch_statistics(weights, client.batch(step).x)
        mine = {name: beside(step.working.to(one), one) * one for name, one in seen.items()}
        total = combine(torch.add, total, mine) if total else mine
    return total, torch.stack([step.working for step in steps]).sum(0)


def own_statistics(client: Client, weights: Tensors) -> dict[str, Tensor]:
    """A device's own weights with the statistics of its own data."""
    if not client.model.statistics():
        return dict(weights)
    total, batches = batch_sums(client, weights, None)
    return {**weights, **combine(lambda one: one / beside(batches.to(one), one), total)}


def _able(fleet: Fleet, tier: Tier, round_number: int) -> list[Device]:
    """Devices that can carry this tier's model, each as if it were of this tier."""
    size = parameters(tier.model.shapes())
    able = (d for d in fleet.devices(round_number) if parameters(d.model.shapes()) >= size)
    return [replace(d, tier=tier.name, model=tier.model, footprint=tier.footprint) for d in able]
