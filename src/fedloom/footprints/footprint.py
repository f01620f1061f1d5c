"""Footprints: which entries of the global model a device's model consists of.

One type covers every kind of model heterogeneity: width slices, rolling windows, early exits, smaller kernels, shared
layers around private ones, the full model, or nothing. Footprints are found by comparing the shapes of tensors and what
lies along their axes: where heads, gates or concatenated channels are stacked, a small model has a part of each.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from types import EllipsisType

import torch
from torch import Tensor

from ..models import Model, Shapes, structure
from ..models.axes import AxisSlicer, Entries, axis_pairs, covered_entries
from ..placement import resident
from ..tensors import Tensors

Axis = Entries
"""The covered entries of one axis: a slice where possible, which needs no copy, otherwise an index tensor."""


@dataclass(frozen=True, eq=False)
class Footprint:
    """Where a model lies in a larger one: tensor name -> covered entries, axis by axis.

    Footprints are found by comparing shapes, with `find_footprint`; `device.footprint` is that of a device's model.

    Parameters
    ----------
    blocks : for each tensor the entries of each axis, a slice or an index tensor. A name that is missing is not covered
        at all.
    inside : the shapes of the large model in which it was found; None: unknown.

    Examples
    --------
    >>> small = device.footprint.read(server["weights"])
    >>> only_body = device.footprint.only("blocks")
    >>> large = device.footprint.write(server["weights"], small)
    """

    blocks: Mapping[str, tuple[Axis, ...]]
    inside: Shapes | None = None

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
        return replace(self, blocks={**self.blocks, name: tuple(block)})

    def only(self, *prefixes: str) -> "Footprint":
        """Cover only the tensors with these names or below these modules; the others stay private.

        Parameters
        ----------
        prefixes : names of tensors or modules.
        """
        shared = {name for name in self.blocks for prefix in prefixes if f"{name}.".startswith(f"{prefix}.")}
        return replace(self, blocks={name: block for name, block in self.blocks.items() if name in shared})


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
    return structure.centered(axis, small, large)


def rolling(offset: int) -> AxisSlicer:
    """A window of channels that wraps around (FedRolex); of kernels the center.

    On an axis that stacks several things, a window of the channels of each: of every head and gate, and of every map
    that is concatenated. If there are fewer heads, they are the first ones.

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
    large : the shapes of the large model's. If they are those of plain tensors, and the small model has a part of an
        axis that stacks several things, it is an error.
    slicer : which entries of an axis the small model covers; of a stacked axis, which channels of each thing.
    """
    blocks = {}
    for name in small:
        pairs = axis_pairs(name, small, large) if name in large else None
        if pairs is not None and all(pair.fits() for pair in pairs):
            blocks[name] = tuple(covered_entries(axis, pair, slicer) for axis, pair in enumerate(pairs))
    return Footprint(blocks, large)


def read_submodel(small: Shapes, footprint: Footprint, weights: Tensors) -> dict[str, Tensor]:
    """The part of some weights that is a small model: by its footprint, if that was found in a model of their shapes.

    Otherwise, as where only some tiers take part, the footprint is found anew.

    Parameters
    ----------
    small : the shapes of the small model's weights.
    footprint : its footprint in the global model.
    weights : the weights of the global model, or of another one that contains the small one.
    """
    shapes = {name: tensor.shape for name, tensor in weights.items()}
    inside = footprint.inside or {}
    if all(inside.get(name) == shape for name, shape in shapes.items()):
        return {name: take_block(weights[name], block) for name, block in footprint.blocks.items() if name in shapes}
    return find_footprint(small, shapes).read(weights)


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
    return [name for name in small if name not in large or not tensor_fits(name, small, large)]


def tensor_fits(name: str, small: Shapes, large: Shapes) -> bool:
    """True if a tensor of one model lies in that of another: no axis, and nothing stacked along an axis, is longer.

    Parameters
    ----------
    name : the tensor.
    small : the shapes of the small model's weights.
    large : the shapes of the large model's.
    """
    pairs = axis_pairs(name, small, large)
    return pairs is not None and all(pair.fits() for pair in pairs)


def shape_fits(small: torch.Size, large: torch.Size) -> bool:
    """True if no axis of the small shape is longer than the large one's.

    Parameters
    ----------
    small : the small shape.
    large : the large shape.
    """
    return len(small) == len(large) and all(inner <= outer for inner, outer in zip(small, large, strict=True))


def find_sliced_stack(small: Shapes, large: Shapes) -> str | None:
    """A tensor of which the small model has a part of an axis that stacks several things; None if there is none.

    Parameters
    ----------
    small : the shapes of the small model's weights.
    large : the shapes of the large model's.
    """
    return next(
        (
            name
            for name in small
            if name in large
            and any(not pair.is_plain and pair.small != pair.large for pair in axis_pairs(name, small, large) or [])
        ),
        None,
    )


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
            tensor = tensor.index_select(axis - len(block), resident(covered, tensor.device))
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
