"""The mean that gives no device away: how far one device can move it, what noise it gets, and what it divides by."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedloom.footprints import ClientUpdate, DPAggregator, Footprint, coverage_mean, find_footprint, leading, rolling
from fedloom.footprints.dp import UnprotectedUpdate, expected_contributors
from fedloom.tensors import Tensors

LARGE = {"a": torch.Size([4, 3]), "b": torch.Size([5])}


def merge(expected_participation: list[tuple[Footprint, float]], clip: float = 1.0, noise: float = 0.0) -> DPAggregator:
    return DPAggregator(clip, noise, expected_participation, seed=3, round_number=7)


def everything(*shape: int) -> Footprint:
    return find_footprint({"w": torch.Size(shape)}, {"w": torch.Size(shape)})


def vote(footprint: Footprint, whole: Tensors, update: Tensors) -> ClientUpdate:
    """A device that wants this change of what it covers."""
    return ClientUpdate(footprint, {name: one + update[name] for name, one in footprint.read(whole).items()}, 1.0)


@st.composite
def rounds(draw: st.DrawFn) -> tuple[Tensors, list[tuple[Footprint, float]], list[ClientUpdate]]:
    """A model, up to three tiers that cover a slice or a window of it, and devices with updates of any size."""
    numbers = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    whole = {name: torch.randn(shape, generator=numbers, dtype=torch.float64) for name, shape in LARGE.items()}
    expected_participation = []
    for _ in range(draw(st.integers(1, 3))):
        names = draw(st.sets(st.sampled_from("ab"), min_size=1))
        small = {name: torch.Size([draw(st.integers(1, size)) for size in LARGE[name]]) for name in sorted(names)}
        place = leading if draw(st.booleans()) else rolling(draw(st.integers(0, 5)))
        expected_participation.append((find_footprint(small, LARGE, place), draw(st.floats(0.1, 9.0))))
    said = []
    for _ in range(draw(st.integers(1, 4))):
        footprint, _ = draw(st.sampled_from(expected_participation))
        size = 10.0 ** draw(st.integers(-6, 30))
        update = {
            name: size * torch.randn(one.shape, generator=numbers, dtype=torch.float64)
            for name, one in footprint.read(whole).items()
        }
        said.append(vote(footprint, whole, update))
    return whole, expected_participation, said


@given(case=rounds(), clip=st.sampled_from([0.01, 1.0, 30.0]))
def test_one_device_moves_the_sums_by_at_most_clip(
    case: tuple[Tensors, list[tuple[Footprint, float]], list[ClientUpdate]], clip: float
) -> None:
    """Each ring by clip / votes expected on it, and all rings together, in units of that, by 1."""
    whole, expected_participation, said = case
    private = merge(expected_participation, clip)
    for left_out in range(len(said)):
        others = [one for number, one in enumerate(said) if number != left_out]
        present, absent = (replace(private, _used=[])(whole, heard) for heard in (said, others))
        square = 0.0
        for name, old in whole.items():
            moved = (present[name] - absent[name]) * expected_contributors(name, old, expected_participation)
            square += float(moved.square().sum())
        assert math.sqrt(square) <= clip * (1 + 1e-9)


@given(case=rounds())
def test_entries_that_no_tier_covers_stay(
    case: tuple[Tensors, list[tuple[Footprint, float]], list[ClientUpdate]],
) -> None:
    whole, expected_participation, said = case
    made = merge(expected_participation, noise=2.0)(whole, said)
    for name, old in whole.items():
        nobodys = expected_contributors(name, old, expected_participation) == 0
        assert torch.equal(made[name][nobodys], old[nobodys])
        assert bool((made[name] != old)[~nobodys].all())  # where somebody is expected, there is noise


def test_the_whole_update_is_clipped_not_every_tensor(bits_equal: Callable[..., bool]) -> None:
    footprint = find_footprint(LARGE, LARGE)
    whole = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in LARGE.items()}
    update = {name: torch.ones(shape, dtype=torch.float64) for name, shape in LARGE.items()}
    length = math.sqrt(12 + 5)
    made = merge([(footprint, 1.0)], clip=0.5)(whole, [vote(footprint, whole, update)])
    assert all(torch.allclose(made[name], update[name] * 0.5 / length, rtol=1e-12) for name in LARGE)
    short = merge([(footprint, 1.0)], clip=length + 1e-9)(whole, [vote(footprint, whole, update)])
    assert all(bits_equal(short[name], update[name]) for name in LARGE)


def test_denominators_are_those_expected_whoever_comes() -> None:
    whole = {"w": torch.zeros(4)}
    large, small = everything(4), find_footprint({"w": torch.Size([2])}, {"w": torch.Size([4])})
    expected_participation = [(large, 2.0), (small, 6.0)]
    one = vote(large, whole, {"w": torch.full((4,), 4.0)})
    for said in ([one], [one, one, one]):
        made = merge(expected_participation, clip=100.0)(whole, said)["w"]
        assert made.tolist() == [len(said) * 4.0 / 8.0] * 2 + [len(said) * 4.0 / 2.0] * 2


@given(case=rounds())
def test_without_noise_and_with_all_who_are_expected_it_is_the_coverage_mean(
    case: tuple[Tensors, list[tuple[Footprint, float]], list[ClientUpdate]],
) -> None:
    whole, _, said = case
    near = [one for one in said if all(float(tensor.abs().max()) < 1e3 for tensor in one.tensors.values())]
    made = merge([(one.footprint, 1.0) for one in near], clip=1e9)(whole, near)
    expected = coverage_mean(whole, near)
    assert all(torch.allclose(made[name], expected[name], rtol=1e-9, atol=1e-9) for name in whole)


@pytest.mark.parametrize(("clip", "noise", "votes"), [(1.0, 1.0, 1.0), (0.5, 3.0, 10.0), (2.0, 0.7, 0.25)])
def test_noise_has_the_deviation_it_is_counted_with(clip: float, noise: float, votes: float) -> None:
    count = 400_000
    made = merge([(everything(count), votes)], clip, noise)({"w": torch.zeros(count)}, [])["w"].double()
    expected = noise * clip / votes
    assert abs(float(made.std()) / expected - 1) < 4 / math.sqrt(2 * count)
    assert abs(float(made.mean())) < 4 * expected / math.sqrt(count)
    tails = float((made.abs() > 2 * expected).double().mean())
    assert abs(tails - 0.0455) < 4 * math.sqrt(0.0455 / count)


def test_every_ring_has_its_own_noise() -> None:
    count = 100_000
    small = find_footprint({"w": torch.Size([count // 2])}, {"w": torch.Size([count])})
    made = merge([(everything(count), 2.0), (small, 6.0)], noise=1.0)({"w": torch.zeros(count)}, [])["w"].double()
    for half, expected in ((made[: count // 2], 1 / 8), (made[count // 2 :], 1 / 2)):
        assert abs(float(half.std()) / expected - 1) < 4 / math.sqrt(count)


def test_noise_is_the_rounds_the_seeds_and_the_tensors_own(bits_equal: Callable[..., bool]) -> None:
    shape = torch.Size([50])
    footprint = find_footprint({"a": shape, "b": shape}, {"a": shape, "b": shape})
    whole = {"a": torch.zeros(50), "b": torch.zeros(50)}
    first = merge([(footprint, 1.0)], noise=1.0)
    again, later, elsewhere = (replace(first, _used=[], **change) for change in ({}, {"round_number": 8}, {"seed": 4}))
    drawn = [one(whole, []) for one in (first, later, elsewhere)]
    seen = [one[name] for one in drawn for name in ("a", "b")]
    assert all(not torch.equal(x, y) for n, x in enumerate(seen) for y in seen[:n])
    assert all(bits_equal(tensor, drawn[0][name]) for name, tensor in again(whole, []).items())


def test_an_empty_cohort_gets_noise_too() -> None:
    """Else a model that did not move would tell that nobody was there."""
    made = merge([(everything(3), 1.0)], noise=1.0)({"w": torch.zeros(3)}, [])
    assert bool((made["w"] != 0).all())


def test_what_is_given_is_not_changed_and_types_stay() -> None:
    old = torch.zeros(3, dtype=torch.bfloat16)
    said = [ClientUpdate(everything(3), {"w": torch.ones(3, dtype=torch.bfloat16)}, 1.0)]
    made = merge([(everything(3), 1.0)], noise=1.0)({"w": old}, said)
    assert (made["w"].dtype, old.tolist()) == (torch.bfloat16, [0.0] * 3)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e300])
def test_an_update_without_a_length_is_not_heard(bad: float) -> None:
    old = torch.zeros(3, dtype=torch.float64)
    said = [ClientUpdate(everything(3), {"w": torch.tensor([bad, 1.0, 1.0], dtype=torch.float64)}, 1.0)]
    assert merge([(everything(3), 1.0)])({"w": old}, said)["w"].tolist() == [0.0] * 3


@pytest.mark.parametrize("weight", [0.0, 2.0, 17.0])
def test_only_votes_of_weight_one(weight: float) -> None:
    said = [ClientUpdate(everything(3), {"w": torch.ones(3)}, weight)]
    with pytest.raises(UnprotectedUpdate, match="weight"):
        merge([(everything(3), 1.0)])({"w": torch.zeros(3)}, said)


def test_nobody_votes_where_nobody_is_expected() -> None:
    """There would be no noise, or none that was counted."""
    small = find_footprint({"w": torch.Size([2])}, {"w": torch.Size([3])})
    said = [ClientUpdate(everything(3), {"w": torch.ones(3)}, 1.0)]
    with pytest.raises(UnprotectedUpdate, match="no contributors are expected"):
        merge([(small, 1.0)])({"w": torch.zeros(3)}, said)


def test_a_round_has_one_merge() -> None:
    """Another with the same noise would give both away."""
    private = merge([(everything(3), 1.0)], noise=1.0)
    private({"w": torch.zeros(3)}, [])
    with pytest.raises(UnprotectedUpdate, match="twice"):
        private({"w": torch.zeros(3)}, [])


def test_a_scalar(bits_equal: Callable[..., bool]) -> None:
    whole: dict[str, Tensor] = {"w": torch.tensor(1.0)}
    footprint = find_footprint({"w": torch.Size([])}, {"w": torch.Size([])})
    said = [ClientUpdate(footprint, {"w": torch.tensor(1.5)}, 1.0)]
    assert bits_equal(merge([(footprint, 2.0)])(whole, said)["w"], torch.tensor(1.25))
    assert float(merge([(footprint, 2.0)], noise=1.0)(whole, said)["w"]) != 1.25
