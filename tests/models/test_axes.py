"""Layouts of axes: their entries are those of a brute-force search, and sizes within sizes compose."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedloom.footprints import AxisSlicer, centered, find_footprint, leading, rolling
from fedloom.models import LayoutError, ModelShapes, concatenated, gates, heads, packed
from fedloom.models.axes import (
    AxisDeclaration,
    Layout,
    UnknownLayoutError,
    describe_layout,
    is_plain,
    layout_fits,
    plain,
    stacked_entries,
)

grids = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple)


@st.composite
def nested_layouts(draw: st.DrawFn, sizes: int = 2) -> list[Layout]:
    """Layouts from large to small, each of which lies in the one before."""
    found: list[Layout] = [tuple(draw(st.lists(grids, min_size=1, max_size=3)))]
    for _ in range(sizes - 1):
        blocks = draw(st.integers(1, len(found[-1])))
        found.append(tuple(tuple(draw(st.integers(1, size)) for size in grid) for grid in found[-1][:blocks]))
    return found


def length(layout: Layout) -> int:
    return sum(map(math.prod, layout))


def entries(small: Layout, large: Layout, slicer: AxisSlicer = leading) -> list[int]:
    found: list[int] = torch.arange(length(large))[stacked_entries(small, large, slicer)].tolist()
    return found


def coordinates(layout: Layout) -> list[tuple[int, ...]]:
    """The block of every entry of an axis and its place in the block's grid, in the order of the entries."""
    return [
        (number, *place)
        for number, grid in enumerate(layout)
        for place in itertools.product(*(range(size) for size in grid))
    ]


def shapes(layout: Layout, name: str = "w", axis: int = 0, others: tuple[int, ...] = ()) -> ModelShapes:
    sides = list(others)
    sides.insert(axis, length(layout))
    return ModelShapes({name: torch.Size(sides)}, {name: {axis: layout}})


@given(nested_layouts())
def test_stacked_entries_are_those_with_the_same_coordinates(layouts: list[Layout]) -> None:
    large, small = layouts
    numbered = {place: number for number, place in enumerate(coordinates(large))}
    assert entries(small, large) == [numbered[place] for place in coordinates(small)]


@given(nested_layouts(), st.integers(0, 9))
def test_stacked_entries_every_slicer_covers_each_once(layouts: list[Layout], offset: int) -> None:
    large, small = layouts
    for slicer in (leading, centered, rolling(offset)):
        found = entries(small, large, slicer)
        assert len(set(found)) == len(found) == length(small)
        assert all(0 <= entry < length(large) for entry in found)
    assert entries(small, large) == sorted(entries(small, large))


@given(nested_layouts(sizes=3))
def test_stacked_entries_size_within_size_compose(layouts: list[Layout]) -> None:
    large, middle, small = layouts
    outer = entries(middle, large)
    assert layout_fits(small, middle) and layout_fits(middle, large) and layout_fits(small, large)
    assert [outer[entry] for entry in entries(small, middle)] == entries(small, large)


@given(nested_layouts(), st.integers(0, 9))
def test_stacked_entries_rolling_moves_innermost_dimension_only(layouts: list[Layout], offset: int) -> None:
    large, small = layouts
    places = coordinates(large)
    rolled = [places[entry] for entry in entries(small, large, rolling(offset))]
    for place, (block, *outer, inner) in zip(rolled, coordinates(small), strict=True):
        size, whole = small[block][-1], large[block][-1]
        expected = inner if size == whole else (offset + inner) % whole
        assert place == (block, *outer, expected)


@given(nested_layouts(), st.integers(0, 2), st.data())
def test_footprint_stacked_axis_read_after_write_returns_part(
    layouts: list[Layout], axis: int, data: st.DataObject
) -> None:
    large, small = layouts
    others = data.draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    footprint = find_footprint(shapes(small, axis=axis, others=others), shapes(large, axis=axis, others=others))
    sides = list(others)
    sides.insert(axis, length(small))
    part = torch.randn(sides)
    sides[axis] = length(large)
    whole = torch.randn(sides)
    written = footprint.write({"w": whole}, {"w": part})["w"]
    assert torch.equal(footprint.read({"w": written})["w"], part)
    outside = sorted(set(range(length(large))) - set(entries(small, large)))
    assert torch.equal(written.index_select(axis, torch.tensor(outside, dtype=torch.int64)),
                       whole.index_select(axis, torch.tensor(outside, dtype=torch.int64)))  # fmt: skip


@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 3))
def test_find_footprint_plain_axes_are_the_slices_of_plain_shapes(small: int, extra: int, axis: int) -> None:
    sides = [torch.Size([3] * axis + [size]) for size in (small, small + extra)]
    known = [ModelShapes({"w": size}, {}) for size in sides]
    expected = find_footprint({"w": sides[0]}, {"w": sides[1]}).blocks["w"]
    assert find_footprint(*known).blocks["w"] == expected
    assert all(isinstance(covered, slice) for covered in expected)


@pytest.mark.parametrize(
    ("declared", "length", "layout"),
    [
        (packed(3), 12, ((3, 4),)),
        (heads(4), 12, ((4, 3),)),
        (gates(4), 12, ((4, 3),)),
        (packed(3, heads(2)), 12, ((3, 2, 2),)),
        (concatenated(8, 4), 12, ((8,), (4,))),
        (concatenated(8, (4, heads(2))), 12, ((8,), (2, 2))),
        (packed(2, concatenated(4, 2)), 12, ((4,), (2,), (4,), (2,))),
    ],
)
def test_declaration_resolves_to_layout(declared: AxisDeclaration, length: int, layout: Layout) -> None:
    assert declared.layout(length) == layout


@pytest.mark.parametrize("declared", [heads(5), packed(3, heads(5)), concatenated(8, 3), heads(0)])
def test_declaration_other_length_is_refused(declared: AxisDeclaration) -> None:
    with pytest.raises(LayoutError):
        declared.layout(12)


def test_stacked_entries_packed_projections_keep_part_of_each() -> None:
    """Three projections of 4, of which the small model has 2 each."""
    assert entries(((3, 2),), ((3, 4),)) == [0, 1, 4, 5, 8, 9]


def test_stacked_entries_fewer_heads_are_the_first_and_a_slice() -> None:
    assert stacked_entries(((2, 4),), ((3, 4),), leading) == slice(0, 8)


def test_stacked_entries_fewer_concatenated_parts_are_the_first() -> None:
    assert entries(((2,), (1,)), ((3,), (2,), (5,))) == [0, 1, 3]


@pytest.mark.parametrize(
    ("small", "large"),
    [
        (((4, 2),), ((2, 8),)),  # more heads
        (((8,),), ((2, 4),)),  # not divided into heads
        (((2,), (2,)), ((4,),)),  # more parts
    ],
)
def test_find_footprint_other_layout_is_not_covered(small: Layout, large: Layout) -> None:
    assert find_footprint(shapes(small), shapes(large)).blocks == {}


def test_find_footprint_tensor_shapes_without_layout_are_refused() -> None:
    """The first rows of a packed weight would be silently wrong."""
    with pytest.raises(UnknownLayoutError, match=r"axis 0 of w stacks 3 x 2"):
        find_footprint(shapes(((3, 2),)), {"w": torch.Size([12])})
    assert find_footprint(shapes(((3, 2),)), {"w": torch.Size([6])}).blocks == {"w": (slice(0, 6),)}


def test_find_footprint_channels_on_third_axis_are_leading_and_kernels_centered() -> None:
    token, kernel = torch.Size([1, 1, 2]), torch.Size([1, 1, 3])
    large = ModelShapes({"token": torch.Size([1, 1, 4]), "kernel": torch.Size([1, 1, 5])}, {"token": {2: plain(4)}})
    small = ModelShapes({"token": token, "kernel": kernel}, {"token": {2: plain(2)}})
    blocks = find_footprint(small, large).blocks
    assert blocks["token"][2] == slice(0, 2) and blocks["kernel"][2] == slice(1, 4)


def test_describe_layout_names_grids_and_parts() -> None:
    assert describe_layout(((3, 2), (5,))) == "3 x 2 + 5"
    assert is_plain(plain(3)) and not is_plain(((1, 3),))


def test_footprint_of_stacked_axis_is_differentiable() -> None:
    whole = torch.randn(12, requires_grad=True)
    read = find_footprint(shapes(((3, 2),)), shapes(((3, 4),))).read({"w": whole})["w"]
    (slope,) = torch.autograd.grad(read.sum(), whole)
    expected: Tensor = torch.tensor([1.0, 1, 0, 0] * 3)
    assert torch.equal(slope, expected)
