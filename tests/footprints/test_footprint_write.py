"""Writing a small model back into a large one, and indexing exactly the entries it covers."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedloom.fleet import Device
from fedloom.footprints import Footprint, find_footprint, is_submodel, leading, rolling, subnet_footprint
from fedloom.footprints.footprint import Axis, block_index, take_block
from fedloom.models import Model
from tests.conftest import smaller_size


@st.composite
def blocks(draw: st.DrawFn) -> tuple[torch.Size, tuple[Axis, ...]]:
    """A shape and, for each of its axes, a slice of it or index numbers in any order, none twice."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    block: list[Axis] = []
    for size in shape:
        numbers = draw(st.lists(st.integers(0, size - 1), unique=True, max_size=size))
        start = draw(st.integers(0, size - 1))
        stop = draw(st.integers(start, size))
        block.append(draw(st.sampled_from([slice(start, stop), torch.tensor(numbers, dtype=torch.int64)])))
    return torch.Size(shape), tuple(block)


def numbers_of(part: Axis, size: int) -> list[int]:
    return part.tolist() if isinstance(part, Tensor) else list(range(size))[part]


def marked(shape: torch.Size, block: tuple[Axis, ...]) -> Tensor:
    """Which entries are covered, found one by one."""
    marks = torch.zeros(shape, dtype=torch.bool)
    for index in torch.ones(shape).nonzero().tolist():
        marks[tuple(index)] = all(
            at in numbers_of(part, size) for at, part, size in zip(index, block, shape, strict=True)
        )
    return marks


@given(case=blocks())
def test_write_any_block_is_read_back_and_the_rest_is_kept(case: tuple[torch.Size, tuple[Axis, ...]]) -> None:
    shape, block = case
    footprint, whole = Footprint({"w": block}), {"w": torch.randn(shape), "other": torch.randn(2)}
    kept, marks = whole["w"].clone(), marked(shape, block)
    part = {"w": torch.randn(footprint.read(whole)["w"].shape)}
    result = footprint.write(whole, part)
    assert torch.equal(footprint.read(result)["w"], part["w"])
    assert torch.equal(result["w"][~marks], kept[~marks])
    assert torch.equal(whole["w"], kept)  # what it was written into is unchanged
    assert result["other"] is whole["other"]


@given(case=blocks())
def test_write_what_was_read_changes_nothing(case: tuple[torch.Size, tuple[Axis, ...]]) -> None:
    shape, block = case
    footprint, whole = Footprint({"w": block}), {"w": torch.randn(shape)}
    assert torch.equal(footprint.write(whole, footprint.read(whole))["w"], whole["w"])


@given(case=blocks())
def test_block_index_any_block_selects_covered_entries_in_order(case: tuple[torch.Size, tuple[Axis, ...]]) -> None:
    shape, block = case
    tensor = torch.arange(shape.numel()).view(shape)
    assert torch.equal(tensor[block_index(tensor, block)], take_block(tensor, block))
    marks = torch.zeros(shape, dtype=torch.bool)
    marks[block_index(marks, block)] = True
    assert torch.equal(marks, marked(shape, block))


@given(case=blocks())
def test_block_index_addition_counts_every_entry_once(case: tuple[torch.Size, tuple[Axis, ...]]) -> None:
    shape, block = case
    count = torch.zeros(shape)
    count[block_index(count, block)] += torch.ones(())
    assert torch.equal(count, marked(shape, block).float())


def test_block_index_slices_are_returned_unchanged() -> None:
    block = (slice(0, 2), slice(1, 3))
    assert block_index(torch.zeros(3, 4), block) == block


def test_write_names_missing_in_the_small_model_are_kept() -> None:
    small = {"shared": torch.Size([2])}
    whole = {"shared": torch.zeros(3), "deeper": torch.ones(2)}
    result = find_footprint(small, {name: tensor.shape for name, tensor in whole.items()}).write(
        whole, {"shared": torch.ones(2)}
    )
    assert result["shared"].tolist() == [1.0, 1.0, 0.0]
    assert result["deeper"] is whole["deeper"]


@pytest.mark.parametrize("slicer", [leading, rolling(3)])
def test_write_every_family_is_read_back(family: str, slicer: object, tiny_model: Callable[..., Model]) -> None:
    whole, small = tiny_model(family), tiny_model(family, **smaller_size(family))
    footprint = find_footprint(small.shapes(), whole.shapes(), slicer)  # type: ignore[arg-type]
    result = footprint.write(whole.initial_weights(0), small.initial_weights(1))
    assert all(torch.equal(tensor, small.initial_weights(1)[name]) for name, tensor in footprint.read(result).items())


def test_subnet_footprint_larger_model_is_refused(family: str, tiny_model: Callable[..., Model]) -> None:
    whole, small = tiny_model(family), tiny_model(family, **smaller_size(family))
    assert subnet_footprint(small, whole).blocks == find_footprint(small.shapes(), whole.shapes()).blocks
    assert is_submodel(small.shapes(), whole.shapes())
    assert is_submodel(whole.shapes(), whole.shapes())
    assert not is_submodel(whole.shapes(), small.shapes())
    with pytest.raises(ValueError, match=f"{family}: .* does not lie in the larger"):
        subnet_footprint(whole, small)


@pytest.mark.parametrize(
    ("small", "inside"),
    [
        ({"w": (2, 3)}, True),
        ({}, True),
        ({"w": (3, 4)}, True),
        ({"w": (4, 1)}, False),
        ({"w": (2,)}, False),
        ({"v": (1, 1)}, False),
        ({"w": (1, 1), "v": (1,)}, False),
    ],
)
def test_is_submodel_requires_every_tensor_to_fit(small: dict[str, tuple[int, ...]], inside: bool) -> None:
    assert is_submodel({name: torch.Size(shape) for name, shape in small.items()}, {"w": torch.Size([3, 4])}) == inside


def test_device_with_model_has_the_other_models_footprint(tiny_model: Callable[..., Model]) -> None:
    whole, small = tiny_model("convnet"), tiny_model("convnet", width=0.5)
    device = Device("3", "large", whole, subnet_footprint(whole, whole), pooled_from=("1",))
    other = device.with_model(small, whole)
    assert (other.name, other.tier, other.model, other.pooled_from) == ("3", "large", small, ("1",))
    assert other.footprint.blocks == subnet_footprint(small, whole).blocks
    assert device.model == whole
    with pytest.raises(ValueError, match="does not lie in the larger"):
        device.with_model(whole, small)
