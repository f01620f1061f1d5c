"""Verdicts of claims over seeds, on numbers worked out by hand."""

import math
from dataclasses import replace

import pytest

from fedloom.evaluation import Row
from fedloom.reporting.ledger import (
    ClaimSide,
    ClaimTerms,
    Evidence,
    NotMeasuredError,
    amount_ratio,
    baseline_target,
    change_in_last_fifth,
    claim_record,
    decide,
    evaluate_claim,
    flatness,
    side_amounts,
)
from fedloom.reporting.targets import Amount, amount_difference

MORE, LESS, AT_LEAST = (ClaimTerms("last", relation) for relation in ("more", "less", "at least"))
ALIKE = ClaimTerms("last", "alike", within=1.0)


@pytest.mark.parametrize(
    ("terms", "gaps", "verdict"),
    [
        (MORE, [1, 2, 3, 0.1, 5], "holds"),
        (MORE, [1, 2, 3, -0.1, 5], "within noise"),
        (MORE, [1, 2, 3, 0, 5], "within noise"),
        (MORE, [-1, -2, -3, -0.1, -5], "does not hold"),
        (MORE, [-1, -2, 0, -0.1, -5], "within noise"),
        (MORE, [1, 2, math.nan, 1, 1], "within noise"),
        (MORE, [math.nan] * 5, "within noise"),
        (MORE, [], "within noise"),
        (LESS, [-1, -2, -3], "holds"),
        (LESS, [1, 2, 3], "does not hold"),
        (LESS, [-math.inf, -1, -2], "holds"),
        (AT_LEAST, [0, 0, 0], "holds"),
        (AT_LEAST, [0, 1, -0.1], "within noise"),
        (AT_LEAST, [-1, -1, -0.1], "does not hold"),
        (ALIKE, [1.0, -1.0, 0.3], "holds"),
        (ALIKE, [1.0, -1.1, 0.3], "within noise"),
        (ALIKE, [2.0, -1.1, 1.3], "does not hold"),
    ],
)
def test_decide_requires_all_seeds_to_agree(terms: ClaimTerms, gaps: list[float], verdict: str) -> None:
    assert decide(gaps, terms) == verdict


def test_amount_difference_of_unreached_targets_is_infinite_or_tie() -> None:
    reached, never = Amount(7), Amount(50, exact=False)
    assert amount_difference(reached, Amount(9)) == -2
    assert amount_difference(reached, never) == -math.inf
    assert amount_difference(never, reached) == math.inf
    assert amount_difference(never, never) == 0


def rows(*values: float, tier: str = "a", candidate: str = "server", metric: str = "accuracy") -> list[Row]:
    evaluated = [Row(number, candidate, tier, "", "global", metric, value) for number, value in enumerate(values, 1)]
    moved = [Row(number, "", "", "", "", "bytes_down", 10.0) for number in range(1, len(values) + 1)]
    return evaluated + moved


def test_evaluate_claim_uses_last_value_not_best() -> None:
    evidence = Evidence({"x": [rows(50, 90, 70)], "y": [rows(60, 60, 71)]}, {"x": {"a": 1.0}, "y": {"a": 1.0}})
    result = evaluate_claim(ClaimSide("x"), ClaimSide("y"), MORE, evidence)
    assert ([one.value for one in result.this], result.gaps, result.verdict) == ([70], [-1], "does not hold")


def test_side_amounts_of_all_devices_are_weighted_by_share() -> None:
    both = rows(80, 80) + rows(40, 60, tier="b")
    evidence = Evidence({"x": [both]}, {"x": {"a": 0.25, "b": 0.5, "empty": 0.25}})
    assert side_amounts(ClaimSide("x"), MORE, evidence)[0].value == pytest.approx((0.25 * 80 + 0.5 * 60) / 0.75)
    assert side_amounts(ClaimSide("x", "b"), MORE, evidence)[0].value == 60


def test_side_amounts_candidate_defaults_to_first() -> None:
    evidence = Evidence({"x": [rows(10) + rows(20, candidate="personal")]}, {"x": {"a": 1.0}})
    assert side_amounts(ClaimSide("x"), MORE, evidence)[0].value == 10
    assert side_amounts(ClaimSide("x", candidate="personal"), MORE, evidence)[0].value == 20
    for side in (ClaimSide("x", candidate="unknown"), ClaimSide("x", "nowhere")):
        with pytest.raises(NotMeasuredError, match="x has no"):
            side_amounts(side, MORE, evidence)


def test_side_amounts_to_baseline_target_count_rounds_and_bytes() -> None:
    runs = {"base": [rows(50, 60, 70), rows(50, 60, 72)], "x": [rows(60, 70, 71), rows(50, 60, 65)]}
    evidence = Evidence(runs, {"base": {"a": 1.0}, "x": {"a": 1.0}})
    aims = baseline_target(ClaimSide("base", "a"), MORE, 1.0, evidence)
    assert aims == {"a": 70.0}  # the median of 70 and 72, less a point
    both = (ClaimTerms("rounds", "less", targets=aims), [2, 3]), (ClaimTerms("bytes", "less", targets=aims), [20, 30])
    for terms, expected in both:
        result = side_amounts(ClaimSide("x", "a"), terms, evidence)
        assert [one.value for one in result] == expected
        assert [one.exact for one in result] == [True, False]


def test_side_amounts_with_minus_are_leads_and_gains() -> None:
    runs = {"x": [rows(60, 80)], "y": [rows(50, 70)]}
    evidence = Evidence(runs, {"x": {"a": 1.0}, "y": {"a": 1.0}})
    assert side_amounts(ClaimSide("x", "a", minus="y"), MORE, evidence) == [Amount(10)]
    assert side_amounts(ClaimSide("x", "a", minus="y"), ClaimTerms("gain", "more", targets={"a": 60}), evidence) == [
        Amount(2.0)
    ]


def test_side_amounts_with_several_minus_use_best_arm_by_seed() -> None:
    """The best arm may differ by seed; an unreached target counts as later than a reached one."""
    runs = {"x": [rows(60, 80), rows(60, 80)], "y": [rows(60, 70), rows(50, 90)], "z": [rows(50, 75), rows(50, 55)]}
    evidence = Evidence(runs, {arm: {"a": 1.0} for arm in runs})
    side = ClaimSide("x", "a", minus=("y", "z"))
    assert side_amounts(side, MORE, evidence) == [Amount(5), Amount(-10)]
    assert side_amounts(side, ClaimTerms("gain", "more", targets={"a": 60}), evidence) == [Amount(1.0), Amount(2.0)]
    assert side_amounts(side, ClaimTerms("gain", "more", targets={"a": 80}), evidence)[0] == Amount(1.0, exact=False)
    less = Evidence({arm: [rows(*values, metric="perplexity")] for arm, values in RISING.items()}, evidence.shares)
    assert side_amounts(side, replace(MORE, metric="perplexity"), less) == [Amount(2)]


RISING = {"x": (9, 7), "y": (9, 5), "z": (9, 6)}


def test_amount_ratio_of_unreached_targets_is_bound_or_nan() -> None:
    sooner, never = Amount(2), Amount(9, exact=False)
    assert amount_ratio(sooner, Amount(6)) == Amount(3.0)
    assert amount_ratio(sooner, never) == Amount(4.5, exact=False)
    assert amount_ratio(never, sooner) == Amount(0.0)
    assert math.isnan(amount_ratio(never, never).value)


def test_side_amounts_in_seconds_are_means_over_rounds() -> None:
    ticks = [Row(number, "", "", "", "", "simulated_seconds", seconds) for number, seconds in ((1, 1.5), (2, 2.5))]
    evidence = Evidence({"x": [ticks], "y": [[]]}, {"x": {"a": 1.0}, "y": {"a": 1.0}})
    assert side_amounts(ClaimSide("x"), ClaimTerms("seconds", "less"), evidence) == [Amount(2.0)]
    with pytest.raises(NotMeasuredError, match="y has no simulated seconds"):
        side_amounts(ClaimSide("y"), ClaimTerms("seconds", "less"), evidence)


def test_baseline_target_of_perplexity_is_reached_from_above() -> None:
    runs = {"base": [rows(50, 40, 30, metric="perplexity")], "x": [rows(40, 31, 35, metric="perplexity")]}
    evidence = Evidence(runs, {"base": {"a": 1.0}, "x": {"a": 1.0}})
    terms = ClaimTerms("rounds", "less", metric="perplexity")
    aims = baseline_target(ClaimSide("base", "a"), terms, 1.0, evidence)
    assert aims == {"a": 31.0}
    assert side_amounts(ClaimSide("x", "a"), replace(terms, targets=aims), evidence) == [Amount(2)]


@pytest.mark.parametrize(
    ("values", "change"),
    [
        ({at: 2.0 * at for at in range(1, 101)}, 40.0),  # two points a round, for twenty rounds
        (dict.fromkeys(range(5, 101, 5), 50.0), 0.0),
        ({at: min(at, 80) + 0.0 for at in range(1, 101)}, 0.0),  # flat where it counts
        ({100: 50.0}, None),
        ({50: 1.0, 90: 2.0, 100: 3.0}, None),  # two points are no line
        ({}, None),
    ],
)
def test_change_in_last_fifth_is_slope_times_length(values: dict[int, float], change: float | None) -> None:
    found = change_in_last_fifth(values)
    assert found == (None if change is None else pytest.approx(change, abs=1e-9))


@pytest.mark.parametrize(("slope", "converged"), [(0.0, True), (0.04, True), (0.06, False)])
def test_flatness_of_claim_needs_all_arms_to_be_flat(slope: float, converged: bool) -> None:
    curves = {"a": slope, "b": 0.0}
    runs = {
        arm: [[Row(at, "server", "t", "", "global", "accuracy", 50 + each * at) for at in range(2, 101, 2)]]
        for arm, each in curves.items()
    }
    evidence = Evidence(runs, {arm: {"t": 1.0} for arm in runs})
    flat = flatness((ClaimSide("a"), ClaimSide("b")), ClaimTerms("last", "more"), evidence)
    assert flat["converged"] is converged
    assert flat["changes"] == {"a": pytest.approx(20 * slope), "b": pytest.approx(0)}


@pytest.mark.parametrize("metric", ["initial", "personalized"])
def test_flatness_around_fine_tuning_is_that_of_the_models_before_it(metric: str) -> None:
    rows = [Row(at, "server", "t", "", "local", "accuracy", 50 + 0.06 * at) for at in range(2, 101, 2)]
    evidence = Evidence({"a": [[*rows, Row(100, "server", "t", "", "local", metric, 90.0)]]}, {"a": {"t": 1.0}})
    flat = flatness([ClaimSide("a", "t")], ClaimTerms("last", "more", "local", metric), evidence)
    assert flat == {"changes": {"a (t)": pytest.approx(1.2)}, "converged": False}


def test_claim_record_has_no_infinite_numbers() -> None:
    evidence = Evidence({"x": [rows(60, 80)], "y": [rows(50, 50)]}, {"x": {"a": 1.0}, "y": {"a": 1.0}})
    result = evaluate_claim(
        ClaimSide("x", "a"), ClaimSide("y", "a"), ClaimTerms("rounds", "less", targets={"a": 70}), evidence
    )
    assert claim_record(result) == {"this": [2], "other": [None], "difference": [None], "agreeing_seeds": 1}
