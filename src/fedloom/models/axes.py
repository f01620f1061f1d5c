"""What lies along an axis of a weight: one thing, or several that are stacked, such as heads, gates or packed matrices.

A smaller model has the first entries of each thing, not of the axis. A layout says where they are. It is plain data:

| axis | layout |
|---|---|
| n channels | `((n,),)` |
| queries, keys and values of size d, packed | `((3, d),)` |
| heads of size h | `((heads, h),)` |
| `nn.MultiheadAttention`'s packed projections | `((3, heads, h),)` |
| the gates of an LSTM of d units | `((4, d),)` |
| a channels followed by b others | `((a,), (b,))` |
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Grid = tuple[int, ...]
"""The dimensions of one block of an axis; the last one varies fastest, and their product is the block's length."""

Layout = tuple[Grid, ...]
"""An axis as a concatenation of blocks."""

Entries = slice | Tensor
"""Entries of an axis: a slice where possible, otherwise an index tensor."""

AxisSlicer = Callable[[int, int, int], Entries]
"""(axis, small size, large size) -> the entries of the large axis that the small one covers."""

Layouts = Mapping[str, Mapping[int, Layout]]
"""Weight name -> axis -> layout, of the axes that stack several things.

An axis from the third on may be one of a kernel, of which a smaller model has the center; if it is listed, it holds
channels."""


class LayoutError(ValueError):
    """A declared layout that does not fit its axis."""


class UnknownLayoutError(ValueError):
    """Shapes without layouts, of tensors rather than of a model, where the layout of a longer axis is needed."""


@dataclass(frozen=True)
class Stack:
    """Equal things that are stacked along an axis. `heads`, `packed` and `gates` make one.

    Parameters
    ----------
    count : how many they are.
    each : what lies along each of them; None: one thing.
    """

    count: int
    each: "AxisDeclaration | None" = None

    def layout(self, length: int) -> Layout:
        """The layout of an axis of this length; a `LayoutError` if it cannot be divided.

        Parameters
        ----------
        length : the length of the axis.
        """
        if self.count < 1 or length % self.count:
            raise LayoutError(f"an axis of length {length} cannot be divided by {self.count}")
        each = resolve(self.each, length // self.count)
        return ((self.count, *each[0]),) if len(each) == 1 else each * self.count


@dataclass(frozen=True)
class Concatenation:
    """Different things one after the other along an axis. `concatenated` makes one.

    Parameters
    ----------
    parts : the length of each, and what lies along it; None: one thing.
    """

    parts: tuple[tuple[int, "AxisDeclaration | None"], ...]

    def layout(self, length: int) -> Layout:
        """The layout of an axis of this length; a `LayoutError` if the parts have another.

        Parameters
        ----------
        length : the length of the axis.
        """
        total = sum(size for size, _ in self.parts)
        if total != length:
            raise LayoutError(f"the parts have the length {total} together, and the axis has {length}")
        return tuple(grid for size, part in self.parts for grid in resolve(part, size))


AxisDeclaration = Stack | Concatenation
"""What a module declares about an axis in its attribute `stacked_axes`."""


def heads(count: int) -> Stack:
    """An axis of attention heads, all of the same size.

    Parameters
    ----------
    count : the number of heads of this model.

    Examples
    --------
    >>> heads(4).layout(32)
    ((4, 8),)
    """
    return Stack(count)


def packed(count: int, each: AxisDeclaration | None = None) -> Stack:
    """An axis of several equal parts, such as the packed projections to queries, keys and values.

    Parameters
    ----------
    count : the number of parts.
    each : what lies along each part; None: one thing.

    Examples
    --------
    >>> packed(3, heads(4)).layout(96)
    ((3, 4, 8),)
    """
    return Stack(count, each)


def gates(count: int) -> Stack:
    """An axis of the gates of a recurrent layer: four of an LSTM, three of a GRU.

    Parameters
    ----------
    count : the number of gates.

    Examples
    --------
    >>> gates(4).layout(32)
    ((4, 8),)
    """
    return Stack(count)


def concatenated(*parts: int | tuple[int, AxisDeclaration]) -> Concatenation:
    """An axis of different things one after the other, such as the channels of a map that `torch.cat` made.

    Parameters
    ----------
    parts : the length of each part in this model; or a pair of it and what lies along the part.

    Examples
    --------
    >>> concatenated(16, 8).layout(24)
    ((16,), (8,))
    >>> concatenated(16, (8, heads(2))).layout(24)
    ((16,), (2, 4))
    """
    return Concatenation(tuple((part, None) if isinstance(part, int) else part for part in parts))


def resolve(declared: AxisDeclaration | None, length: int) -> Layout:
    """The layout of an axis of this length: as declared, or that of one thing."""
    return plain(length) if declared is None else declared.layout(length)


def plain(length: int) -> Layout:
    """The layout of an axis of one thing."""
    return ((length,),)


def is_plain(layout: Layout) -> bool:
    """True if nothing is stacked: one block of one dimension."""
    return len(layout) == 1 and len(layout[0]) == 1


def layout_fits(small: Layout, large: Layout) -> bool:
    """True if a layout has at most the blocks of another, each of them as a part of the other's.

    Parameters
    ----------
    small : the layout of the small model's axis.
    large : the layout of the large model's.
    """
    return len(small) <= len(large) and all(
        len(part) == len(whole) and all(inner <= outer for inner, outer in zip(part, whole, strict=True))
        for part, whole in zip(small, large, strict=False)
    )


def stacked_entries(small: Layout, large: Layout, slicer: AxisSlicer) -> Entries:
    """The entries of a large model's axis that a small one's covers, in the order of the small one's.

    Of every block they are the leading ones of all dimensions but the innermost, which holds the channels of one head,
    gate or part: there the slicer chooses, as on the first axis of a weight, since these are channels on any axis.

    Parameters
    ----------
    small : the layout of the small model's axis, which fits.
    large : the layout of the large model's.
    slicer : which entries of a dimension the small model covers.
    """
    found, start = list[Tensor](), 0
    for number, whole in enumerate(large):
        if number < len(small):
            found.append(start + _block_entries(small[number], whole, slicer))
        start += math.prod(whole)
    return as_slice(torch.cat(found))


def _block_entries(part: Grid, whole: Grid, slicer: AxisSlicer) -> Tensor:
    entries, stride = torch.arange(whole[-1])[slicer(0, part[-1], whole[-1])], whole[-1]
    for size, length in zip(reversed(part[:-1]), reversed(whole[:-1]), strict=True):
        entries = (torch.arange(size).unsqueeze(1) * stride + entries).flatten()
        stride *= length
    return entries


def as_slice(entries: Tensor) -> Entries:
    """A slice if the entries follow each other, which needs no copies; otherwise the entries."""
    first, count = int(entries[0]) if len(entries) else 0, len(entries)
    return slice(first, first + count) if torch.equal(entries, torch.arange(first, first + count)) else entries


class ModelShapes(dict[str, torch.Size]):
    """The shapes of a model's weights by name, and the layouts of those axes that stack several things.

    Parameters
    ----------
    shapes : the shapes.
    layouts : the layouts of stacked axes; all other axes are plain, and kernels from the third on.
    """

    def __init__(self, shapes: Mapping[str, torch.Size], layouts: Layouts):
        super().__init__(shapes)
        self.layouts: Layouts = {
            name: {axis: layout for axis, layout in layouts[name].items() if axis >= 2 or not is_plain(layout)}
            for name in shapes
            if name in layouts
        }


@dataclass(frozen=True)
class AxisPair:
    """An axis of a weight in two models.

    Parameters
    ----------
    small : its layout in the small model.
    large : its layout in the large model.
    are_channels : whether it is known to be no axis of a kernel.
    """

    small: Layout
    large: Layout
    are_channels: bool = False

    @property
    def is_plain(self) -> bool:
        """True if nothing is stacked in either model."""
        return is_plain(self.small) and is_plain(self.large)

    def fits(self) -> bool:
        """True if the small layout is a part of the large one."""
        return layout_fits(self.small, self.large)

    def blocks(self) -> list[tuple[Grid, Grid]]:
        """The blocks that both models have, side by side."""
        return list(zip(self.small, self.large, strict=False))


def covered_entries(axis: int, pair: AxisPair, slicer: AxisSlicer) -> Entries:
    """The entries of a large model's axis that a small one's, which fits, covers.

    Parameters
    ----------
    axis : the number of the axis.
    pair : its layouts in both models.
    slicer : which entries of a plain axis, or of the innermost dimension of a block, the small model covers.
    """
    if pair.is_plain:
        return slicer(0 if pair.are_channels else axis, pair.small[0][0], pair.large[0][0])
    return stacked_entries(pair.small, pair.large, slicer)


def axis_pairs(name: str, small: Mapping[str, torch.Size], large: Mapping[str, torch.Size]) -> list[AxisPair] | None:
    """The axes of a weight of two models side by side; None if it has another number of axes in them.

    Shapes of plain tensors have no layouts. They are enough where the small model has the whole axis, or neither model
    is known to stack anything; otherwise it is an `UnknownLayoutError`, because the first entries could be wrong.

    Parameters
    ----------
    name : the weight.
    small : the shapes of the small model.
    large : the shapes of the large model.
    """
    if len(small[name]) != len(large[name]):
        return None
    return list(_axis_pairs(name, small, large))


def _axis_pairs(name: str, small: Mapping[str, torch.Size], large: Mapping[str, torch.Size]) -> Iterator[AxisPair]:
    sides = [
        (shapes, shapes.layouts.get(name, {}) if isinstance(shapes, ModelShapes) else None) for shapes in (small, large)
    ]
    for axis in range(len(small[name])):
        layouts = [
            None if stacked is None else stacked.get(axis, plain(shapes[name][axis])) for shapes, stacked in sides
        ]
        lengths = small[name][axis], large[name][axis]
        known = [layout for layout in layouts if layout is not None]
        if len(known) == 2 or all(map(is_plain, known)):
            small_layout, large_layout = (one or plain(length) for one, length in zip(layouts, lengths, strict=True))
            listed = any(stacked is not None and axis in stacked for _, stacked in sides)
            yield AxisPair(small_layout, large_layout, axis >= 2 and listed)
        elif lengths[0] == lengths[1]:
            yield AxisPair(known[0], known[0])
        else:
            raise UnknownLayoutError(
                f"axis {axis} of {name} stacks {describe_layout(known[0])} in one model, of lengths {lengths}, and "
                "of the other only shapes are known, not what it stacks; pass `Model.shapes()` of both"
            )


def layouts_of_axes(stacked: Iterable[tuple[str, int, Layout]]) -> dict[str, dict[int, Layout]]:
    """Layouts by name and axis; of several for one axis the last counts."""
    result: dict[str, dict[int, Layout]] = {}
    for name, axis, layout in stacked:
        result.setdefault(name, {})[axis] = layout
    return result


def describe_layout(layout: Sequence[Grid]) -> str:
    """A layout in words: `3 x 4 x 8`, or `16 + 8`."""
    return " + ".join(" x ".join(map(str, grid)) for grid in layout)
