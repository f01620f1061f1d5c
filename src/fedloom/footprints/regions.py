"""Who votes where: rings, which are the entries of a model that the same contributions cover, and what is said on them.

Whoever is to be outvoted must be outvoted where he speaks. Between a wide and a narrow device some entries have all
votes, others those of the wide alone; a rule that looks at whole models would compare what cannot be compared.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Size, Tensor

from ..tensors import Tensors
from .coverage import Aggregate, ClientUpdate
from .footprint import Axis, Footprint, grid


@dataclass(frozen=True, eq=False)
class Region:
    """`voters` are numbers of contributions; `places` the entries, tensor by tensor, counted as if it were flat."""

    voters: tuple[int, ...]
    places: Mapping[str, Tensor]

    def __len__(self) -> int:
        return sum(len(where) for where in self.places.values())

    def read(self, whole: Tensors) -> Tensor:
        """The entries as one row, in float64."""
        return torch.cat([whole[name].reshape(-1)[where].double() for name, where in self.places.items()])

    def hear(self, whole: Tensors, said: Sequence[ClientUpdate]) -> Tensor:
        """[voters, entries]: what each voter says on them, in float64."""
        rows = []
        for voter in self.voters:
            told = (
                _spread(said[voter], name, whole[name]).reshape(-1)[where].double()
                for name, where in self.places.items()
            )
            rows.append(torch.cat(list(told)))
        return torch.stack(rows)

    def write(self, made: Tensors, row: Tensor) -> None:
        """Put a row where it belongs; other entries are not touched."""
        parts = row.split([len(where) for where in self.places.values()])
        for (name, where), part in zip(self.places.items(), parts, strict=True):
            made[name].view(-1)[where] = part.to(made[name].dtype)


def regions(shapes: Mapping[str, Size], voters: Sequence[Footprint]) -> list[Region]:
    """All rings that have a voter. Every entry that anybody covers is in exactly one."""
    found: defaultdict[tuple[int, ...], dict[str, list[Tensor]]] = defaultdict(dict)
    for name, shape in shapes.items():
        speakers = [number for number, one in enumerate(voters) if name in one.blocks]
        blocks = [voters[number].blocks[name] for number in speakers]
        if blocks and shape.numel():
            for heard, where in _cells(shape, blocks):
                found[tuple(speakers[one] for one in heard)].setdefault(name, []).append(where)
    return [
        Region(who, {name: torch.cat(cells).sort().values for name, cells in places.items()})
        for who, places in sorted(found.items())
    ]


def regions_of(whole: Tensors, said: Sequence[ClientUpdate]) -> list[Region]:
    """The rings of what is said about a model."""
    return regions({name: old.shape for name, old in whole.items()}, [one.footprint for one in said])


def copied(whole: Tensors, found: Iterable[Region]) -> dict[str, Tensor]:
    """With tensors of its own, that can be written to, where any of these rings lies."""
    touched = {name for region in found for name in region.places}
    return {
        name: old.clone(memory_format=torch.contiguous_format) if name in touched else old
        for name, old in whole.items()
    }


def hold_low_coverage(merge: Aggregate, least: int) -> Aggregate:
    """The same, but entries with fewer votes than that stay bit for bit."""

    def merged(whole: Tensors, contributions: Iterable[ClientUpdate]) -> dict[str, Tensor]:
        said = list(contributions)
        counting = [one for one in said if one.weight > 0]
        thin = [region for region in regions_of(whole, counting) if len(region.voters) < least]
        made = copied(merge(whole, said), thin)
        for region in thin:
            region.write(made, region.read(whole))
        return made

    return merged


def _cells(shape: Size, blocks: Sequence[tuple[Axis, ...]]) -> list[tuple[tuple[int, ...], Tensor]]:
    """Boxes of entries with the same voters. On each axis numbers that the same blocks hold are of one kind, and a box
    is one kind for every axis: so no entry has to be looked at by itself."""
    kinds = [_kinds(axis, size, blocks) for axis, size in enumerate(shape)]
    cells = []
    for box in itertools.product(*kinds):
        voters = set(range(len(blocks))).intersection(*(holders for holders, _ in box))
        if voters:
            where = torch.zeros((), dtype=torch.int64)
            for axis, (_, numbers) in enumerate(box):
                where = where.unsqueeze(-1) + numbers * math.prod(shape[axis + 1 :])
            cells.append((tuple(sorted(voters)), where.reshape(-1)))
    return cells


def _kinds(axis: int, size: int, blocks: Sequence[tuple[Axis, ...]]) -> list[tuple[frozenset[int], Tensor]]:
    """The numbers along an axis, by who holds them."""
    held = torch.zeros(size, len(blocks), dtype=torch.bool)
    for number, block in enumerate(blocks):
        held[block[axis], number] = True
    sorts, sort_of = held.unique(dim=0, return_inverse=True)
    return [
        (frozenset(holders.nonzero().flatten().tolist()), (sort_of == sort).nonzero().flatten())
        for sort, holders in enumerate(sorts)
        if bool(holders.any())
    ]


def _spread(contribution: ClientUpdate, name: str, old: Tensor) -> Tensor:
    """A contribution's tensor laid out like the whole one; what it does not cover is any number."""
    block, tensor = contribution.footprint.blocks[name], contribution.tensors[name]
    if tensor.shape == old.shape and all(isinstance(axis, slice) for axis in block):
        return tensor
    spread = torch.empty(old.shape, dtype=tensor.dtype, device=old.device)
    spread[grid(spread, block)] = tensor
    return spread
