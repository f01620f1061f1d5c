"""The robust rules against a loop over every entry, in plain Python; and what no rule may do."""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedloom.footprints import (
    RULES,
    ClientUpdate,
    Footprint,
    RobustAggregator,
    coverage_mean,
    find_footprint,
    leading,
    rolling,
)
from fedloom.footprints.regions import update_regions
from fedloom.footprints.robust import Clipping, GeometricMedian, Median, MultiKrum, NearestMean, Rule, TrimmedMean

Entry = tuple[str, tuple[int, ...]]
Case = tuple[dict[str, Tensor], list[ClientUpdate]]
SHAPES = {"weight": (4, 3, 2), "bias": (4,), "head": (5, 4), "scale": ()}


@st.composite
def cases(draw: st.DrawFn, weights: tuple[float, ...] = (1.0, 0.25, 3.0)) -> Case:
    """Devices of a few widths, nested or with a window that wraps, some of which cover only a few labels' rows."""
    numbers = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    whole = {name: torch.randn(shape, generator=numbers, dtype=dtype) for name, shape in SHAPES.items()}
    large = {name: torch.Size(shape) for name, shape in SHAPES.items()}
    place = leading if draw(st.booleans()) else rolling(draw(st.integers(0, 5)))
    updates = []
    for _ in range(draw(st.integers(0, 7))):
        width = draw(st.integers(1, 4))
        small = {"weight": (width, 3, 2), "bias": (width,), "head": (5, width), "scale": ()}
        absent = draw(st.sampled_from(["", "weight", "bias", "head"]))
        sizes = {name: torch.Size(shape) for name, shape in small.items() if name != absent}
        footprint = find_footprint(sizes, large, place)
        if "head" in sizes and draw(st.booleans()):
            keep = draw(st.lists(st.booleans(), min_size=5, max_size=5))
            footprint = footprint.restrict("head", 0, torch.tensor(keep))
        strength = draw(st.sampled_from([0.1, 1.0, 1.0, 50.0]))
        tensors = {
            name: read + strength * torch.randn(read.shape, generator=numbers, dtype=dtype)
            for name, read in footprint.read(whole).items()
        }
        updates.append(ClientUpdate(footprint, tensors, draw(st.sampled_from(weights))))
    return whole, updates


# the oracle: nothing in it knows of tensors beyond reading one number


def covered_values(update: ClientUpdate, whole: dict[str, Tensor]) -> dict[Entry, float]:
    """Every entry that an update covers, and its value."""
    found: dict[Entry, float] = {}
    for name, block in update.footprint.blocks.items():
        on_axes = [
            part.tolist() if isinstance(part, Tensor) else list(range(size))[part]
            for part, size in zip(block, whole[name].shape, strict=True)
        ]
        tensor = update.tensors[name]
        for place in torch.ones(tensor.shape).nonzero().tolist() if tensor.dim() else [[]]:
            entry = tuple(numbers[at] for numbers, at in zip(on_axes, place, strict=True))
            found[name, entry] = float(tensor[tuple(place)])
    return found


class RegionCase(NamedTuple):
    """One region: its old entries, and the values of its contributors."""

    entries: list[Entry]
    old: list[float]
    values: list[list[float]]
    weights: list[float]
    groups: list[str]


def region_cases(whole: dict[str, Tensor], updates: list[ClientUpdate]) -> list[RegionCase]:
    all_values = [covered_values(one, whole) for one in updates]
    groups = [repr(sorted((name, one.tensors[name].shape[1:]) for name in one.footprint.blocks)) for one in updates]
    by_contributors: defaultdict[tuple[int, ...], list[Entry]] = defaultdict(list)
    for entry in sorted({entry for values in all_values for entry in values}):
        by_contributors[tuple(n for n, values in enumerate(all_values) if entry in values)].append(entry)
    return [
        RegionCase(
            entries,
            [float(whole[name][at]) for name, at in entries],
            [[all_values[n][entry] for entry in entries] for n in contributors],
            [updates[n].weight for n in contributors],
            [groups[n] for n in contributors],
        )
        for contributors, entries in by_contributors.items()
    ]


def length(row: list[float]) -> float:
    return math.sqrt(math.fsum(value * value for value in row))


def minus(left: list[float], right: list[float]) -> list[float]:
    return [a - b for a, b in zip(left, right, strict=True)]


def cut_to(region: RegionCase, limit: float) -> list[list[float]]:
    rows = []
    for row in region.values:
        update = minus(row, region.old)
        factor = min(1.0, limit / length(update)) if length(update) else 1.0
        rows.append([was + factor * change for was, change in zip(region.old, update, strict=True)])
    return rows


def to_the_median(region: RegionCase, multiple: float) -> list[list[float]]:
    return cut_to(region, multiple * statistics.median_low([length(minus(row, region.old)) for row in region.values]))


def weighted(rows: list[list[float]], weights: list[float]) -> list[float]:
    mass = math.fsum(weights)
    return [math.fsum(w * v for w, v in zip(weights, column, strict=True)) / mass for column in zip(*rows, strict=True)]


def trimmed(rows: list[list[float]], share: float) -> list[float]:
    cut = 0
    while cut < share * len(rows) - 1e-9 and 2 * (cut + 1) < len(rows):
        cut += 1
    return [statistics.fmean(sorted(column)[cut : len(rows) - cut]) for column in zip(*rows, strict=True)]


def of_the_nearest(region: RegionCase, reach: float, multiple: float) -> list[float]:
    def near(contributors: list[int]) -> set[int]:
        center = [statistics.median(column) for column in zip(*(region.values[n] for n in contributors), strict=True)]
        gaps = {n: length(minus(region.values[n], center)) for n in contributors}
        limit = reach * statistics.median_low(gaps.values()) * (1 + 1e-12)
        return {n for n in contributors if gaps[n] <= limit}

    everyone = list(range(len(region.values)))
    by_all, kept = near(everyone), set[int]()
    for group in set(region.groups):
        own = [n for n in everyone if region.groups[n] == group]
        kept |= near(own) if len(own) >= 3 else by_all & set(own)
    rows = to_the_median(region, multiple)
    return weighted([rows[n] for n in sorted(kept)], [1.0] * len(kept))


def weiszfeld(rows: list[list[float]], steps: int) -> list[float]:
    at = [statistics.median(column) for column in zip(*rows, strict=True)]
    for _ in range(steps):
        gaps = [length(minus(row, at)) for row in rows]
        if min(gaps) <= 1e-9 * statistics.median_low(gaps):
            return rows[gaps.index(min(gaps))]
        at = weighted(rows, [1 / gap for gap in gaps])
    return at


@dataclass(frozen=True)
class RuleCase:
    """A rule and its plain Python implementation for one region."""

    rule: Rule
    oracle: Callable[[RegionCase], list[float]]


REGION_RULES = {
    "clipping": RuleCase(Clipping(1.5), lambda region: weighted(to_the_median(region, 1.5), region.weights)),
    "median": RuleCase(
        Median(), lambda region: [statistics.median(column) for column in zip(*region.values, strict=True)]
    ),
    "trimmed_mean": RuleCase(TrimmedMean(0.25), lambda region: trimmed(region.values, 0.25)),
    "geometric_median": RuleCase(GeometricMedian(5), lambda region: weiszfeld(region.values, 5)),
    "default": RuleCase(NearestMean(1.4, 1.1), lambda region: of_the_nearest(region, 1.4, 1.1)),
}


def median_step(
    found: list[RegionCase], updates: list[ClientUpdate], whole: dict[str, Tensor], min_contributors: int
) -> float | None:
    """The median device's root mean square of changes, over the entries with enough contributors."""
    thick = {entry for region in found if len(region.values) >= min_contributors for entry in region.entries}
    sizes = []
    for one in updates:
        changes = [v - float(whole[n][at]) for (n, at), v in covered_values(one, whole).items() if (n, at) in thick]
        if changes:
            sizes.append(length(changes) / math.sqrt(len(changes)))
    return statistics.median_low(sizes) if sizes else None


def expected(
    whole: dict[str, Tensor],
    updates: list[ClientUpdate],
    oracle: Callable[[RegionCase], list[float]],
    low_coverage: str,
    min_contributors: int,
) -> dict[Entry, float]:
    """Every entry that must change, and to what."""
    found = region_cases(whole, updates)
    usual = median_step(found, updates, whole, min_contributors)
    result: dict[Entry, float] = {}
    for region in found:
        if len(region.values) >= min_contributors:
            result.update(zip(region.entries, oracle(region), strict=True))
        elif low_coverage == "clipped" and usual is not None:
            rows = cut_to(region, usual * math.sqrt(len(region.entries)))
            result.update(zip(region.entries, weighted(rows, [1.0] * len(rows)), strict=True))
    return result


def check(result: dict[str, Tensor], whole: dict[str, Tensor], wanted: dict[Entry, float]) -> None:
    assert result.keys() == whole.keys()
    for name, old in whole.items():
        assert result[name].dtype == old.dtype
        assert result[name].shape == old.shape
        exact = 1e-5 if old.dtype == torch.float32 else 1e-9
        for index in torch.ones(old.shape).nonzero().tolist() if old.dim() else [[]]:
            found, at = float(result[name][tuple(index)]), (name, tuple(index))
            if at in wanted:
                assert found == pytest.approx(wanted[at], rel=exact, abs=exact)
            else:
                assert found == float(old[tuple(index)])


@pytest.mark.parametrize("name", REGION_RULES)
@given(case=cases(), low_coverage=st.sampled_from(["hold", "clipped"]), min_contributors=st.integers(1, 4))
def test_robust_aggregator_every_rule_matches_plain_python(
    name: str, case: Case, low_coverage: str, min_contributors: int
) -> None:
    whole, updates = case
    case_rule = REGION_RULES[name]
    result = RobustAggregator(case_rule.rule, low_coverage, min_contributors)(whole, updates)  # type: ignore[arg-type]
    check(result, whole, expected(whole, updates, case_rule.oracle, low_coverage, min_contributors))


@given(case=cases(), norm=st.sampled_from([0.5, 5.0, 1000.0]))
def test_clipping_fixed_norm_limits_the_whole_update(case: Case, norm: float) -> None:
    whole, updates = case
    shortened = []
    for one in updates:
        values = covered_values(one, whole)
        changes = {entry: value - float(whole[entry[0]][entry[1]]) for entry, value in values.items()}
        shortened.append(min(1.0, norm / (length(list(changes.values())) or norm)))

    totals: defaultdict[Entry, list[tuple[float, float]]] = defaultdict(list)
    for one, factor in zip(updates, shortened, strict=True):
        for entry, value in covered_values(one, whole).items():
            old = float(whole[entry[0]][entry[1]])
            totals[entry].append((one.weight, old + factor * (value - old)))
    wanted = {
        entry: math.fsum(w * v for w, v in all_said) / math.fsum(w for w, _ in all_said)
        for entry, all_said in totals.items()
    }
    check(RobustAggregator(Clipping(norm=norm), min_contributors=1)(whole, updates), whole, wanted)


@given(case=cases(), min_contributors=st.integers(1, 3), low_coverage=st.sampled_from(["hold", "clipped"]))
def test_multi_krum_selects_on_the_common_region_and_averages_all(
    case: Case, min_contributors: int, low_coverage: str
) -> None:
    whole, updates = case
    rule = MultiKrum(0.3)
    all_values = [covered_values(one, whole) for one in updates]
    common = set.intersection(*map(set, all_values)) if all_values else set()
    kept: list[ClientUpdate] = []
    if common:
        bad = math.ceil(0.3 * len(updates) - 1e-9)
        scores = []
        for one in all_values:
            gaps = [math.fsum((one[e] - other[e]) ** 2 for e in common) for other in all_values if other is not one]
            scores.append(math.fsum(sorted(gaps)[: max(1, len(updates) - bad - 2)]))
        chosen = sorted(sorted(range(len(updates)), key=lambda n: scores[n])[: len(updates) - bad])
        kept = [updates[n] for n in chosen]
    wanted = expected(
        whole, kept, lambda region: weighted(region.values, region.weights), low_coverage, min_contributors
    )
    check(RobustAggregator(rule, low_coverage, min_contributors)(whole, updates), whole, wanted)  # type: ignore[arg-type]


@given(case=cases())
def test_update_regions_covered_entry_is_in_exactly_one(case: Case) -> None:
    whole, updates = case
    found = update_regions(whole, updates)
    count = {name: torch.zeros(old.numel(), dtype=torch.int64) for name, old in whole.items()}
    for region in found:
        for name, where in region.entries.items():
            count[name][where] += 1
    covered = {entry for one in updates for entry in covered_values(one, whole)}
    assert sum(len(region) for region in found) == len(covered)
    assert all(int(one.max()) <= 1 for one in count.values())
    assert len({region.contributors for region in found}) == len(found)


@given(case=cases())
def test_robust_aggregator_without_limits_equals_the_mean(case: Case) -> None:
    """A clip that no update reaches, and a trim of none with equal weights."""
    whole, updates = case
    alike = [one._replace(weight=1.0) for one in updates]
    result = RobustAggregator(Clipping(1e9), min_contributors=1)(whole, updates)
    untrimmed = RobustAggregator(TrimmedMean(0.0), min_contributors=1)(whole, alike)
    plain, mean = coverage_mean(whole, copies(updates)), coverage_mean(whole, copies(alike))
    for name in whole:
        assert torch.allclose(result[name], plain[name], rtol=1e-6, atol=1e-6)
        assert torch.allclose(untrimmed[name], mean[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in RULES if name != "none"])
@given(case=cases())
def test_robust_aggregator_repeated_call_is_bit_identical_and_pure(name: str, case: Case) -> None:
    whole, updates = case
    rule = RULES[name]()
    assert rule is not None
    before = {key: tensor.clone() for key, tensor in whole.items()}
    copied = [{key: tensor.clone() for key, tensor in one.tensors.items()} for one in updates]
    first, second = (RobustAggregator(rule, "clipped")(whole, iter(updates)) for _ in range(2))
    assert all(torch.equal(first[key], second[key]) for key in whole)
    assert all(torch.equal(whole[key], before[key]) for key in whole)
    for one, kept in zip(updates, copied, strict=True):
        assert all(torch.equal(one.tensors[key], kept[key]) for key in kept)


def copies(updates: list[ClientUpdate]) -> list[ClientUpdate]:
    """Each with tensors of its own."""
    return [one._replace(tensors={name: tensor.clone() for name, tensor in one.tensors.items()}) for one in updates]


def everything(*shape: int) -> Footprint:
    return find_footprint({"w": torch.Size(shape)}, {"w": torch.Size(shape)})


def make_updates(*values: float, weight: float = 1.0) -> list[ClientUpdate]:
    return [ClientUpdate(everything(2), {"w": torch.tensor([value, 2 * value])}, weight) for value in values]


ROBUST = [name for name in RULES if name != "none"]


@pytest.mark.parametrize("far", [1e3, 1e30])
@pytest.mark.parametrize("name", ROBUST)
def test_robust_aggregator_one_outlier_in_five_is_bounded(name: str, far: float) -> None:
    rule = RULES[name]()
    assert rule is not None
    result = RobustAggregator(rule)({"w": torch.zeros(2)}, make_updates(0.9, 1.0, 1.1, 1.05, far))["w"]
    assert 0.7 < float(result[0]) < 1.3
    assert float(coverage_mean({"w": torch.zeros(2)}, make_updates(0.9, 1.0, 1.1, 1.05, far))["w"][0]) > 200


def test_nearest_mean_deviating_tier_is_kept_and_its_outlier_dropped() -> None:
    """Narrow devices move their region another way; compared with all contributors they would be outliers."""
    draw = torch.Generator().manual_seed(1)
    small = find_footprint({"w": torch.Size([1, 50])}, {"w": torch.Size([1, 80])})
    wide = [1 + 0.1 * torch.randn(1, 80, generator=draw) for _ in range(6)]
    narrow = [-1 + 0.1 * torch.randn(1, 50, generator=draw) for _ in range(4)]
    updates = [ClientUpdate(everything(1, 80), {"w": values}, 1.0) for values in wide]
    updates += [ClientUpdate(small, {"w": values}, 1.0) for values in (*narrow, torch.full((1, 50), 1.0))]
    result = RobustAggregator(NearestMean())({"w": torch.zeros(1, 80)}, updates)["w"]
    expected_mean = torch.stack([values[:, :50] for values in (*wide, *narrow)]).mean(0)
    assert torch.allclose(result[:, :50], expected_mean, atol=1e-6)
    assert torch.allclose(result[:, 50:], torch.stack(wide)[..., 50:].mean(0), atol=1e-6)


@pytest.mark.parametrize("name", ["default", "median", "trimmed_mean", "geometric_median"])
def test_robust_aggregator_claimed_examples_do_not_add_influence(name: str) -> None:
    rule = RULES[name]()
    assert rule is not None
    updates = [*make_updates(1.0, 1.1, 0.9), *make_updates(-9.0, weight=1e18)]
    honest = [*make_updates(1.0, 1.1, 0.9), *make_updates(-9.0)]
    old = {"w": torch.zeros(2)}
    assert torch.equal(RobustAggregator(rule)(old, updates)["w"], RobustAggregator(rule)(old, honest)["w"])


@pytest.mark.parametrize("name", ROBUST)
def test_robust_aggregator_low_coverage_hold_keeps_bits(name: str, bits_equal: Callable[..., bool]) -> None:
    rule = RULES[name]()
    assert rule is not None
    old = {"w": torch.tensor([1.0, 2.0, -0.0, float("nan")])}
    small = find_footprint({"w": torch.Size([2])}, {"w": torch.Size([4])})
    updates = [ClientUpdate(small, {"w": torch.tensor([5.0, 5.0])}, 1.0) for _ in range(4)]
    updates += [ClientUpdate(everything(4), {"w": torch.tensor([5.0, 5.0, 9.0, 9.0])}, 1.0) for _ in range(2)]
    result = RobustAggregator(rule, min_contributors=3)(old, updates)["w"]
    assert result[:2].tolist() == pytest.approx([5.0, 5.0])
    assert bits_equal(result[2:], old["w"][2:])


def test_robust_aggregator_low_coverage_clipped_bounds_a_lone_update() -> None:
    small = find_footprint({"w": torch.Size([1])}, {"w": torch.Size([3])})
    updates = [ClientUpdate(small, {"w": torch.tensor([step])}, 1.0) for step in (0.9, 1.0, 1.1)]
    updates += [ClientUpdate(everything(3), {"w": torch.tensor([1.0, 300.0, 400.0])}, 7.0)]
    result = RobustAggregator(Median(), "clipped")({"w": torch.zeros(3)}, updates)["w"]
    assert float(result[0]) == 1.0
    assert result[1:].tolist() == pytest.approx([0.6 * 2**0.5, 0.8 * 2**0.5])


def test_robust_aggregator_low_coverage_everywhere_keeps_the_weights() -> None:
    old = torch.tensor([1.0, 2.0])
    assert torch.equal(RobustAggregator(Median(), "clipped")({"w": old}, make_updates(5.0, 6.0))["w"], old)


def test_robust_aggregator_update_of_weight_zero_is_ignored() -> None:
    result = RobustAggregator(Median())(
        {"w": torch.zeros(2)}, [*make_updates(1.0, 2.0, 3.0), *make_updates(50.0, 60.0, weight=0.0)]
    )
    assert result["w"].tolist() == [2.0, 4.0]


def test_geometric_median_majority_on_a_point_is_that_point() -> None:
    result = RobustAggregator(GeometricMedian())({"w": torch.zeros(2)}, make_updates(1.0, 1.0, 1.0, 70.0, -30.0))["w"]
    assert result.tolist() == pytest.approx([1.0, 2.0], abs=1e-6)


def test_robust_aggregator_transposed_memory_is_handled() -> None:
    old = torch.arange(6.0).view(2, 3).t()
    updates = [ClientUpdate(everything(3, 2), {"w": old + step}, 1.0) for step in (1.0, 2.0, 3.0)]
    assert torch.equal(RobustAggregator(Median())({"w": old}, updates)["w"], old + 2)
