"""Subnets drawn at every step and trained through the net that contains them (FedSup, FjORD).

A subnet's weights are views of the large net's, or differentiable copies, so its loss has gradients there.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from ..footprints import Footprint, subnet_footprint
from ..models import Model, StepSeeds
from ..models.lanes import read_parts
from ..seeds import SUBNET, generator
from ..tensors import Tensors
from .client import Batch

SubnetStream = Literal["device", "shared"]
"""Each device draws its own subnet of a step, as published, or all draw the same one, so that they run as a block."""


def draw_subnets(
    choose: Callable[[np.random.Generator], Model], step_seeds: StepSeeds | None, stream: SubnetStream, number: int = 0
) -> list[Model]:
    """Draw one subnet for all devices of a step, or one for each.

    Parameters
    ----------
    choose : draws a subnet with a random generator.
    step_seeds : the seeds of the step.
    stream : "device": one subnet for each device; "shared": one for all.
    number : distinguishes several draws in one step.
    """
    if step_seeds is None:
        raise ValueError("subnets are drawn only in training")
    seeds = (step_seeds.common,) if stream == "shared" else step_seeds.per_device
    return [choose(generator(seed, SUBNET, number)) for seed in seeds]


def subnet_logits(drawn: Sequence[Sequence[Model]], supernet: Model, weights: Tensors, batch: Batch) -> list[Tensor]:
    """Run each device's batch through its subnets.

    All draws of a step are run at once, so that their gradients are added up at once.

    Parameters
    ----------
    drawn : of each draw, one subnet for all devices, or one for each.
    supernet : the model that contains them.
    weights : the supernet's weights, [K, ...], which get the gradients.
    batch : the batch.

    Returns
    -------
    Of each draw the logits, [K, batch, classes]; zero for devices that do not take the step.
    """
    shared = [subnets[0] for subnets in drawn if len(subnets) == 1]
    parts = iter(_read_shared(shared, supernet, weights))
    return [
        subnets[0](next(parts), batch.x, batch.step_seeds).logits
        if len(subnets) == 1
        else _logits_one_by_one(subnets, supernet, weights, batch)
        for subnets in drawn
    ]


def _read_shared(subnets: Sequence[Model], supernet: Model, weights: Tensors) -> list[dict[str, Tensor]]:
    """The weights of subnets that all devices share."""
    footprints = [subnet_footprint(subnet, supernet) for subnet in subnets]
    if all(model.trains_interleaved() for model in (supernet, *subnets)) and subnets:
        ranges = [one for footprint in footprints if (one := _ranges(footprint)) is not None]
        found = read_parts(weights, ranges) if len(ranges) == len(footprints) else None
        if found is not None:
            return found
    return [footprint.read(weights) for footprint in footprints]


@lru_cache(maxsize=64)
def _ranges(footprint: Footprint) -> dict[str, tuple[tuple[int, int], ...]] | None:
    """The first entry and the end of each axis; None if some entries do not follow each other."""
    if any(not isinstance(axis, slice) for block in footprint.blocks.values() for axis in block):
        return None
    return {
        name: tuple((axis.start or 0, axis.stop) for axis in block if isinstance(axis, slice))
        for name, block in footprint.blocks.items()
    }


def _logits_one_by_one(subnets: Sequence[Model], supernet: Model, weights: Tensors, batch: Batch) -> Tensor:
    running = batch.step_seeds.running if batch.step_seeds else None
    logits: dict[int, Tensor] = {}
    for k, subnet in enumerate(subnets):
        if running is not None and k not in running:
            continue
        part = {name: weight[k : k + 1] for name, weight in subnet_footprint(subnet, supernet).read(weights).items()}
        seeds = batch.step_seeds and StepSeeds(batch.step_seeds.per_device[k : k + 1])
        logits[k] = subnet(part, batch.x[k : k + 1], seeds).logits
    idle = torch.zeros_like(next(iter(logits.values())))
    return torch.cat([logits.get(k, idle) for k in range(len(subnets))])
