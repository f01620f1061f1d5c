"""Subnets drawn at every step and trained through the net that contains them (FedSup, FjORD).

A subnet's weights are views of the large net's, so its loss has gradients there and nothing is copied back.
"""

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from ..footprints import subnet_footprint
from ..models import Model, StepSeeds
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


def subnet_logits(subnets: Sequence[Model], supernet: Model, weights: Tensors, batch: Batch) -> Tensor:
    """Run each device's batch through its subnet.

    Parameters
    ----------
    subnets : one subnet for all devices, or one for each.
    supernet : the model that contains them.
    weights : the supernet's weights, [K, ...], which get the gradients.
    batch : the batch.

    Returns
    -------
    Logits, [K, batch, classes]; zero for devices that do not take the step.
    """
    if len(subnets) == 1:
        subnet = subnets[0]
        return subnet(subnet_footprint(subnet, supernet).read(weights), batch.x, batch.step_seeds).logits
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
