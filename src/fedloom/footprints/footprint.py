"""Where a device's model lives inside the global model.

Every kind of model heterogeneity is one footprint: a width slice, a window that rolls, a shorter net, a smaller
kernel, shared ends around a private middle, the whole model, or nothing at all.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import EllipsisType

import torch
from torch import Tensor

from ..models import Model, Shapes
from ..tensors import Tensors

Axis = slice | Tensor
"""The entries of one axis that are covered: a slice where possible, which costs no copy, else index numbers."""

Place = Callable[[int, int, int], Axis]
"""(axis, small size, large size) -> the entries of the large axis that the small one covers."""


def leading(axis: int, small: int, large: int) -> Axis:
    """The first channels (HeteroFL, FjORD)."""
    return slice(0, small)


def centered(axis: int, small: int, large: int) -> Axis:
    """The first channels, the middle of the kernel (FedSup)."""
    start = (large - small) // 2 if axis >= 2 else 0
    return slice(start, start + small)


def rolling(offset: int) -> Place:
    """A window of channels that starts at `offset` and wraps around (FedRolex); of kernels the middle."""

    def place(axis: int, small: int, large: int) -> Axis:
        if small == large or axis >= 2:
            return centered(axis, small, large)
        return torch.arange(offset, offset + small) % large

    return place


@dataclass(frozen=True, eq=False)
class Footprint:
    """Tensor name -> the entries it covers, axis by axis. A name that is absent is not covered at all."""

    blocks: Mapping[str, tuple[Axis, ...]]

    def read(self, whole: Tensors) -> dict[str, Tensor]:
        """Carve the small model out of the large one: views where possible, and differentiable."""
        return {name: carve(whole[name], block) for name, block in self.blocks.items()}

    def write(self, whole: Tensors, part: Tensors) -> dict[str, Tensor]:
        """The large model with the small one written where it lies; the rest is as it was."""
        made = dict(whole)
        for name, block in self.blocks.items():
            made[name] = whole[name].clone()
            made[name][grid(made[name], block)] = part[name]
        return made

    def restrict(self, name: str, axis: int, keep: Tensor) -> "Footprint":
        """Cover only the entries marked by the truth values `keep`, e.g. the rows of labels a device has seen."""
        if bool(keep.all()):
            return self
        block = list(self.blocks[name])
        part = block[axis]
        numbers = torch.arange(part.start or 0, part.stop) if isinstance(part, slice) else part
        block[axis] = numbers[keep]
        return Footprint({**self.blocks, name: tuple(block)})

    def only(self, *prefixes: str) -> "Footprint":
        """Share just the tensors of these names or under them; the others stay private."""
        shared = {name for name in self.blocks for prefix in prefixes if f"{name}.".startswith(f"{prefix}.")}
        return Footprint({name: block for name, block in self.blocks.items() if name in shared})


def between(small: Shapes, large: Shapes, place: Place = centered) -> Footprint:
    """The footprint of one model in another, found from the shapes of their weights alone."""
    return Footprint(
        {
            name: tuple(place(axis, size, large[name][axis]) for axis, size in enumerate(shape))
            for name, shape in small.items()
            if name in large and fits(shape, large[name])
        }
    )


@lru_cache(maxsize=4096)
def part_of(small: Model, large: Model) -> Footprint:
    """Where one size of a family lies in another; refused if it does not lie in it whole."""
    missing = _outside(small.shapes(), large.shapes())
    if missing:
        raise ValueError(f"{small.family}: {missing[0]} of the smaller size does not lie in the larger")
    return between(small.shapes(), large.shapes())


def is_part(small: Shapes, large: Shapes) -> bool:
    return not _outside(small, large)


def _outside(small: Shapes, large: Shapes) -> list[str]:
    return [name for name, shape in small.items() if name not in large or not fits(shape, large[name])]


def fits(small: torch.Size, large: torch.Size) -> bool:
    return len(small) == len(large) and all(mine <= theirs for mine, theirs in zip(small, large, strict=True))


def carve(tensor: Tensor, block: tuple[Axis, ...]) -> Tensor:
    """The covered part of a tensor; axes in front of the block's own, such as devices, are kept whole."""
    tensor = box(tensor, block)
    for axis, part in enumerate(block):
        if isinstance(part, Tensor):
            tensor = tensor.index_select(axis - len(block), part.to(tensor.device))
    return tensor


def box(tensor: Tensor, block: tuple[Axis, ...]) -> Tensor:
    """A view of the part that slices alone describe; axes with index numbers are whole."""
    slices = tuple(part if isinstance(part, slice) else slice(None) for part in block)
    where: tuple[EllipsisType | slice, ...] = (..., *slices)
    return tensor[where]


def grid(tensor: Tensor, block: tuple[Axis, ...]) -> tuple[Axis, ...]:
    """An index that names exactly the covered entries: slices as they are, else numbers per axis, shaped for a box."""
    if all(isinstance(part, slice) for part in block):
        return block
    ones, made = [1] * len(block), list[Axis]()
    for axis, (part, size) in enumerate(zip(block, tensor.shape, strict=True)):
        numbers = torch.arange(size)[part] if isinstance(part, slice) else part
        made.append(numbers.to(tensor.device).view(*ones[:axis], -1, *ones[axis + 1 :]))
    return tuple(made)
