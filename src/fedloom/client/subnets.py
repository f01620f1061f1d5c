"""Sub-nets drawn step by step, and trained through the whole net they are parts of (FedSup, FjORD).

A part is read out of the whole, so that its loss has a gradient on the whole's weights: nothing is copied back.
"""

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from ..footprints import part_of
from ..models import Model, StepSeeds
from ..seeds import SUBNET, generator
from ..tensors import Tensors
from .client import Batch

Stream = Literal["device", "shared"]
"""Who draws a step's sub-net: each device its own, as published; or all devices one, so that they run at once."""


def draw_subnets(
    choose: Callable[[np.random.Generator], Model], step_seeds: StepSeeds | None, stream: Stream, number: int = 0
) -> list[Model]:
    """For this step one net for all devices, or one for each; `number` tells the draws of one step apart."""
    if step_seeds is None:
        raise ValueError("sub-nets are drawn in training alone")
    seeds = (step_seeds.common,) if stream == "shared" else step_seeds.per_device
    return [choose(generator(seed, SUBNET, number)) for seed in seeds]


def subnet_logits(nets: Sequence[Model], whole: Model, weights: Tensors, batch: Batch) -> Tensor:
    """[K, batch, classes]: each device's batch through a part of its own weights, one part for all or one for each."""
    if len(nets) == 1:
        return nets[0](part_of(nets[0], whole).read(weights), batch.x, batch.step_seeds).logits
    made = []
    for k, net in enumerate(nets):
        own = {name: weight[k : k + 1] for name, weight in part_of(net, whole).read(weights).items()}
        made.append(
            net(own, batch.x[k : k + 1], batch.step_seeds and StepSeeds(batch.step_seeds.per_device[k : k + 1])).logits
        )
    return torch.cat(made)
