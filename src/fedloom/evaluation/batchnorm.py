"""Static batch norm: one request to the devices collects statistics before evaluation. HeteroFL, section 3.

The statistics are the mean of batch means and the mean of unbiased batch variances, every batch with the same weight.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from ..client import Client, ClientResult, Layout, Schedule, on_device, shaped, sum_batch_statistics
from ..fleet import Ask, Device, Fleet, Reply, Tier, count_parameters, in_parts
from ..models import Model
from ..seeds import COLLECT_STATISTICS
from ..settings import Count
from ..tensors import Parcel, Tensors, combine

POOL_PARTS = 8
"""Into so many parts all examples are divided, which are the lanes of a narrow net or the work of several processes."""


def statistics_layout(model: Model, inbox: Parcel, examples: int) -> Layout:
    dtype = next(iter(inbox["weights"].values())).dtype
    return {name: (tuple(shape), dtype) for name, shape in model.statistics().items()}


@dataclass(frozen=True)
class BatchNormStatistics:
    """How the statistics of static batch norm are collected before models are evaluated.

    Parameters
    ----------
    query : "pooled": over batches of the data of all devices together, as published, which is possible only in
        simulation; "per_device": over the batches of each device that can run the model.
    batch_size : examples per batch.
    max_batches : at most so many batches per device; None: all.
    """

    query: Literal["pooled", "per_device"] = "pooled"
    batch_size: Count = 50
    max_batches: Count | None = None

    def fill(self, models: Mapping[Tier, Tensors], fleet: Fleet, ask: Ask, round_number: int) -> dict[Tier, Tensors]:
        """Every tier's weights with the statistics that evaluation needs, from one request for all tiers.

        Parameters
        ----------
        models : the weights, by tier.
        fleet : the fleet.
        ask : asks its devices.
        round_number : the round.
        """
        task = replace(self.collect, schedule=Schedule(self.batch_size), ref=("statistics", "collect"))
        inboxes = {
            device: {"weights": weights}
            for tier, weights in models.items()
            if tier.model.statistics()
            for device in self._devices(fleet, tier, round_number)
        }
        replies = (
            sorted(ask(task, inboxes), key=lambda reply: (reply.device.name, reply.device.part)) if inboxes else []
        )
        of_tier = {tier: [reply for reply in replies if reply.device.tier == tier.name] for tier in models}
        of_tier = {tier: own if _is_whole(own) else [] for tier, own in of_tier.items()}
        return {tier: {**weights, **_mean_statistics(tier.model, of_tier[tier])} for tier, weights in models.items()}

    @on_device(sends={"sums": statistics_layout, "count": shaped(batches=((), torch.int32))}, stream=COLLECT_STATISTICS)
    def collect(self, client: Client, inbox: Parcel) -> ClientResult:
        """Sum the statistics of a device's batches.

        Parameters
        ----------
        client : the devices.
        inbox : the received parcel, with the bundle "weights".
        """
        total, batches = sum_batch_statistics(client, inbox["weights"], self.max_batches)
        return ClientResult(upload={"sums": total, "count": {"batches": batches}})

    def _devices(self, fleet: Fleet, tier: Tier, round_number: int) -> list[Device]:
        if self.query == "per_device":
            return _capable_devices(fleet, tier, round_number)
        # the first batches are all in the first part
        return in_parts(fleet.pooled_device(tier), POOL_PARTS if self.max_batches is None else 1)


def _is_whole(replies: Sequence[Reply]) -> bool:
    """False if only some parts of a pool have replied: those of a diverged model may be refused."""
    parts = Counter(reply.device.name for reply in replies)
    return all(parts[reply.device.name] == reply.device.part[1] for reply in replies)


def _mean_statistics(model: Model, replies: Sequence[Reply]) -> Tensors:
    """NaN for a diverged model, whose replies are refused: it must not be evaluated with made-up statistics."""
    batches = sum(int(reply.upload["count"]["batches"]) for reply in replies)
    if not batches:
        return {name: torch.full(size, torch.nan) for name, size in model.statistics().items()}
    total = combine(lambda *each: torch.stack(each).double().sum(0), *(reply.upload["sums"] for reply in replies))
    return combine(lambda sums: (sums / batches).to(torch.get_default_dtype()), total)


def _capable_devices(fleet: Fleet, tier: Tier, round_number: int) -> list[Device]:
    """Devices whose own model is at least as large, as if of this tier; all of them if tiers are redrawn."""
    size = 0 if fleet.assignment == "redrawn" else count_parameters(tier.model.shapes())
    known = [fleet.device(index, round_number) for index in range(fleet.size) if index not in fleet.holdout_devices]
    capable = (device for device in known if count_parameters(device.model.shapes()) >= size)
    return [replace(device, tier=tier.name, model=tier.model, footprint=tier.footprint) for device in capable]
