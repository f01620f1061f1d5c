"""How replies become weights: every entry is averaged over the devices that cover it."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from ..tensors import Tensors
from .footprint import Axis, Footprint, box


class Contribution(NamedTuple):
    """What one device has to say on the global model, where, and how much it counts."""

    footprint: Footprint
    tensors: Tensors
    weight: float


Merge = Callable[[Tensors, Iterable[Contribution]], dict[str, Tensor]]


def coverage_mean(whole: Tensors, contributions: Iterable[Contribution]) -> dict[str, Tensor]:
    """Average each entry over those who cover it; entries nobody covers stay bit for bit.

    Sums are in float64 and in the order given, so the result is the same wherever it is computed.
    """
    totals: dict[str, tuple[Tensor, Tensor]] = {}
    for footprint, tensors, weight in contributions:
        for name, block in footprint.blocks.items():
            if name not in totals:
                empty = torch.zeros_like(whole[name], dtype=torch.float64)
                totals[name] = (empty, torch.zeros_like(empty))
            total, mass = totals[name]
            _add(total, block, tensors[name].to(torch.float64) * weight)
            _add(mass, block, torch.tensor(weight, dtype=torch.float64, device=mass.device))
    return {name: _mean(old, *totals[name]) if name in totals else old for name, old in whole.items()}


def _mean(old: Tensor, total: Tensor, mass: Tensor) -> Tensor:
    covered = mass > 0
    return torch.where(covered, (total / mass.masked_fill(~covered, 1)).to(old.dtype), old)


def _add(target: Tensor, block: tuple[Axis, ...], values: Tensor) -> None:
    view = box(target, block)
    if any(isinstance(part, Tensor) for part in block):
        view[_grid(view, block)] += values
    else:
        view += values


def _grid(view: Tensor, block: tuple[Axis, ...]) -> tuple[Tensor, ...]:
    """Index numbers per axis, shaped so that together they name a box of entries."""
    numbers = [
        part if isinstance(part, Tensor) else torch.arange(size) for part, size in zip(block, view.shape, strict=True)
    ]
    return tuple(
        part.to(view.device).view(*[1] * axis, -1, *[1] * (len(numbers) - axis - 1))
        for axis, part in enumerate(numbers)
    )
