"""Coverage regions: the entries of a model that are covered by the same contributors.

A robust rule may only compare devices on entries they all cover. Some entries are covered by wide and narrow devices,
others by wide devices alone, so rules are applied region by region instead of to whole models.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Size, Tensor

from ..tensors import Tensors, combine
from .coverage import Aggregate, ClientUpdate, updated_entries
from .footprint import Axis, Footprint, block_index


@dataclass(frozen=True, eq=False)
class Region:
    contributors: tuple[int, ...]  # indices into the list of updates
    entries: Mapping[str, Tensor]  # tensor name -> indices into the flattened tensor

    def __len__(self) -> int:
        return sum(len(indices) for indices in self.entries.values())

    def read(self, weights: Tensors) -> Tensor:
        """The region's entries as one vector, in float64."""
        return torch.cat([weights[name].reshape(-1)[indices].double() for name, indices in self.entries.items()])

    def read_updates(self, weights: Tensors, updates: Sequence[ClientUpdate]) -> Tensor:
        """[contributors, entries]: what each contributor's update holds there, in float64."""
        rows = []
        for contributor in self.contributors:
            values = (
                _expand_update(updates[contributor], name, weights[name]).reshape(-1)[indices].double()
                for name, indices in self.entries.items()
            )
            rows.append(torch.cat(list(values)))
        return torch.stack(rows)

    def write(self, weights: Tensors, vector: Tensor) -> None:
        """Write a vector to the region's entries, in place."""
        parts = vector.split([len(indices) for indices in self.entries.values()])
        for (name, indices), part in zip(self.entries.items(), parts, strict=True):
            weights[name].view(-1)[indices] = part.to(weights[name].dtype)


def find_regions(shapes: Mapping[str, Size], footprints: Sequence[Footprint]) -> list[Region]:
    """All regions with at least one contributor. Every covered entry is in exactly one of them."""
    found: defaultdict[tuple[int, ...], dict[str, list[Tensor]]] = defaultdict(dict)
    for name, shape in shapes.items():
        covering = [number for number, footprint in enumerate(footprints) if name in footprint.blocks]
        blocks = [footprints[number].blocks[name] for number in covering]
        if blocks and shape.numel():
            for members, indices in _cells(shape, blocks):
                found[tuple(covering[member] for member in members)].setdefault(name, []).append(indices)
    return [
        Region(contributors, {name: torch.cat(cells).sort().values for name, cells in entries.items()})
        for contributors, entries in sorted(found.items())
    ]


def update_regions(weights: Tensors, updates: Sequence[ClientUpdate]) -> list[Region]:
    """The regions of a model that these updates cover."""
    shapes = {name: old.shape for name, old in weights.items()}
    return find_regions(shapes, [update.footprint for update in updates])


def clone_touched(weights: Tensors, regions: Iterable[Region]) -> dict[str, Tensor]:
    """The same weights, cloned where one of these regions may be written."""
    touched = {name for region in regions for name in region.entries}
    return {
        name: old.clone(memory_format=torch.contiguous_format) if name in touched else old
        for name, old in weights.items()
    }


def mark_regions(weights: Tensors, regions: Iterable[Region]) -> dict[str, Tensor]:
    """Booleans in the shapes of the weights, by name: True in these regions."""
    marked = {name: torch.zeros(old.shape, dtype=torch.bool) for name, old in weights.items()}
    for region in regions:
        for name, indices in region.entries.items():
            marked[name].view(-1)[indices] = True
    return marked


@dataclass(frozen=True)
class LowCoverageHold:
    """An `Aggregate` that keeps entries with few contributors bit for bit.

    Parameters
    ----------
    aggregate : the aggregation of all other entries.
    min_contributors : how many contributors are enough.
    """

    aggregate: Aggregate
    min_contributors: int

    def __call__(self, weights: Tensors, updates: Iterable[ClientUpdate]) -> dict[str, Tensor]:
        updates = list(updates)
        low = self._low_regions(weights, updates)
        result = clone_touched(self.aggregate(weights, updates), low)
        for region in low:
            region.write(result, region.read(weights))
        return result

    def updated_entries(self, weights: Tensors, updates: Sequence[ClientUpdate]) -> dict[str, Tensor]:
        """What the wrapped aggregation updates, but for the entries that are held.

        Parameters
        ----------
        weights : the global weights.
        updates : what devices returned.
        """
        held = mark_regions(weights, self._low_regions(weights, updates))
        return combine(lambda one, low: one & ~low, updated_entries(self.aggregate, weights, updates), held)

    def _low_regions(self, weights: Tensors, updates: Sequence[ClientUpdate]) -> list[Region]:
        regions = update_regions(weights, [update for update in updates if update.weight > 0])
        return [region for region in regions if len(region.contributors) < self.min_contributors]


def _cells(shape: Size, blocks: Sequence[tuple[Axis, ...]]) -> list[tuple[tuple[int, ...], Tensor]]:
    """Cells of entries with the same contributors, as flat indices.

    The indices of each axis are grouped by the blocks that contain them; a cell is one group per axis. So no entry is
    looked at by itself.
    """
    groups = [_axis_groups(axis, size, blocks) for axis, size in enumerate(shape)]
    cells = []
    for cell in itertools.product(*groups):
        contributors = set(range(len(blocks))).intersection(*(holders for holders, _ in cell))
        if contributors:
            indices = torch.zeros((), dtype=torch.int64)
            for axis, (_, numbers) in enumerate(cell):
                indices = indices.unsqueeze(-1) + numbers * math.prod(shape[axis + 1 :])
            cells.append((tuple(sorted(contributors)), indices.reshape(-1)))
    return cells


def _axis_groups(axis: int, size: int, blocks: Sequence[tuple[Axis, ...]]) -> list[tuple[frozenset[int], Tensor]]:
    """The indices along an axis, grouped by the blocks that contain them."""
    contains = torch.zeros(size, len(blocks), dtype=torch.bool)
    for number, block in enumerate(blocks):
        contains[block[axis], number] = True
    patterns, pattern_of = contains.unique(dim=0, return_inverse=True)
    return [
        (frozenset(holders.nonzero().flatten().tolist()), (pattern_of == pattern).nonzero().flatten())
        for pattern, holders in enumerate(patterns)
        if bool(holders.any())
    ]


def _expand_update(update: ClientUpdate, name: str, old: Tensor) -> Tensor:
    """An update's tensor in the shape of the global one; entries it does not cover are uninitialized."""
    block, tensor = update.footprint.blocks[name], update.tensors[name]
    if tensor.shape == old.shape and all(isinstance(axis, slice) for axis in block):
        return tensor
    expanded = torch.empty(old.shape, dtype=tensor.dtype, device=old.device)
    expanded[block_index(expanded, block)] = tensor
    return expanded
