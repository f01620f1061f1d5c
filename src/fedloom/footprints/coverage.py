"""How replies become weights: every entry is averaged over the devices that cover it."""

import itertools
import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from ..tensors import Tensors
from .footprint import Axis, Footprint, box, grid


class ClientUpdate(NamedTuple):
    """What one device has to say on the global model, where, and how much it counts."""

    footprint: Footprint
    tensors: Tensors
    weight: float


Aggregate = Callable[[Tensors, Iterable[ClientUpdate]], dict[str, Tensor]]


def coverage_mean(whole: Tensors, contributions: Iterable[ClientUpdate]) -> dict[str, Tensor]:
    """Average each entry over those who cover it; entries nobody covers stay bit for bit.

    Sums are in float64 and in the order given, so the result is the same wherever it is computed.
    """
    said = list(contributions)
    parts = {
        name: [Part(c.footprint.blocks[name], c.tensors[name], c.weight) for c in said if name in c.footprint.blocks]
        for name in whole
    }
    return {name: _mean(old, parts[name]) if parts[name] else old for name, old in whole.items()}


class Part(NamedTuple):
    block: tuple[Axis, ...]
    tensor: Tensor
    weight: float


def _mean(old: Tensor, parts: list[Part]) -> Tensor:
    """One tensor after the other, so that its sum stays in the cache."""
    first = parts[0]
    whole_first = first.tensor.shape == old.shape and all(isinstance(axis, slice) for axis in first.block)
    total = first.tensor.to(torch.float64, copy=True) if whole_first else torch.zeros_like(old, dtype=torch.float64)
    if whole_first and first.weight != 1:
        total *= first.weight
    for block, tensor, weight in parts[1:] if whole_first else parts:
        _add(total, block, tensor, weight)
    regions = _nested(parts)
    if regions is None:
        return _divided_by_entry(old, total, parts)
    made = torch.empty_like(old) if whole_first else old.clone()
    for block, mass in regions:  # each inner box overwrites its part of the outer one
        torch.div(box(total, block), mass, out=box(made, block))
    return made


def _nested(parts: list[Part]) -> list[tuple[tuple[Axis, ...], float]] | None:
    """The boxes of slices from the outermost in, each with the weight of all that contain it; None if they do not nest,
    or if a box has no weight. Where they do, as widths and depths do, no count per entry is needed."""
    weights: dict[tuple[tuple[int, int], ...], float] = {}
    for block, _, weight in parts:
        if not all(isinstance(axis, slice) for axis in block):
            return None
        edges = tuple((axis.start or 0, axis.stop) for axis in block if isinstance(axis, slice))
        weights[edges] = weights.get(edges, 0.0) + weight
    order = sorted(weights, key=lambda edges: -math.prod(stop - start for start, stop in edges))
    inside = all(
        lower <= start and stop <= upper
        for outer, inner in itertools.pairwise(order)
        for (lower, upper), (start, stop) in zip(outer, inner, strict=True)
    )
    masses = list(itertools.accumulate(weights[edges] for edges in order))
    if not inside or min(masses) <= 0:
        return None
    return [(tuple(slice(*edge) for edge in edges), mass) for edges, mass in zip(order, masses, strict=True)]


def _divided_by_entry(old: Tensor, total: Tensor, parts: list[Part]) -> Tensor:
    """The same for boxes that overlap anyhow and for index numbers: a weight counted for every entry."""
    mass = torch.zeros_like(total)
    for block, _, weight in parts:
        _add(mass, block, torch.ones((), dtype=torch.float64, device=mass.device), weight)
    covered = mass > 0
    return torch.where(covered, (total / mass.masked_fill(~covered, 1)).to(old.dtype), old)


def _add(target: Tensor, block: tuple[Axis, ...], tensor: Tensor, weight: float) -> None:
    if any(isinstance(part, Tensor) for part in block):
        target[grid(target, block)] += tensor.to(torch.float64) * weight
    else:
        box(target, block).add_(tensor, alpha=weight)
