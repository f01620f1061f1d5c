"""Footprints: which entries of the global model a device's model consists of.

One type covers every kind of model heterogeneity: width slices, rolling windows, early exits, smaller kernels, shared
layers around private ones, the full model, or nothing. Footprints are found by comparing tensor shapes.
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
"""The covered entries of one axis: a slice where possible, which needs no copy, otherwise an index tensor."""

AxisSlicer = Callable[[int, int, int], Axis]
"""(axis, small size, large size) -> the entries of the large axis that the small one covers."""


@dataclass(frozen=True, eq=False)
class Footprint:
    """Tensor name -> covered entries, axis by axis. A name that is missing is not covered at all."""

    blocks: Mapping[str, tuple[Axis, ...]]

    def read(self, weights: Tensors) -> dict[str, Tensor]:
        """Extract the small model from the large one: views where possible, and differentiable."""
        return {name: take_block(weights[name], block) for name, block in self.blocks.items()}

    def write(self, weights: Tensors, part: Tensors) -> dict[str, Tensor]:
        """A copy of the large model with the small one written into it; other tensors are shared."""
        result = dict(weights)
        for name, block in self.blocks.items():
            result[name] = weights[name].clone()
            result[name][block_index(result[name], block)] = part[name]
        return result

    def restrict(self, name: str, axis: int, keep: Tensor) -> "Footprint":
        """Cover only the entries where the boolean mask `keep` is true, e.g. the rows of labels a device has seen."""
        if bool(keep.all()):
            return self
        block = list(self.blocks[name])
        covered = block[axis]
        indices = torch.arange(covered.start or 0, covered.stop) if isinstance(covered, slice) else covered
        block[axis] = indices[keep]
        return Footprint({**self.blocks, name: tuple(block)})

    def only(self, *prefixes: str) -> "Footprint":
        """Cover only the tensors with these names or below these modules; the others stay private."""
        shared = {name for name in self.blocks for prefix in prefixes if f"{name}.".startswith(f"{prefix}.")}
        return Footprint({name: block for name, block in self.blocks.items() if name in shared})


def leading(axis: int, small: int, large: int) -> Axis:
    """The first entries of every axis (HeteroFL, FjORD)."""
    return slice(0, small)


def centered(axis: int, small: int, large: int) -> Axis:
    """The first channels, and the center of the kernel (FedSup)."""
    start = (large - small) // 2 if axis >= 2 else 0
    return slice(start, start + small)


def rolling(offset: int) -> AxisSlicer:
    """A window of channels that starts at `offset` and wraps around (FedRolex); of kernels the center."""

    def slicer(axis: int, small: int, large: int) -> Axis:
        if small == large or axis >= 2:
            return centered(axis, small, large)
        return torch.arange(offset, offset + small) % large

    return slicer


def find_footprint(small: Shapes, large: Shapes, slicer: AxisSlicer = centered) -> Footprint:
    """The footprint of one model in another, from their weights' shapes; tensors that do not fit are not covered."""
    return Footprint(
        {
            name: tuple(slicer(axis, size, large[name][axis]) for axis, size in enumerate(shape))
            for name, shape in small.items()
            if name in large and shape_fits(shape, large[name])
        }
    )


@lru_cache(maxsize=4096)
def subnet_footprint(small: Model, large: Model) -> Footprint:
    """The footprint of one size of a model family in another; a ValueError if any tensor does not fit."""
    missing = _tensors_outside(small.shapes(), large.shapes())
    if missing:
        raise ValueError(f"{small.family}: {missing[0]} of the smaller size does not lie in the larger")
    return find_footprint(small.shapes(), large.shapes())


def is_submodel(small: Shapes, large: Shapes) -> bool:
    return not _tensors_outside(small, large)


def _tensors_outside(small: Shapes, large: Shapes) -> list[str]:
    return [name for name, shape in small.items() if name not in large or not shape_fits(shape, large[name])]


def shape_fits(small: torch.Size, large: torch.Size) -> bool:
    """True if no axis of the small shape is longer than the large one's."""
    return len(small) == len(large) and all(inner <= outer for inner, outer in zip(small, large, strict=True))


def take_block(tensor: Tensor, block: tuple[Axis, ...]) -> Tensor:
    """The covered entries of a tensor; leading axes that the block does not name, such as devices, are kept."""
    tensor = slice_view(tensor, block)
    for axis, covered in enumerate(block):
        if isinstance(covered, Tensor):
            tensor = tensor.index_select(axis - len(block), covered.to(tensor.device))
    return tensor


def slice_view(tensor: Tensor, block: tuple[Axis, ...]) -> Tensor:
    """A view restricted by the block's slices; axes with index tensors are kept in full."""
    slices = tuple(covered if isinstance(covered, slice) else slice(None) for covered in block)
    index: tuple[EllipsisType | slice, ...] = (..., *slices)
    return tensor[index]


def block_index(tensor: Tensor, block: tuple[Axis, ...]) -> tuple[Axis, ...]:
    """An index of exactly the covered entries: the slices, or index tensors that broadcast against each other."""
    if all(isinstance(covered, slice) for covered in block):
        return block
    ones, index = [1] * len(block), list[Axis]()
    for axis, (covered, size) in enumerate(zip(block, tensor.shape, strict=True)):
        numbers = torch.arange(size)[covered] if isinstance(covered, slice) else covered
        index.append(numbers.to(tensor.device).view(*ones[:axis], -1, *ones[axis + 1 :]))
    return tuple(index)
