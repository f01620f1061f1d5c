"""Differentially private aggregation: sensitivity to one device, noise, and denominators."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedloom.footprints import ClientUpdate, DPAggregator, Footprint, coverage_mean, find_footprint, leading, rolling
from fedloom.footprints.coverage import count_contributors
from fedloom.footprints.dp import UnprotectedUpdate
from fedloom.tensors import Tensors

LARGE = {"a": torch.Size([4, 3]), "b": torch.Size([5])}


def aggregator(
    expected_participation: list[tuple[Footprint, float]], clip: float = 1.0, noise: float = 0.0
) -> DPAggregator:
    return DPAggregator(clip, noise, expected_participation, seed=3, round_number=7)


def everything(*shape: int) -> Footprint:
    return find_footprint({"w": torch.Size(shape)}, {"w": torch.Size(shape)})


def make_update(footprint: Footprint, whole: Tensors, update: Tensors) -> ClientUpdate:
    """An update that changes what it covers by this."""
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
        slicer = leading if draw(st.booleans()) else rolling(draw(st.integers(0, 5)))
        expected_participation.append((find_footprint(small, LARGE, slicer), draw(st.floats(0.1, 9.0))))
    updates = []
    for _ in range(draw(st.integers(1, 4))):
        footprint, _ = draw(st.sampled_from(expected_participation))
        size = 10.0 ** draw(st.integers(-6, 30))
        update = {
            name: size * torch.randn(one.shape, generator=numbers, dtype=torch.float64)
            for name, one in footprint.read(whole).items()
        }
        updates.append(make_update(footprint, whole, update))
    return whole, expected_participation, updates


@given(case=rounds(), clip=st.sampled_from([0.01, 1.0, 30.0]))
def test_dp_aggregator_one_device_changes_the_sums_by_at_most_clip(
    case: tuple[Tensors, list[tuple[Footprint, float]], list[ClientUpdate]], clip: float
) -> None:
    """Summed over all regions, in units of clip / expected contributors, by at most 1."""
    whole, expected_participation, updates = case
    private = aggregator(expected_participation, clip)
    for left_out in range(len(updates)):
        others = [one for number, one in enumerate(updates) if number != left_out]
        present, absent = (replace(private, _used=[])(whole, updates_of) for updates_of in (updates, others))
        square = 0.0
        for name, old in whole.items():
            moved = (present[name] - absent[name]) * count_contributors(name, old, expected_participation)
            square += float(moved.square().sum())
        assert math.sqrt(square) <= clip * (1 + 1e-9)


@given(case=rounds())
def test_dp_aggregator_entries_of_no_tier_are_kept(
    case: tuple[Tensors, list[tuple[Footprint, float]], list[ClientUpdate]],
) -> None:
    whole, expected_participation, updates = case
    result = aggregator(expected_participation, noise=2.0)(whole, updates)
    for name, old in whole.items():
        unexpected = count_contributors(name, old, expected_participation) == 0
        assert torch.equal(result[name][unexpected], old[unexpected])
        assert bool((result[name] != old)[~unexpected].all())  # where somebody is expected, there is noise


def test_dp_aggregator_clip_applies_to_the_norm_over_all_tensors(bits_equal: Callable[..., bool]) -> None:
    footprint = find_footprint(LARGE, LARGE)
    whole = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in LARGE.items()}
    update = {name: torch.ones(shape, dtype=torch.float64) for name, shape in LARGE.items()}
    length = math.sqrt(12 + 5)
    result = aggregator([(footprint, 1.0)], clip=0.5)(whole, [make_update(footprint, whole, update)])
    assert all(torch.allclose(result[name], update[name] * 0.5 / length, rtol=1e-12) for name in LARGE)
    short = aggregator([(footprint, 1.0)], clip=length + 1e-9)(whole, [make_update(footprint, whole, update)])
    assert all(bits_equal(short[name], update[name]) for name in LARGE)


def test_dp_aggregator_any_cohort_divides_by_expected_contributors() -> None:
    whole = {"w": torch.zeros(4)}
    large, small = everything(4), find_footprint({"w": torch.Size([2])}, {"w": torch.Size([4])})
    expected_participation = [(large, 2.0), (small, 6.0)]
    one = make_update(large, whole, {"w": torch.full((4,), 4.0)})
    for updates in ([one], [one, one, one]):
        result = aggregator(expected_participation, clip=100.0)(whole, updates)["w"]
        assert result.tolist() == [len(updates) * 4.0 / 8.0] * 2 + [len(updates) * 4.0 / 2.0] * 2


@given(case=rounds())
def test_dp_aggregator_no_noise_full_participation_equals_coverage_mean(
    case: tuple[Tensors, list[tuple[Footprint, float]], list[ClientUpdate]],
) -> None:
    whole, _, updates = case
    near = [one for one in updates if all(float(tensor.abs().max()) < 1e3 for tensor in one.tensors.values())]
    result = aggregator([(one.footprint, 1.0) for one in near], clip=1e9)(whole, near)
    expected = coverage_mean(whole, near)
    assert all(torch.allclose(result[name], expected[name], rtol=1e-9, atol=1e-9) for name in whole)


@pytest.mark.parametrize(("clip", "noise", "contributors"), [(1.0, 1.0, 1.0), (0.5, 3.0, 10.0), (2.0, 0.7, 0.25)])
def test_dp_aggregator_noise_has_the_accounted_deviation(clip: float, noise: float, contributors: float) -> None:
    count = 400_000
    result = aggregator([(everything(count), contributors)], clip, noise)({"w": torch.zeros(count)}, [])["w"].double()
    expected = noise * clip / contributors
    assert abs(float(result.std()) / expected - 1) < 4 / math.sqrt(2 * count)
    assert abs(float(result.mean())) < 4 * expected / math.sqrt(count)
    tails = float((result.abs() > 2 * expected).double().mean())
    assert abs(tails - 0.0455) < 4 * math.sqrt(0.0455 / count)


def test_dp_aggregator_noise_is_scaled_per_region() -> None:
    count = 100_000
    small = find_footprint({"w": torch.Size([count // 2])}, {"w": torch.Size([count])})
    result = aggregator([(everything(count), 2.0), (small, 6.0)], noise=1.0)({"w": torch.zeros(count)}, [])[
        "w"
    ].double()
    for half, expected in ((result[: count // 2], 1 / 8), (result[count // 2 :], 1 / 2)):
        assert abs(float(half.std()) / expected - 1) < 4 / math.sqrt(count)


def test_dp_aggregator_noise_depends_on_round_seed_and_tensor(bits_equal: Callable[..., bool]) -> None:
    shape = torch.Size([50])
    footprint = find_footprint({"a": shape, "b": shape}, {"a": shape, "b": shape})
    whole = {"a": torch.zeros(50), "b": torch.zeros(50)}
    first = aggregator([(footprint, 1.0)], noise=1.0)
    again, later, elsewhere = (replace(first, _used=[], **change) for change in ({}, {"round_number": 8}, {"seed": 4}))
    drawn = [one(whole, []) for one in (first, later, elsewhere)]
    seen = [one[name] for one in drawn for name in ("a", "b")]
    assert all(not torch.equal(x, y) for n, x in enumerate(seen) for y in seen[:n])
    assert all(bits_equal(tensor, drawn[0][name]) for name, tensor in again(whole, []).items())


def test_dp_aggregator_empty_cohort_still_adds_noise() -> None:
    """Otherwise an unchanged model would reveal that no device took part."""
    result = aggregator([(everything(3), 1.0)], noise=1.0)({"w": torch.zeros(3)}, [])
    assert bool((result["w"] != 0).all())


def test_dp_aggregator_arguments_are_not_modified_and_dtype_is_kept() -> None:
    old = torch.zeros(3, dtype=torch.bfloat16)
    updates = [ClientUpdate(everything(3), {"w": torch.ones(3, dtype=torch.bfloat16)}, 1.0)]
    result = aggregator([(everything(3), 1.0)], noise=1.0)({"w": old}, updates)
    assert (result["w"].dtype, old.tolist()) == (torch.bfloat16, [0.0] * 3)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e300])
def test_dp_aggregator_nonfinite_norm_is_dropped(bad: float) -> None:
    old = torch.zeros(3, dtype=torch.float64)
    updates = [ClientUpdate(everything(3), {"w": torch.tensor([bad, 1.0, 1.0], dtype=torch.float64)}, 1.0)]
    assert aggregator([(everything(3), 1.0)])({"w": old}, updates)["w"].tolist() == [0.0] * 3


@pytest.mark.parametrize("weight", [0.0, 2.0, 17.0])
def test_dp_aggregator_weight_other_than_one_is_refused(weight: float) -> None:
    updates = [ClientUpdate(everything(3), {"w": torch.ones(3)}, weight)]
    with pytest.raises(UnprotectedUpdate, match="weight"):
        aggregator([(everything(3), 1.0)])({"w": torch.zeros(3)}, updates)


def test_dp_aggregator_unexpected_contributor_is_refused() -> None:
    """Its noise would be missing, or not accounted for."""
    small = find_footprint({"w": torch.Size([2])}, {"w": torch.Size([3])})
    updates = [ClientUpdate(everything(3), {"w": torch.ones(3)}, 1.0)]
    with pytest.raises(UnprotectedUpdate, match="no contributors are expected"):
        aggregator([(small, 1.0)])({"w": torch.zeros(3)}, updates)


def test_dp_aggregator_second_use_is_refused() -> None:
    """A second result with the same noise would reveal both."""
    private = aggregator([(everything(3), 1.0)], noise=1.0)
    private({"w": torch.zeros(3)}, [])
    with pytest.raises(UnprotectedUpdate, match="twice"):
        private({"w": torch.zeros(3)}, [])


def test_dp_aggregator_scalar_tensor_is_averaged_with_noise(bits_equal: Callable[..., bool]) -> None:
    whole: dict[str, Tensor] = {"w": torch.tensor(1.0)}
    footprint = find_footprint({"w": torch.Size([])}, {"w": torch.Size([])})
    updates = [ClientUpdate(footprint, {"w": torch.tensor(1.5)}, 1.0)]
    assert bits_equal(aggregator([(footprint, 2.0)])(whole, updates)["w"], torch.tensor(1.25))
    assert float(aggregator([(footprint, 2.0)], noise=1.0)(whole, updates)["w"]) != 1.25
