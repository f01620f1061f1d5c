"""Coverage mean: every entry of the global model is averaged over the devices that cover it."""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from ..tensors import Tensors
from .footprint import Axis, Footprint, block_index

Participation = Sequence[tuple[Footprint, float]]
"""Footprints, and how many devices have each: a whole number, or the expected one."""


class ClientUpdate(NamedTuple):
    """One device's new weights, and where they belong in the global model.

    Parameters
    ----------
    footprint : the entries of the global model that the update covers.
    tensors : the new weights, in the shapes of the footprint; further names are ignored.
    weight : the weight of the device in the average, such as its number of examples.

    Examples
    --------
    >>> updates = [ClientUpdate(reply.device.footprint, reply.upload["weights"], reply.examples) for reply in replies]
    >>> weights = context.aggregate(server["weights"], updates)
    """

    footprint: Footprint
    tensors: Tensors
    weight: float


Aggregate = Callable[[Tensors, Iterable[ClientUpdate]], dict[str, Tensor]]
"""(global weights, updates) -> new global weights."""


@runtime_checkable
class SelectiveAggregate(Protocol):
    """An `Aggregate` that does not update exactly the entries which its updates cover."""

    def __call__(self, weights: Tensors, updates: Iterable[ClientUpdate]) -> dict[str, Tensor]: ...
    def updated_entries(self, weights: Tensors, updates: Sequence[ClientUpdate]) -> dict[str, Tensor]: ...


def updated_entries(aggregate: Aggregate, weights: Tensors, updates: Sequence[ClientUpdate]) -> dict[str, Tensor]:
    """Which entries an aggregation of these updates changes; it keeps all others bit for bit.

    Who goes on from an aggregate, such as a server optimizer, must leave the others as they are too.

    Parameters
    ----------
    aggregate : the aggregation.
    weights : the global weights.
    updates : what devices returned.

    Returns
    -------
    Booleans in the shapes of the weights, by name. By default the entries that an update of weight above 0 covers.
    """
    if isinstance(aggregate, SelectiveAggregate):
        return aggregate.updated_entries(weights, updates)
    held = [(update.footprint, 1.0) for update in updates if update.weight > 0]
    return {name: count_contributors(name, old, held) > 0 for name, old in weights.items()}


def count_contributors(name: str, tensor: Tensor, participation: Participation) -> Tensor:
    """How many devices cover each entry of a tensor, in float64.

    Parameters
    ----------
    name : the name of the tensor.
    tensor : the global tensor.
    participation : footprints, and how many devices have each.
    """
    counts = torch.zeros_like(tensor, dtype=torch.float64)
    for footprint, devices in participation:
        if name in footprint.blocks:
            counts[block_index(tensor, footprint.blocks[name])] += devices
    return counts


def coverage_mean(weights: Tensors, updates: Iterable[ClientUpdate]) -> dict[str, Tensor]:
    """Average each entry over the updates that cover it; entries that none covers stay bit for bit.

    Sums are in float64 and in the order of the updates, so the result does not depend on where it is computed.

    Parameters
    ----------
    weights : the global weights.
    updates : what devices returned.

    Returns
    -------
    The new global weights.
    """
    updates = list(updates)
    by_name = {
        name: [
            _TensorUpdate(update.footprint.blocks[name], update.tensors[name], update.weight)
            for update in updates
            if name in update.footprint.blocks
        ]
        for name in weights
    }
    return {name: _mean(old, by_name[name]) if by_name[name] else old for name, old in weights.items()}


class _TensorUpdate(NamedTuple):
    block: tuple[Axis, ...]
    tensor: Tensor
    weight: float


NEAR = 262_144
"""Entries whose sum is finished before the next ones are begun: 2 MB in float64, which stay in a cache."""


def _mean(old: Tensor, updates: list[_TensorUpdate]) -> Tensor:
    """Tensor by tensor rather than device by device, and some rows at a time, so that the sum stays in the cache."""
    first = updates[0]
    starts_full = first.tensor.shape == old.shape and all(isinstance(axis, slice) for axis in first.block)
    regions = _nested_regions(updates)
    if regions is None:
        return _divide_by_entry(old, _sum(old, updates, starts_full), updates)
    result = torch.empty_like(old) if starts_full else old.clone()
    rows = max(1, NEAR * len(old) // old.numel()) if old.dim() and old.numel() > NEAR else None
    if rows is None:
        _divide(_sum(old, updates, starts_full), regions, result)
        return result
    for start in range(0, len(old), rows):
        stop = min(start + rows, len(old))
        near = [one for update in updates if (one := _crop(update, start, stop))]
        if near:
            total = _sum(old[start:stop], near, starts_full)
            blocks = ((_crop_block(block, start, stop), mass) for block, mass in regions)
            _divide(total, [(block, mass) for block, mass in blocks if block], result[start:stop])
    return result


def _sum(old: Tensor, updates: list[_TensorUpdate], starts_full: bool) -> Tensor:
    """The weighted sum of updates, of which the first covers everything if it `starts_full`."""
    first = updates[0]
    total = first.tensor.to(torch.float64, copy=True) if starts_full else torch.zeros_like(old, dtype=torch.float64)
    if starts_full and first.weight != 1:
        total *= first.weight
    for block, tensor, weight in updates[1:] if starts_full else updates:
        _add(total, block, tensor, weight)
    return total


def _divide(total: Tensor, regions: list[tuple[tuple[Axis, ...], float]], result: Tensor) -> None:
    """Each inner region overwrites its part of the outer one, unless that is easily left out."""
    for number, (block, mass) in enumerate(regions):
        outer = _leave_out(block, regions[number + 1][0]) if number + 1 < len(regions) else block
        torch.div(total[outer], mass, out=result[outer])


def _leave_out(outer: tuple[Axis, ...], inner: tuple[Axis, ...]) -> tuple[Axis, ...]:
    """The outer block without the inner one, if they differ in the end of a single axis; else the outer one."""
    different = [axis for axis, (one, other) in enumerate(zip(outer, inner, strict=True)) if one != other]
    if len(different) != 1:
        return outer
    axis = different[0]
    wide, narrow = outer[axis], inner[axis]
    assert isinstance(wide, slice)
    assert isinstance(narrow, slice)
    rest = slice(narrow.stop, wide.stop)
    return (*outer[:axis], rest, *outer[axis + 1 :]) if wide.start == narrow.start else outer


def _crop(update: _TensorUpdate, start: int, stop: int) -> _TensorUpdate | None:
    """The part of an update for some rows of the tensor; None if it has none of them."""
    block = _crop_block(update.block, start, stop)
    if not block:
        return None
    rows, kept = update.block[0], block[0]
    assert isinstance(rows, slice)
    assert isinstance(kept, slice)
    before = start - (rows.start or 0)
    return _TensorUpdate(block, update.tensor[kept.start + before : kept.stop + before], update.weight)


def _crop_block(block: tuple[Axis, ...], start: int, stop: int) -> tuple[Axis, ...]:
    """A block of slices within some rows, counted from the first of them; empty if it has none of them."""
    rows = block[0]
    assert isinstance(rows, slice)
    first, last = max(rows.start or 0, start), min(rows.stop, stop)
    return (slice(first - start, last - start), *block[1:]) if first < last else ()


def _nested_regions(updates: list[_TensorUpdate]) -> list[tuple[tuple[Axis, ...], float]] | None:
    """The distinct blocks from the outermost in, each with the total weight of the blocks that contain it.

    None if they are not nested slices, or if a block has no weight. Widths and depths are nested, and then no
    weights per entry are needed.
    """
    weights: dict[tuple[tuple[int, int], ...], float] = {}
    known: dict[int, tuple[tuple[int, int], ...]] = {}  # devices of a tier share their blocks
    for block, _, weight in updates:
        edges = known.get(id(block))
        if edges is None:
            edges = tuple((axis.start or 0, axis.stop) for axis in block if isinstance(axis, slice))
            if len(edges) < len(block):
                return None
            known[id(block)] = edges
        weights[edges] = weights.get(edges, 0.0) + weight
    order = sorted(weights, key=lambda edges: -math.prod(stop - start for start, stop in edges))
    is_nested = all(
        lower <= start and stop <= upper
        for outer, inner in itertools.pairwise(order)
        for (lower, upper), (start, stop) in zip(outer, inner, strict=True)
    )
    masses = list(itertools.accumulate(weights[edges] for edges in order))
    if not is_nested or min(masses) <= 0:
        return None
    return [(tuple(slice(*edge) for edge in edges), mass) for edges, mass in zip(order, masses, strict=True)]


def _divide_by_entry(old: Tensor, total: Tensor, updates: list[_TensorUpdate]) -> Tensor:
    """Divide by the total weight of each entry, for blocks that overlap in any way."""
    mass = torch.zeros_like(total)
    for block, _, weight in updates:
        _add(mass, block, torch.ones((), dtype=torch.float64, device=mass.device), weight)
    covered = mass > 0
    return torch.where(covered, (total / mass.masked_fill(~covered, 1)).to(old.dtype), old)


def _add(target: Tensor, block: tuple[Axis, ...], tensor: Tensor, weight: float) -> None:
    if any(isinstance(covered, Tensor) for covered in block):
        target[block_index(target, block)] += tensor.to(torch.float64) * weight
    else:
        target[block].add_(tensor, alpha=weight)
