"""Nested devices in plain torch, in float64 and without fedloom's training, for references of a few lines."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedloom.client import Schedule, Sgd
from fedloom.testing import TinyWorld

LR = 0.3
Weights = dict[str, Tensor]


def full_batch_world(steps: int, sizes: tuple[int, ...] = (8, 5, 6, 7), **changes: Any) -> TinyWorld:
    """Devices of two widths that take so many steps of plain SGD, each with all of their examples."""
    plain = {"schedule": Schedule(batch_size=50, epochs=steps), "optimizer": Sgd(LR), "widths": (1.0, 0.5)}
    return TinyWorld.make(
        "mlp", sizes=sizes, labels=[[0, 1], [1, 2], [3], [0, 3]][: len(sizes)], **{**plain, **changes}
    )


def label_gradient(world: TinyWorld, index: int, weights: Mapping[str, Tensor]) -> Weights:
    """The gradient of a device's mean cross entropy over all its examples."""
    rows = torch.from_numpy(world.partition.train[index])
    x, y = world.dataset.preparation(world.dataset.train.x[rows]), world.dataset.train.y[rows]
    leaves = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
    outputs: Any = functional_call(world.fleet.device(index, 1).model.module(), leaves, (x,))
    loss = nn.functional.cross_entropy(outputs.logits, y)
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


def descend(weights: Weights, steps: int, gradient: Callable[[Weights], Weights]) -> Weights:
    for _ in range(steps):
        g = gradient(weights)
        weights = {n: w - LR * g[n] for n, w in weights.items()}
    return weights


def corner(world: TinyWorld, index: int, weights: Mapping[str, Tensor]) -> Weights:
    """A device's slice: the leading entries along every axis."""
    shapes = world.fleet.device(index, 1).model.shapes()
    return {n: weights[n][tuple(slice(size) for size in shape)].clone() for n, shape in shapes.items()}


def spread(small: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> Weights:
    """The other way: zeros outside the slice."""
    whole = {n: torch.zeros_like(w) for n, w in like.items()}
    for n, values in small.items():
        whole[n][tuple(slice(size) for size in values.shape)] = values
    return whole


def holders(world: TinyWorld, devices: list[int], like: Mapping[str, Tensor]) -> Weights:
    """How many of these devices have each entry."""
    ones = [spread({n: torch.ones_like(w) for n, w in corner(world, k, like).items()}, like) for k in devices]
    return {n: sum((one[n] for one in ones), torch.zeros_like(w)) for n, w in like.items()}


def total(parts: list[Weights], like: Mapping[str, Tensor]) -> Weights:
    whole = [spread(part, like) for part in parts]
    return {n: sum((one[n] for one in whole), torch.zeros_like(w)) for n, w in like.items()}
