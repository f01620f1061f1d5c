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
    """Devices of a few widths, nested or with a window that wraps, some of which speak for a few labels' rows alone."""
    numbers = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    whole = {name: torch.randn(shape, generator=numbers, dtype=dtype) for name, shape in SHAPES.items()}
    large = {name: torch.Size(shape) for name, shape in SHAPES.items()}
    place = leading if draw(st.booleans()) else rolling(draw(st.integers(0, 5)))
    said = []
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
        said.append(ClientUpdate(footprint, tensors, draw(st.sampled_from(weights))))
    return whole, said


# the oracle: nothing in it knows of tensors beyond reading one number


def spoken(contribution: ClientUpdate, whole: dict[str, Tensor]) -> dict[Entry, float]:
    """Every entry a device speaks for, and what it says."""
    found: dict[Entry, float] = {}
    for name, block in contribution.footprint.blocks.items():
        on_axes = [
            part.tolist() if isinstance(part, Tensor) else list(range(size))[part]
            for part, size in zip(block, whole[name].shape, strict=True)
        ]
        tensor = contribution.tensors[name]
        for place in torch.ones(tensor.shape).nonzero().tolist() if tensor.dim() else [[]]:
            entry = tuple(numbers[at] for numbers, at in zip(on_axes, place, strict=True))
            found[name, entry] = float(tensor[tuple(place)])
    return found


class Votes(NamedTuple):
    """One ring: its entries as they were, and what its voters say on them."""

    entries: list[Entry]
    old: list[float]
    told: list[list[float]]
    weights: list[float]
    kinds: list[str]


def votes_of(whole: dict[str, Tensor], said: list[ClientUpdate]) -> list[Votes]:
    speeches = [spoken(one, whole) for one in said]
    kinds = [repr(sorted((name, one.tensors[name].shape[1:]) for name in one.footprint.blocks)) for one in said]
    by_voters: defaultdict[tuple[int, ...], list[Entry]] = defaultdict(list)
    for entry in sorted({entry for speech in speeches for entry in speech}):
        by_voters[tuple(n for n, speech in enumerate(speeches) if entry in speech)].append(entry)
    return [
        Votes(
            entries,
            [float(whole[name][at]) for name, at in entries],
            [[speeches[n][entry] for entry in entries] for n in voters],
            [said[n].weight for n in voters],
            [kinds[n] for n in voters],
        )
        for voters, entries in by_voters.items()
    ]


def length(row: list[float]) -> float:
    return math.sqrt(math.fsum(value * value for value in row))


def minus(left: list[float], right: list[float]) -> list[float]:
    return [a - b for a, b in zip(left, right, strict=True)]


def cut_to(region: Votes, limit: float) -> list[list[float]]:
    rows = []
    for row in region.told:
        update = minus(row, region.old)
        factor = min(1.0, limit / length(update)) if length(update) else 1.0
        rows.append([was + factor * change for was, change in zip(region.old, update, strict=True)])
    return rows


def to_the_median(region: Votes, multiple: float) -> list[list[float]]:
    return cut_to(region, multiple * statistics.median_low([length(minus(row, region.old)) for row in region.told]))


def weighted(rows: list[list[float]], weights: list[float]) -> list[float]:
    mass = math.fsum(weights)
    return [math.fsum(w * v for w, v in zip(weights, column, strict=True)) / mass for column in zip(*rows, strict=True)]


def trimmed(rows: list[list[float]], share: float) -> list[float]:
    cut = 0
    while cut < share * len(rows) - 1e-9 and 2 * (cut + 1) < len(rows):
        cut += 1
    return [statistics.fmean(sorted(column)[cut : len(rows) - cut]) for column in zip(*rows, strict=True)]


def of_the_nearest(region: Votes, reach: float, multiple: float) -> list[float]:
    def near(voters: list[int]) -> set[int]:
        centre = [statistics.median(column) for column in zip(*(region.told[n] for n in voters), strict=True)]
        gaps = {n: length(minus(region.told[n], centre)) for n in voters}
        limit = reach * statistics.median_low(gaps.values()) * (1 + 1e-12)
        return {n for n in voters if gaps[n] <= limit}

    everybody = list(range(len(region.told)))
    by_all, kept = near(everybody), set[int]()
    for kind in set(region.kinds):
        own = [n for n in everybody if region.kinds[n] == kind]
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
class Told:
    """A rule and how its oracle does it, ring by ring."""

    rule: Rule
    oracle: Callable[[Votes], list[float]]


RING_RULES = {
    "clipping": Told(Clipping(1.5), lambda region: weighted(to_the_median(region, 1.5), region.weights)),
    "median": Told(Median(), lambda region: [statistics.median(column) for column in zip(*region.told, strict=True)]),
    "trimmed_mean": Told(TrimmedMean(0.25), lambda region: trimmed(region.told, 0.25)),
    "geometric_median": Told(GeometricMedian(5), lambda region: weiszfeld(region.told, 5)),
    "default": Told(NearestMean(1.4, 1.1), lambda region: of_the_nearest(region, 1.4, 1.1)),
}


def usual_step(found: list[Votes], said: list[ClientUpdate], whole: dict[str, Tensor], enough: int) -> float | None:
    """The median device's root mean square of changes, over the entries with votes enough."""
    thick = {entry for region in found if len(region.told) >= enough for entry in region.entries}
    sizes = []
    for one in said:
        changes = [v - float(whole[n][at]) for (n, at), v in spoken(one, whole).items() if (n, at) in thick]
        if changes:
            sizes.append(length(changes) / math.sqrt(len(changes)))
    return statistics.median_low(sizes) if sizes else None


def expected(
    whole: dict[str, Tensor], said: list[ClientUpdate], oracle: Callable[[Votes], list[float]], thin: str, enough: int
) -> dict[Entry, float]:
    """Every entry that must change, and to what."""
    found = votes_of(whole, said)
    usual = usual_step(found, said, whole, enough)
    made: dict[Entry, float] = {}
    for region in found:
        if len(region.told) >= enough:
            made.update(zip(region.entries, oracle(region), strict=True))
        elif thin == "clipped" and usual is not None:
            rows = cut_to(region, usual * math.sqrt(len(region.entries)))
            made.update(zip(region.entries, weighted(rows, [1.0] * len(rows)), strict=True))
    return made


def check(made: dict[str, Tensor], whole: dict[str, Tensor], wanted: dict[Entry, float]) -> None:
    assert made.keys() == whole.keys()
    for name, old in whole.items():
        assert made[name].dtype == old.dtype
        assert made[name].shape == old.shape
        exact = 1e-5 if old.dtype == torch.float32 else 1e-9
        for index in torch.ones(old.shape).nonzero().tolist() if old.dim() else [[]]:
            found, at = float(made[name][tuple(index)]), (name, tuple(index))
            if at in wanted:
                assert found == pytest.approx(wanted[at], rel=exact, abs=exact)
            else:
                assert found == float(old[tuple(index)])


@pytest.mark.parametrize("name", RING_RULES)
@given(case=cases(), thin=st.sampled_from(["hold", "clipped"]), enough=st.integers(1, 4))
def test_every_rule_does_on_every_ring_what_it_says(name: str, case: Case, thin: str, enough: int) -> None:
    whole, said = case
    told = RING_RULES[name]
    made = RobustAggregator(told.rule, thin, enough)(whole, said)  # type: ignore[arg-type]
    check(made, whole, expected(whole, said, told.oracle, thin, enough))


@given(case=cases(), norm=st.sampled_from([0.5, 5.0, 1000.0]))
def test_a_fixed_norm_holds_for_a_devices_whole_update(case: Case, norm: float) -> None:
    whole, said = case
    shortened = []
    for one in said:
        speech = spoken(one, whole)
        changes = {entry: value - float(whole[entry[0]][entry[1]]) for entry, value in speech.items()}
        shortened.append(min(1.0, norm / (length(list(changes.values())) or norm)))

    totals: defaultdict[Entry, list[tuple[float, float]]] = defaultdict(list)
    for one, factor in zip(said, shortened, strict=True):
        for entry, value in spoken(one, whole).items():
            old = float(whole[entry[0]][entry[1]])
            totals[entry].append((one.weight, old + factor * (value - old)))
    wanted = {
        entry: math.fsum(w * v for w, v in all_said) / math.fsum(w for w, _ in all_said)
        for entry, all_said in totals.items()
    }
    check(RobustAggregator(Clipping(norm=norm), min_contributors=1)(whole, said), whole, wanted)


@given(case=cases(), enough=st.integers(1, 3), thin=st.sampled_from(["hold", "clipped"]))
def test_multi_krum_chooses_where_all_speak_and_averages_everywhere(case: Case, enough: int, thin: str) -> None:
    whole, said = case
    rule = MultiKrum(0.3)
    speeches = [spoken(one, whole) for one in said]
    common = set.intersection(*map(set, speeches)) if speeches else set()
    kept: list[ClientUpdate] = []
    if common:
        bad = math.ceil(0.3 * len(said) - 1e-9)
        scores = []
        for one in speeches:
            gaps = [math.fsum((one[e] - other[e]) ** 2 for e in common) for other in speeches if other is not one]
            scores.append(math.fsum(sorted(gaps)[: max(1, len(said) - bad - 2)]))
        chosen = sorted(sorted(range(len(said)), key=lambda n: scores[n])[: len(said) - bad])
        kept = [said[n] for n in chosen]
    wanted = expected(whole, kept, lambda region: weighted(region.told, region.weights), thin, enough)
    check(RobustAggregator(rule, thin, enough)(whole, said), whole, wanted)  # type: ignore[arg-type]


@given(case=cases())
def test_every_covered_entry_is_in_exactly_one_ring(case: Case) -> None:
    whole, said = case
    found = update_regions(whole, said)
    count = {name: torch.zeros(old.numel(), dtype=torch.int64) for name, old in whole.items()}
    for region in found:
        for name, where in region.entries.items():
            count[name][where] += 1
    covered = {entry for one in said for entry in spoken(one, whole)}
    assert sum(len(region) for region in found) == len(covered)
    assert all(int(one.max()) <= 1 for one in count.values())
    assert len({region.contributors for region in found}) == len(found)


@given(case=cases())
def test_without_limits_it_is_the_mean(case: Case) -> None:
    """A clip that nobody reaches, and a trim of nobody where all count the same."""
    whole, said = case
    alike = [one._replace(weight=1.0) for one in said]
    made = RobustAggregator(Clipping(1e9), min_contributors=1)(whole, said)
    untrimmed = RobustAggregator(TrimmedMean(0.0), min_contributors=1)(whole, alike)
    plain, mean = coverage_mean(whole, copies(said)), coverage_mean(whole, copies(alike))
    for name in whole:
        assert torch.allclose(made[name], plain[name], rtol=1e-6, atol=1e-6)
        assert torch.allclose(untrimmed[name], mean[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in RULES if name != "none"])
@given(case=cases())
def test_the_same_again_to_the_bit_and_nothing_given_is_changed(name: str, case: Case) -> None:
    whole, said = case
    rule = RULES[name]()
    assert rule is not None
    before = {key: tensor.clone() for key, tensor in whole.items()}
    spoke = [{key: tensor.clone() for key, tensor in one.tensors.items()} for one in said]
    first, second = (RobustAggregator(rule, "clipped")(whole, iter(said)) for _ in range(2))
    assert all(torch.equal(first[key], second[key]) for key in whole)
    assert all(torch.equal(whole[key], before[key]) for key in whole)
    for one, kept in zip(said, spoke, strict=True):
        assert all(torch.equal(one.tensors[key], kept[key]) for key in kept)


def copies(said: list[ClientUpdate]) -> list[ClientUpdate]:
    """Each with tensors of its own."""
    return [one._replace(tensors={name: tensor.clone() for name, tensor in one.tensors.items()}) for one in said]


def everything(*shape: int) -> Footprint:
    return find_footprint({"w": torch.Size(shape)}, {"w": torch.Size(shape)})


def saying(*values: float, weight: float = 1.0) -> list[ClientUpdate]:
    return [ClientUpdate(everything(2), {"w": torch.tensor([value, 2 * value])}, weight) for value in values]


ROBUST = [name for name in RULES if name != "none"]


@pytest.mark.parametrize("far", [1e3, 1e30])
@pytest.mark.parametrize("name", ROBUST)
def test_one_in_five_cannot_carry_the_model_away(name: str, far: float) -> None:
    rule = RULES[name]()
    assert rule is not None
    made = RobustAggregator(rule)({"w": torch.zeros(2)}, saying(0.9, 1.0, 1.1, 1.05, far))["w"]
    assert 0.7 < float(made[0]) < 1.3
    assert float(coverage_mean({"w": torch.zeros(2)}, saying(0.9, 1.0, 1.1, 1.05, far))["w"][0]) > 200


def test_an_honest_tier_that_differs_is_heard_and_a_liar_in_it_is_not() -> None:
    """Narrow devices pull their ring another way; held against all voters together they would be the odd ones out."""
    draw = torch.Generator().manual_seed(1)
    small = find_footprint({"w": torch.Size([1, 50])}, {"w": torch.Size([1, 80])})
    wide = [1 + 0.1 * torch.randn(1, 80, generator=draw) for _ in range(6)]
    narrow = [-1 + 0.1 * torch.randn(1, 50, generator=draw) for _ in range(4)]
    said = [ClientUpdate(everything(1, 80), {"w": values}, 1.0) for values in wide]
    said += [ClientUpdate(small, {"w": values}, 1.0) for values in (*narrow, torch.full((1, 50), 1.0))]
    made = RobustAggregator(NearestMean())({"w": torch.zeros(1, 80)}, said)["w"]
    heard = torch.stack([values[:, :50] for values in (*wide, *narrow)]).mean(0)
    assert torch.allclose(made[:, :50], heard, atol=1e-6)
    assert torch.allclose(made[:, 50:], torch.stack(wide)[..., 50:].mean(0), atol=1e-6)


@pytest.mark.parametrize("name", ["default", "median", "trimmed_mean", "geometric_median"])
def test_a_claimed_number_of_examples_buys_no_votes(name: str) -> None:
    rule = RULES[name]()
    assert rule is not None
    said = [*saying(1.0, 1.1, 0.9), *saying(-9.0, weight=1e18)]
    honest = [*saying(1.0, 1.1, 0.9), *saying(-9.0)]
    old = {"w": torch.zeros(2)}
    assert torch.equal(RobustAggregator(rule)(old, said)["w"], RobustAggregator(rule)(old, honest)["w"])


@pytest.mark.parametrize("name", ROBUST)
def test_a_thin_ring_holds_to_the_bit(name: str, bits_equal: Callable[..., bool]) -> None:
    rule = RULES[name]()
    assert rule is not None
    old = {"w": torch.tensor([1.0, 2.0, -0.0, float("nan")])}
    small = find_footprint({"w": torch.Size([2])}, {"w": torch.Size([4])})
    said = [ClientUpdate(small, {"w": torch.tensor([5.0, 5.0])}, 1.0) for _ in range(4)]
    said += [ClientUpdate(everything(4), {"w": torch.tensor([5.0, 5.0, 9.0, 9.0])}, 1.0) for _ in range(2)]
    made = RobustAggregator(rule, min_contributors=3)(old, said)["w"]
    assert made[:2].tolist() == pytest.approx([5.0, 5.0])
    assert bits_equal(made[2:], old["w"][2:])


def test_alone_on_a_ring_nobody_goes_farther_than_the_others_do() -> None:
    small = find_footprint({"w": torch.Size([1])}, {"w": torch.Size([3])})
    said = [ClientUpdate(small, {"w": torch.tensor([step])}, 1.0) for step in (0.9, 1.0, 1.1)]
    said += [ClientUpdate(everything(3), {"w": torch.tensor([1.0, 300.0, 400.0])}, 7.0)]
    made = RobustAggregator(Median(), "clipped")({"w": torch.zeros(3)}, said)["w"]
    assert float(made[0]) == 1.0
    assert made[1:].tolist() == pytest.approx([0.6 * 2**0.5, 0.8 * 2**0.5])


def test_where_votes_are_enough_nowhere_everything_holds() -> None:
    old = torch.tensor([1.0, 2.0])
    assert torch.equal(RobustAggregator(Median(), "clipped")({"w": old}, saying(5.0, 6.0))["w"], old)


def test_who_counts_nothing_has_no_vote() -> None:
    made = RobustAggregator(Median())({"w": torch.zeros(2)}, [*saying(1.0, 2.0, 3.0), *saying(50.0, 60.0, weight=0.0)])
    assert made["w"].tolist() == [2.0, 4.0]


def test_the_geometric_median_of_a_majority_on_one_point_is_that_point() -> None:
    made = RobustAggregator(GeometricMedian())({"w": torch.zeros(2)}, saying(1.0, 1.0, 1.0, 70.0, -30.0))["w"]
    assert made.tolist() == pytest.approx([1.0, 2.0], abs=1e-6)


def test_an_unknown_order_in_memory_is_no_trouble() -> None:
    old = torch.arange(6.0).view(2, 3).t()
    said = [ClientUpdate(everything(3, 2), {"w": old + step}, 1.0) for step in (1.0, 2.0, 3.0)]
    assert torch.equal(RobustAggregator(Median())({"w": old}, said)["w"], old + 2)
