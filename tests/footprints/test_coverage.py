"""The coverage mean against a loop over every entry."""

import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedloom.footprints import ClientUpdate, Footprint, coverage, coverage_mean, find_footprint, leading, rolling


@st.composite
def updates_of_devices(draw: st.DrawFn) -> tuple[dict[str, Tensor], list[ClientUpdate]]:
    """Some tensors, and devices that cover a slice, a window that wraps, or chosen rows of some of them."""
    seed = draw(st.integers(0, 10_000))
    numbers = torch.Generator().manual_seed(seed)
    shapes = {name: draw(st.lists(st.integers(1, 4), min_size=0, max_size=3)) for name in "ab"}
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    whole = {name: torch.randn(shape, generator=numbers, dtype=dtype) for name, shape in shapes.items()}
    updates = []
    for _ in range(draw(st.integers(0, 4))):
        names = draw(st.sets(st.sampled_from("ab")))
        small = {name: torch.Size([draw(st.integers(1, size)) for size in shapes[name]]) for name in sorted(names)}
        large = {name: torch.Size(shape) for name, shape in shapes.items()}
        slicer = leading if draw(st.booleans()) else rolling(draw(st.integers(0, 5)))
        footprint = find_footprint(small, large, slicer)
        for name, shape in small.items():
            if len(shape) and draw(st.booleans()):
                axis = draw(st.integers(0, len(shape) - 1))
                keep = draw(st.lists(st.booleans(), min_size=shape[axis], max_size=shape[axis]))
                footprint = footprint.restrict(name, axis, torch.tensor(keep))
        tensors = {
            name: torch.randn(read.shape, generator=numbers).to(
                dtype
            )  # so that products with weights are exact in float64
            for name, read in footprint.read(whole).items()
        }
        updates.append(ClientUpdate(footprint, tensors, draw(st.sampled_from([1.0, 0.25, 3.0, 7.0]))))
    return whole, updates


def numbers_on(part: slice | Tensor, size: int) -> list[int]:
    return part.tolist() if isinstance(part, Tensor) else list(range(size))[part]


def values_at(update: ClientUpdate, name: str, index: list[int], shape: torch.Size) -> list[float]:
    """A device's value of one entry: one number, or none."""
    if name not in update.footprint.blocks:
        return []
    places = []
    for axis, part in enumerate(update.footprint.blocks[name]):
        on_axis = numbers_on(part, shape[axis])
        if index[axis] not in on_axis:
            return []
        places.append(on_axis.index(index[axis]))
    return [float(update.tensors[name][tuple(places)])]


@given(case=updates_of_devices())
def test_coverage_mean_entry_is_mean_of_its_contributors(
    case: tuple[dict[str, Tensor], list[ClientUpdate]],
) -> None:
    whole, updates = case
    result = coverage_mean(whole, updates)
    assert result.keys() == whole.keys()
    for name, old in whole.items():
        assert result[name].dtype == old.dtype
        for index in torch.ones(old.shape).nonzero().tolist() if old.dim() else [[]]:
            total = mass = 0.0
            for update in updates:
                for value in values_at(update, name, index, old.shape):
                    total += value * update.weight
                    mass += update.weight
            found = result[name][tuple(index)]
            expected = torch.tensor(total / mass, dtype=torch.float64).to(old.dtype) if mass else old[tuple(index)]
            assert float(found) == float(expected)


def everything(shape: tuple[int, ...]) -> Footprint:
    return find_footprint({"w": torch.Size(shape)}, {"w": torch.Size(shape)})


def test_coverage_mean_uncovered_entry_stays_bit_for_bit(bits_equal: Callable[..., bool]) -> None:
    """Also zeros of either sign, and what is not a number."""
    old = torch.tensor([[1.0, -0.0], [float("nan"), float("inf")]])
    small = find_footprint({"w": torch.Size([1, 1])}, {"w": torch.Size([2, 2])})
    result = coverage_mean({"w": old, "untouched": old}, [ClientUpdate(small, {"w": torch.tensor([[5.0]])}, 1.0)])
    assert float(result["w"][0, 0]) == 5.0
    assert bits_equal(result["w"].flatten()[1:], old.flatten()[1:])
    assert bits_equal(result["untouched"], old)


def test_coverage_mean_no_updates_keeps_the_weights(bits_equal: Callable[..., bool]) -> None:
    old = torch.randn(3)
    assert bits_equal(coverage_mean({"w": old}, [])["w"], old)


def test_coverage_mean_update_of_weight_zero_is_ignored() -> None:
    updates = [ClientUpdate(everything((2,)), {"w": torch.full((2,), 9.0)}, 0.0)]
    assert coverage_mean({"w": torch.tensor([1.0, 2.0])}, updates)["w"].tolist() == [1.0, 2.0]


def test_coverage_mean_empty_footprint_keeps_the_weights() -> None:
    none = everything((2, 3)).restrict("w", 0, torch.tensor([False, False]))
    old = torch.randn(2, 3)
    assert torch.equal(coverage_mean({"w": old}, [ClientUpdate(none, {"w": torch.zeros(0, 3)}, 1.0)])["w"], old)


def test_coverage_mean_values_of_mixed_size_are_summed_in_float64() -> None:
    """In float32 the small numbers would drown in the large one: 1e8 + 1 is 1e8."""
    values = [1e8, 1.0, 1.0, 1.0, -1e8, 1.0]
    updates = [ClientUpdate(everything((1,)), {"w": torch.tensor([value])}, 1.0) for value in values]
    result = coverage_mean({"w": torch.zeros(1)}, updates)["w"]
    assert result.dtype == torch.float32
    assert result.tolist() == torch.tensor([4.0 / 6.0]).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_coverage_mean_arguments_are_not_modified(dtype: torch.dtype) -> None:
    old, new = torch.zeros(2, dtype=dtype), torch.ones(2, dtype=dtype)
    coverage_mean({"w": old}, [ClientUpdate(everything((2,)), {"w": new}, 2.0)] * 2)
    assert old.tolist() == [0.0, 0.0]
    assert new.tolist() == [1.0, 1.0]


def test_coverage_mean_half_precision_keeps_its_dtype() -> None:
    updates = [ClientUpdate(everything((1,)), {"w": torch.tensor([v], dtype=torch.bfloat16)}, 1.0) for v in (1.0, 2.0)]
    result = coverage_mean({"w": torch.zeros(1, dtype=torch.bfloat16)}, updates)["w"]
    assert (result.dtype, result.tolist()) == (torch.bfloat16, [1.5])


def test_coverage_mean_equal_updates_return_their_value(bits_equal: Callable[..., bool]) -> None:
    value = torch.randn(5)
    updates = [ClientUpdate(everything((5,)), {"w": value}, weight) for weight in (1.0, 1.0, 1.0)]
    assert bits_equal(coverage_mean({"w": torch.zeros(5)}, updates)["w"], value)


@pytest.mark.parametrize("near", [1, 7, 50, 1000])
@pytest.mark.parametrize("seed", range(5))
def test_coverage_mean_in_parts_has_bits_of_whole(near: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some rows at a time, whatever the blocks: nested or not, from the start or not, negative zeros included."""
    draw = random.Random(seed)
    shape = (draw.randint(2, 20), draw.randint(2, 30), 3)

    def block() -> tuple[slice, ...]:
        starts = [draw.choice([0, 0, size // 3]) for size in shape]
        return tuple(slice(start, draw.randint(start + 1, size)) for start, size in zip(starts, shape, strict=True))

    weights, updates = {"a": torch.randn(shape)}, []
    for _ in range(draw.randint(1, 5)):
        covered = draw.choice([block(), tuple(slice(0, size) for size in shape)])
        tensor = torch.randn([axis.stop - axis.start for axis in covered])
        tensor[tensor.abs() < 0.3] = -0.0
        updates.append(ClientUpdate(Footprint({"a": covered}), {"a": tensor}, draw.choice([1.0, 3.0, 0.7])))
    whole = coverage_mean(weights, updates)["a"]
    monkeypatch.setattr(coverage, "NEAR", near)
    assert torch.equal(coverage_mean(weights, updates)["a"].view(torch.int32), whole.view(torch.int32))
