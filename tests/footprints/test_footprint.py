"""Footprints of small models in large ones, and reading with them."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedloom.footprints import AxisSlicer, Footprint, centered, find_footprint, leading, rolling, take_block
from fedloom.methods.fedrolex import sampled
from fedloom.models import Model


def covered(footprint: Footprint, name: str, axis: int, size: int) -> list[int]:
    """The entries of one axis that are covered, as plain numbers."""
    part = footprint.blocks[name][axis]
    return part.tolist() if isinstance(part, Tensor) else list(range(size))[part]


def entry(slicer: str, offset: int, axis: int, small: int, large: int, number: int) -> int:
    """Which entry of the large axis the small axis's entry lies on."""
    if slicer != "leading" and axis >= 2:  # kernels are centered, also under a rolling window
        return number + (large - small) // 2
    if slicer == "rolling" and small != large:
        return (offset + number) % large
    return number


SLICERS: dict[str, Callable[[int], AxisSlicer]] = {
    "leading": lambda offset: leading,
    "centered": lambda offset: centered,
    "rolling": rolling,
}
sizes = st.integers(1, 5).flatmap(lambda large: st.tuples(st.integers(1, large), st.just(large)))


@given(axes=st.lists(sizes, min_size=1, max_size=4), slicer=st.sampled_from(sorted(SLICERS)), offset=st.integers(0, 9))
def test_read_every_slicer_matches_indexing(axes: list[tuple[int, int]], slicer: str, offset: int) -> None:
    small, large = (torch.Size(each) for each in zip(*axes, strict=True))
    whole = torch.arange(large.numel()).view(large)
    footprint = find_footprint({"w": small}, {"w": large}, SLICERS[slicer](offset))
    read = footprint.read({"w": whole})["w"]
    assert read.shape == small
    for index in torch.ones(small).nonzero().tolist():
        at = tuple(entry(slicer, offset, axis, *axes[axis], number) for axis, number in enumerate(index))
        assert read[tuple(index)] == whole[at]


def test_leading_any_axis_returns_first_entries() -> None:
    assert leading(0, 2, 5) == slice(0, 2)


@pytest.mark.parametrize(("axis", "small", "large", "first"), [(0, 2, 6, 0), (1, 2, 6, 0), (2, 3, 7, 2), (3, 5, 7, 1)])
def test_centered_only_kernel_axes_are_centered(axis: int, small: int, large: int, first: int) -> None:
    assert centered(axis, small, large) == slice(first, first + small)


def test_rolling_window_past_the_end_wraps_around() -> None:
    footprint = find_footprint({"w": torch.Size([3, 4])}, {"w": torch.Size([5, 4])}, rolling(3))
    assert covered(footprint, "w", 0, 5) == [3, 4, 0]
    assert covered(footprint, "w", 1, 4) == [0, 1, 2, 3]


def test_rolling_all_offsets_cover_entries_equally() -> None:
    count = torch.zeros(5)
    for offset in range(5):
        part = rolling(offset)(0, 2, 5)
        count[part] += 1
    assert count.tolist() == [2.0] * 5


def test_sampled_channels_are_distinct_ordered_and_the_same_in_layers_of_equal_width() -> None:
    shapes = ({"a": torch.Size([3, 4]), "b": torch.Size([4, 3])}, {"a": torch.Size([7, 4]), "b": torch.Size([9, 7])})
    found = set()
    for seed in range(300):
        footprint = find_footprint(
            *shapes, sampled(lambda channels, seed=seed: np.random.default_rng([seed, channels]))
        )
        rows = covered(footprint, "a", 0, 7)
        assert rows == sorted(set(rows)) == covered(footprint, "b", 1, 7)
        assert covered(footprint, "a", 1, 4) == [0, 1, 2, 3] and len(covered(footprint, "b", 0, 9)) == 4
        found.add(tuple(rows))
    assert len(found) == 35


def test_find_footprint_names_of_one_model_are_not_covered() -> None:
    small = {"shared": torch.Size([2]), "mine": torch.Size([2])}
    large = {"shared": torch.Size([3]), "theirs": torch.Size([3])}
    assert set(find_footprint(small, large).blocks) == {"shared"}


@pytest.mark.parametrize("small", [(4, 2), (2, 4), (2,), (2, 2, 1)])
def test_find_footprint_larger_tensor_is_not_covered(small: tuple[int, ...]) -> None:
    assert find_footprint({"w": torch.Size(small)}, {"w": torch.Size([3, 3])}).blocks == {}


def test_read_slices_returns_views() -> None:
    whole = torch.randn(4, 6)
    read = find_footprint({"w": torch.Size([2, 3])}, {"w": whole.shape}).read({"w": whole})["w"]
    assert read.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    assert read.stride() == whole.stride()


@pytest.mark.parametrize("slicer", [leading, centered, rolling(2), sampled(np.random.default_rng)])
def test_read_every_slicer_is_differentiable(slicer: AxisSlicer) -> None:
    whole = torch.randn(3, 4, 5, requires_grad=True)
    footprint = find_footprint({"w": torch.Size([2, 4, 3])}, {"w": whole.shape}, slicer)
    factors = torch.randn(2, 4, 3)
    (footprint.read({"w": whole})["w"] * factors).sum().backward()
    expected = torch.zeros(3, 4, 5)
    rows, columns = covered(footprint, "w", 0, 3), covered(footprint, "w", 2, 5)
    for i, row in enumerate(rows):
        for k, column in enumerate(columns):
            expected[row, :, column] = factors[i, :, k]
    assert torch.equal(whole.grad, expected)


@pytest.mark.parametrize("slicer", [leading, rolling(2), sampled(np.random.default_rng)])
def test_read_leading_device_axis_is_kept(slicer: AxisSlicer) -> None:
    block = torch.randn(3, 4, 5)
    footprint = find_footprint({"w": torch.Size([2, 3])}, {"w": torch.Size([4, 5])}, slicer)
    read = footprint.read({"w": block})["w"]
    for device in range(3):
        assert torch.equal(read[device], take_block(block[device], footprint.blocks["w"]))


@given(
    keep=st.lists(st.booleans(), min_size=4, max_size=4),
    again=st.lists(st.booleans(), min_size=4, max_size=4),
    offset=st.none() | st.integers(0, 6),
)
def test_restrict_once_and_again_keeps_marked_entries(keep: list[bool], again: list[bool], offset: int | None) -> None:
    """Once, and once more in what is left; in a slice and in a window that wraps."""
    slicer = leading if offset is None else rolling(offset)
    footprint = find_footprint({"w": torch.Size([4, 2])}, {"w": torch.Size([7, 3])}, slicer)
    first = covered(footprint, "w", 0, 7)
    once = footprint.restrict("w", 0, torch.tensor(keep))
    left = [number for number, kept in zip(first, keep, strict=True) if kept]
    assert covered(once, "w", 0, 7) == left
    marks = again[: len(left)]
    twice = once.restrict("w", 0, torch.tensor(marks, dtype=torch.bool))
    assert covered(twice, "w", 0, 7) == [number for number, kept in zip(left, marks, strict=True) if kept]
    whole = torch.arange(21).view(7, 3)
    columns = covered(footprint, "w", 1, 3)
    expected = [[int(whole[row, column]) for column in columns] for row in left]
    assert once.read({"w": whole})["w"].tolist() == expected


def test_restrict_one_axis_leaves_the_others() -> None:
    footprint = find_footprint(
        {"w": torch.Size([2, 3]), "v": torch.Size([2])}, {"w": torch.Size([4, 3]), "v": torch.Size([4])}
    )
    less = footprint.restrict("w", 1, torch.tensor([True, False, True]))
    assert covered(less, "w", 0, 4) == [0, 1]
    assert covered(less, "w", 1, 3) == [0, 2]
    assert covered(less, "v", 0, 4) == [0, 1]
    assert covered(footprint, "w", 1, 3) == [0, 1, 2]  # the one it came from is unchanged


def test_only_prefixes_keep_tensors_below_them() -> None:
    names = ["blocks.0.weight", "blocks.1.weight", "head.weight", "head.bias"]
    footprint = Footprint({name: (slice(0, 1),) for name in names})
    assert set(footprint.only("head").blocks) == {"head.weight", "head.bias"}
    assert set(footprint.only("head.bias", "blocks.0").blocks) == {"head.bias", "blocks.0.weight"}
    assert footprint.only().blocks == {}


def test_only_prefix_of_a_longer_name_is_not_matched() -> None:
    footprint = Footprint({name: (slice(0, 1),) for name in ("stages.1.weight", "stages.10.weight", "stages.1")})
    assert set(footprint.only("stages.1").blocks) == {"stages.1.weight", "stages.1"}


def test_find_footprint_nested_widths_compose(family: str, tiny_model: Callable[..., Model]) -> None:
    """Reading the middle size and from it the smallest is reading the smallest."""
    large, middle, small = (tiny_model(family, width=width) for width in (1.0, 0.5, 0.25))
    weights = large.initial_weights(0)
    in_two_steps = find_footprint(small.shapes(), middle.shapes()).read(
        find_footprint(middle.shapes(), large.shapes()).read(weights)
    )
    at_once = find_footprint(small.shapes(), large.shapes()).read(weights)
    assert at_once.keys() == small.shapes().keys()
    assert all(torch.equal(tensor, in_two_steps[name]) for name, tensor in at_once.items())


def test_find_footprint_every_family_width_covers_all_names(family: str, tiny_model: Callable[..., Model]) -> None:
    """HeteroFL's slices: all inputs, all classes, the first ceil(rate · size) of everything between."""
    large = tiny_model(family)
    for width in (0.75, 0.5, 0.25, 0.1):
        small = tiny_model(family, width=width)
        blocks = find_footprint(small.shapes(), large.shapes()).blocks
        assert blocks.keys() == large.shapes().keys()
        for name in large.label_rows():
            assert blocks[name][0] == slice(0, large.classes)
