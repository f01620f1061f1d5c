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
from ..models.structure import centered_start
from ..tensors import Tensors

Axis = slice | Tensor
"""The covered entries of one axis: a slice where possible, which needs no copy, otherwise an index tensor."""

AxisSlicer = Callable[[int, int, int], Axis]
"""(axis, small size, large size) -> the entries of the large axis that the small one covers."""


@dataclass(frozen=True, eq=False)
class Footprint:
    """Where a model lies in a larger one: tensor name -> covered entries, axis by axis.

    Footprints are found by comparing shapes, with `find_footprint`; `device.footprint` is that of a device's model.

    Parameters
    ----------
    blocks : for each tensor the entries of each axis, a slice or an index tensor. A name that is missing is not covered
        at all.

    Examples
    --------
    >>> small = device.footprint.read(server["weights"])
    >>> only_body = device.footprint.only("blocks")
    >>> large = device.footprint.write(server["weights"], small)
    """

    blocks: Mapping[str, tuple[Axis, ...]]

    def read(self, weights: Tensors) -> dict[str, Tensor]:
        """Extract the small model from the large one: views where possible, and differentiable.

        Parameters
        ----------
        weights : the large model; leading axes that the footprint does not know, such as devices, are kept.
        """
        return {name: take_block(weights[name], block) for name, block in self.blocks.items()}

    def write(self, weights: Tensors, part: Tensors) -> dict[str, Tensor]:
        """A copy of the large model with the small one written into it; other tensors are shared.

        Parameters
        ----------
        weights : the large model.
        part : the small model.
        """
        result = dict(weights)
        for name, block in self.blocks.items():
            result[name] = weights[name].clone()
            result[name][block_index(result[name], block)] = part[name]
        return result

    def restrict(self, name: str, axis: int, keep: Tensor) -> "Footprint":
        """Cover only some entries of an axis, e.g. the rows of labels a device has seen.

        Parameters
        ----------
        name : the tensor.
        axis : the axis.
        keep : a boolean for each covered entry of the axis.
        """
        if bool(keep.all()):
            return self
        block = list(self.blocks[name])
        covered = block[axis]
        indices = torch.arange(covered.start or 0, covered.stop) if isinstance(covered, slice) else covered
        block[axis] = indices[keep]
        return Footprint({**self.blocks, name: tuple(block)})

    def only(self, *prefixes: str) -> "Footprint":
        """Cover only the tensors with these names or below these modules; the others stay private.

        Parameters
        ----------
        prefixes : names of tensors or modules.
        """
        shared = {name for name in self.blocks for prefix in prefixes if f"{name}.".startswith(f"{prefix}.")}
        return Footprint({name: block for name, block in self.blocks.items() if name in shared})


def leading(axis: int, small: int, large: int) -> Axis:
    """The first entries of every axis (HeteroFL, FjORD).

    Parameters
    ----------
    axis : the number of the axis.
    small : its length in the small model.
    large : its length in the large model.
    """
    return slice(0, small)


def centered(axis: int, small: int, large: int) -> Axis:
    """The first channels, and the center of the kernel (FedSup).

    Parameters
    ----------
    axis : the number of the axis; from 2 on it is one of a kernel.
    small : its length in the small model.
    large : its length in the large model.
    """
    start = centered_start(axis, small, large)
    return slice(start, start + small)


def rolling(offset: int) -> AxisSlicer:
    """A window of channels that wraps around (FedRolex); of kernels the center.

    Parameters
    ----------
    offset : where the window starts.

    Returns
    -------
    A slicer for `find_footprint`.
    """

    def slicer(axis: int, small: int, large: int) -> Axis:
        if small == large or axis >= 2:
            return centered(axis, small, large)
        return torch.arange(offset, offset + small) % large

    return slicer


def find_footprint(small: Shapes, large: Shapes, slicer: AxisSlicer = centered) -> Footprint:
    """The footprint of one model in another; tensors that do not fit are not covered.

    Parameters
    ----------
    small : the shapes of the small model's weights, as `Model.shapes` returns them.
    large : the shapes of the large model's.
    slicer : which entries of an axis the small model covers.
    """
    return Footprint(
        {
            name: tuple(slicer(axis, size, large[name][axis]) for axis, size in enumerate(shape))
            for name, shape in small.items()
            if name in large and shape_fits(shape, large[name])
        }
    )


@lru_cache(maxsize=4096)
def subnet_footprint(small: Model, large: Model) -> Footprint:
    """The footprint of one size of a model family in another; a ValueError if any tensor does not fit.

    Frozen weights must fit too, but are not part of the footprint.

    Parameters
    ----------
    small : the small model.
    large : the large model.
    """
    missing = _tensors_outside(small.shapes(), large.shapes())
    if missing:
        raise ValueError(f"{small.family}: {missing[0]} of the smaller size does not lie in the larger")
    other = find_foreign_frozen(small, large)
    if other:
        raise ValueError(f"{small.family}: the frozen {other} of the smaller size is no part of that of the larger")
    return find_footprint(small.shapes(), large.shapes())


def find_foreign_frozen(small: Model, large: Model) -> str | None:
    """A frozen weight of a model that is not, value by value, the part of another's that it should be; None if all are.

    Parameters
    ----------
    small : the small model.
    large : the large model.
    """
    frozen, larger = small.frozen_weights(), large.frozen_weights()
    expected = find_footprint(small.frozen_shapes(), large.frozen_shapes()).read(larger)
    return next(
        (name for name, w in frozen.items() if name not in expected or not torch.equal(w, expected[name])), None
    )


def is_submodel(small: Shapes, large: Shapes) -> bool:
    """True if every tensor of one model fits into the same tensor of another.

    Parameters
    ----------
    small : the shapes of the small model's weights.
    large : the shapes of the large model's.
    """
    return not _tensors_outside(small, large)


def _tensors_outside(small: Shapes, large: Shapes) -> list[str]:
    return [name for name, shape in small.items() if name not in large or not shape_fits(shape, large[name])]


def shape_fits(small: torch.Size, large: torch.Size) -> bool:
    """True if no axis of the small shape is longer than the large one's.

    Parameters
    ----------
    small : the small shape.
    large : the large shape.
    """
    return len(small) == len(large) and all(inner <= outer for inner, outer in zip(small, large, strict=True))


def take_block(tensor: Tensor, block: tuple[Axis, ...]) -> Tensor:
    """The covered entries of a tensor; leading axes that the block does not name, such as devices, are kept.

    Parameters
    ----------
    tensor : the tensor.
    block : the covered entries of each axis.
    """
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
