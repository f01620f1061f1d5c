"""Static batch norm's statistics: one question to the devices before a model is judged. HeteroFL, section 3.

Every batch counts the same: the statistics are the mean of batch means and the mean of unbiased batch variances.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from ..client import Client, ClientResult, Layout, Schedule, sum_batch_statistics, on_device, shaped
from ..fleet import Ask, Device, Fleet, Reply, Tier, count_parameters
from ..models import Model
from ..seeds import COLLECT_STATISTICS
from ..settings import Count
from ..tensors import Parcel, Tensors, combine


def sums(model: Model, inbox: Parcel, examples: int) -> Layout:
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
        task = replace(self.collect, schedule=Schedule(self.batch_size), ref=("statistics", "collect"))
        inboxes = {
            device: {"weights": weights}
            for tier, weights in models.items()
            if tier.model.statistics()
            for device in ([fleet.pooled_device(tier)] if self.query == "pooled" else _able(fleet, tier, round_number))
        }
        replies = sorted(ask(task, inboxes), key=lambda reply: reply.device.name) if inboxes else []
        of_tier = {tier: [reply for reply in replies if reply.device.tier == tier.name] for tier in models}
        return {tier: {**weights, **_mean(tier.model, of_tier[tier])} for tier, weights in models.items()}

    @on_device(sends={"sums": sums, "count": shaped(batches=((), torch.int32))}, stream=COLLECT_STATISTICS)
    def collect(self, client: Client, inbox: Parcel) -> ClientResult:
        total, batches = sum_batch_statistics(client, inbox["weights"], self.max_batches)
        return ClientResult(upload={"sums": total, "count": {"batches": batches}})


def _mean(model: Model, replies: Sequence[Reply]) -> Tensors:
    """Sums over counts; a model that has diverged has no statistics, and must not pass for one that has."""
    batches = sum(int(reply.upload["count"]["batches"]) for reply in replies)
    if not batches:
        return {name: torch.full(size, torch.nan) for name, size in model.statistics().items()}
    total = combine(lambda *each: torch.stack(each).double().sum(0), *(reply.upload["sums"] for reply in replies))
    return combine(lambda one: (one / batches).to(torch.get_default_dtype()), total)


def _able(fleet: Fleet, tier: Tier, round_number: int) -> list[Device]:
    """Devices that can carry this tier's model, each as if it were of this tier; all, where tiers are redrawn."""
    size = 0 if fleet.assignment == "redrawn" else count_parameters(tier.model.shapes())
    known = [fleet.device(index, round_number) for index in range(fleet.size) if index not in fleet.holdout_devices]
    able = (d for d in known if count_parameters(d.model.shapes()) >= size)
    return [replace(d, tier=tier.name, model=tier.model, footprint=tier.footprint) for d in able]
