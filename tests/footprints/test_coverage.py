"""The mean over those who cover an entry, against a loop over every entry."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedloom.footprints import ClientUpdate, Footprint, coverage_mean, find_footprint, leading, rolling


@st.composite
def contributions(draw: st.DrawFn) -> tuple[dict[str, Tensor], list[ClientUpdate]]:
    """Some tensors, and devices that cover a slice, a window that wraps, or chosen rows of some of them."""
    seed = draw(st.integers(0, 10_000))
    numbers = torch.Generator().manual_seed(seed)
    shapes = {name: draw(st.lists(st.integers(1, 4), min_size=0, max_size=3)) for name in "ab"}
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    whole = {name: torch.randn(shape, generator=numbers, dtype=dtype) for name, shape in shapes.items()}
    said = []
    for _ in range(draw(st.integers(0, 4))):
        names = draw(st.sets(st.sampled_from("ab")))
        small = {name: torch.Size([draw(st.integers(1, size)) for size in shapes[name]]) for name in sorted(names)}
        large = {name: torch.Size(shape) for name, shape in shapes.items()}
        place = leading if draw(st.booleans()) else rolling(draw(st.integers(0, 5)))
        footprint = find_footprint(small, large, place)
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
        said.append(ClientUpdate(footprint, tensors, draw(st.sampled_from([1.0, 0.25, 3.0, 7.0]))))
    return whole, said


def numbers_on(part: slice | Tensor, size: int) -> list[int]:
    return part.tolist() if isinstance(part, Tensor) else list(range(size))[part]


def values_at(contribution: ClientUpdate, name: str, index: list[int], shape: torch.Size) -> list[float]:
    """What a device says on one entry: one number, or none."""
    if name not in contribution.footprint.blocks:
        return []
    places = []
    for axis, part in enumerate(contribution.footprint.blocks[name]):
        on_axis = numbers_on(part, shape[axis])
        if index[axis] not in on_axis:
            return []
        places.append(on_axis.index(index[axis]))
    return [float(contribution.tensors[name][tuple(places)])]


@given(case=contributions())
def test_every_entry_is_the_mean_of_those_who_cover_it(case: tuple[dict[str, Tensor], list[ClientUpdate]]) -> None:
    whole, said = case
    made = coverage_mean(whole, said)
    assert made.keys() == whole.keys()
    for name, old in whole.items():
        assert made[name].dtype == old.dtype
        for index in torch.ones(old.shape).nonzero().tolist() if old.dim() else [[]]:
            total = mass = 0.0
            for contribution in said:
                for value in values_at(contribution, name, index, old.shape):
                    total += value * contribution.weight
                    mass += contribution.weight
            found = made[name][tuple(index)]
            expected = torch.tensor(total / mass, dtype=torch.float64).to(old.dtype) if mass else old[tuple(index)]
            assert float(found) == float(expected)


def everything(shape: tuple[int, ...]) -> Footprint:
    return find_footprint({"w": torch.Size(shape)}, {"w": torch.Size(shape)})


def test_what_nobody_covers_stays_to_the_bit(bits_equal: Callable[..., bool]) -> None:
    """Also zeros of either sign, and what is not a number."""
    old = torch.tensor([[1.0, -0.0], [float("nan"), float("inf")]])
    small = find_footprint({"w": torch.Size([1, 1])}, {"w": torch.Size([2, 2])})
    made = coverage_mean({"w": old, "untouched": old}, [ClientUpdate(small, {"w": torch.tensor([[5.0]])}, 1.0)])
    assert float(made["w"][0, 0]) == 5.0
    assert bits_equal(made["w"].flatten()[1:], old.flatten()[1:])
    assert bits_equal(made["untouched"], old)


def test_nobody_says_anything(bits_equal: Callable[..., bool]) -> None:
    old = torch.randn(3)
    assert bits_equal(coverage_mean({"w": old}, [])["w"], old)


def test_a_device_that_counts_nothing_covers_nothing() -> None:
    said = [ClientUpdate(everything((2,)), {"w": torch.full((2,), 9.0)}, 0.0)]
    assert coverage_mean({"w": torch.tensor([1.0, 2.0])}, said)["w"].tolist() == [1.0, 2.0]


def test_a_device_with_no_row_left_says_nothing() -> None:
    none = everything((2, 3)).restrict("w", 0, torch.tensor([False, False]))
    old = torch.randn(2, 3)
    assert torch.equal(coverage_mean({"w": old}, [ClientUpdate(none, {"w": torch.zeros(0, 3)}, 1.0)])["w"], old)


def test_sums_are_in_float64() -> None:
    """In float32 the small numbers would drown in the large one: 1e8 + 1 is 1e8."""
    values = [1e8, 1.0, 1.0, 1.0, -1e8, 1.0]
    said = [ClientUpdate(everything((1,)), {"w": torch.tensor([value])}, 1.0) for value in values]
    made = coverage_mean({"w": torch.zeros(1)}, said)["w"]
    assert made.dtype == torch.float32
    assert made.tolist() == torch.tensor([4.0 / 6.0]).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nothing_given_is_changed(dtype: torch.dtype) -> None:
    old, new = torch.zeros(2, dtype=dtype), torch.ones(2, dtype=dtype)
    coverage_mean({"w": old}, [ClientUpdate(everything((2,)), {"w": new}, 2.0)] * 2)
    assert old.tolist() == [0.0, 0.0]
    assert new.tolist() == [1.0, 1.0]


def test_half_precision_comes_back_as_it_was() -> None:
    said = [ClientUpdate(everything((1,)), {"w": torch.tensor([v], dtype=torch.bfloat16)}, 1.0) for v in (1.0, 2.0)]
    made = coverage_mean({"w": torch.zeros(1, dtype=torch.bfloat16)}, said)["w"]
    assert (made.dtype, made.tolist()) == (torch.bfloat16, [1.5])


def test_equal_contributions_give_themselves(bits_equal: Callable[..., bool]) -> None:
    value = torch.randn(5)
    said = [ClientUpdate(everything((5,)), {"w": value}, weight) for weight in (1.0, 1.0, 1.0)]
    assert bits_equal(coverage_mean({"w": torch.zeros(5)}, said)["w"], value)
