"""The result of a comparison: winners, and tables as Markdown, CSV and LaTeX."""

import csv
import io
from dataclasses import replace

import pytest

from fedloom.evaluation import Row
from fedloom.reporting import Arm, ServedModel, compute_difference
from fedloom.reporting.paired_stats import PERPLEXITY
from fedloom.reporting.tables import (
    CSV_COLUMNS,
    ComparisonResult,
    ComparisonTerms,
    conclude,
    to_csv,
    to_latex,
    to_markdown,
)

TERMS = ComparisonTerms(
    ["large", "small"], {"large": 0.5, "small": 0.5}, "global", 10_000, baseline="other", margin=0.5
)


def rows(large: float, small: float) -> list[Row]:
    """Two rounds, the first of which is five points worse."""
    concluded = [
        Row(number, "server", tier, "", "global", "accuracy", value - 5 * (2 - number))
        for number in (1, 2)
        for tier, value in (("large", large), ("small", small))
    ]
    return concluded + [Row(number, "", "", "", "", "bytes_down", 1e6) for number in (1, 2)]


def arm(name: str, large: float, small: float, seeds: int = 2, can_run: bool = True) -> Arm:
    serving = {"large": ServedModel("large", True), "small": ServedModel("small" if can_run else "large", can_run)}
    return Arm(name, serving, [rows(large + seed / 10, small + seed / 10) for seed in range(seeds)])


def result(*arms: Arm) -> ComparisonResult:
    return conclude(arms, TERMS)


@pytest.fixture
def clear() -> ComparisonResult:
    return result(arm("this", 80, 60), arm("other", 70, 60.05), arm("a|b_c", 60, 99, can_run=False))


def test_find_winners_requires_difference_beyond_noise(clear: ComparisonResult) -> None:
    assert clear.winners == {"large": "this", "small": None}


def test_find_winners_ignores_models_that_devices_cannot_run() -> None:
    assert result(arm("this", 80, 60), arm("other", 70, 90, can_run=False)).winners == {"large": "this", "small": None}


def test_find_winners_of_one_arm_is_none() -> None:
    terms = replace(TERMS, baseline=None)
    assert conclude([arm("this", 80, 60)], terms).winners == {"large": None, "small": None}


def test_to_markdown_has_values_targets_and_verdict(clear: ComparisonResult) -> None:
    text = to_markdown(clear)
    head, rule, *lines = text.splitlines()
    assert head == "| arm | large | small | worst | served | bytes per round |"
    assert rule == "| --- | ---: | ---: | ---: | ---: | ---: |"
    assert lines[0] == "| this | **80.0 ± 0.1** | 60.0 ± 0.1 | 60.0 ± 0.1 | 100 % | 1 MB |"
    assert lines[2].startswith("| a\\|b_c | 60.0 ± 0.1 | (60.0 ± 0.1) | – | 50 %")
    assert "| this | large | 69.5 % | 1 [1–1] | 1.00 [1.00–1.00] | – | 2.0 |" in text
    assert all(f"- {line}" in text for line in clear.verdict)


def test_to_csv_has_unrounded_numbers(clear: ComparisonResult) -> None:
    read = list(csv.DictReader(io.StringIO(to_csv(clear))))
    assert tuple(read[0]) == CSV_COLUMNS
    assert [(one["arm"], one["tier"]) for one in read][:3] == [("this", "large"), ("this", "small"), ("other", "large")]
    assert (float(read[0]["mean"]), float(read[0]["worst_tier_mean"])) == pytest.approx((80.05, 60.05))
    assert (read[0]["metric"], read[0]["macs"], read[0]["seconds"]) == ("accuracy", "", "")
    assert [one["winner"] for one in read] == ["1", "0", "0", "0", "0", "0"]
    assert (read[0]["reached"], read[0]["rounds_to_target"], read[0]["gain"]) == ("1", "1.0", "2.0")
    assert read[5]["target"] == ""


def test_to_latex_is_balanced_and_escaped(clear: ComparisonResult) -> None:
    text = to_latex(clear)
    for name in ("table", "tabular"):
        assert text.count(f"\\begin{{{name}}}") == text.count(f"\\end{{{name}}}") == 2
    assert r"\textbf{80.0 $\pm$ 0.1}" in text
    assert r"a|b\_c" in text and "100 \\%" in text
    tables = [line for line in text.splitlines() if not line.startswith("%")]
    assert "±" not in "".join(tables) and "–" not in "".join(tables)


def test_to_markdown_tier_without_devices_is_dash() -> None:
    empty = arm("this", 80, 60)
    without_small = replace(empty, runs=[[row for row in run if row.tier != "small"] for run in empty.runs])
    text = to_markdown(conclude([without_small], replace(TERMS, baseline=None)))
    assert "| this | 80.0 ± 0.1 | – | 80.0 ± 0.1 | 100 % |" in text


def test_to_markdown_with_costs_has_macs_and_seconds() -> None:
    ticking = arm("this", 80, 60)
    runs = [
        [*run, *(Row(number, "", "", "", "", "simulated_seconds", 1.5) for number in (1, 2))] for run in ticking.runs
    ]
    known = replace(ticking, runs=runs, macs={"large": 3_282_688, "small": 1_659_300})
    concluded = result(known, arm("other", 70, 50))
    head, _, this, other = to_markdown(concluded).splitlines()[:4]
    assert head.endswith("| served | MACs | bytes per round | simulated s |")
    assert this.endswith("| 100 % | 3.28 M / 1.66 M | 1 MB | 3.0 |") and other.endswith("| 100 % | – | 1 MB | – |")
    read = list(csv.DictReader(io.StringIO(to_csv(concluded))))
    assert [(one["macs"], one["seconds"]) for one in read[:2]] == [("3282688", "3.0"), ("1659300", "3.0")]


def worse(name: str, *ends: float, seeds: int = 2) -> Arm:
    """An arm whose two tiers end with these perplexities, after a round with twice as high ones."""
    concluded = [
        Row(number, "server", tier, "", "global", "perplexity", value * (3 - number))
        for number in (1, 2)
        for tier, value in zip(("large", "small"), ends, strict=True)
    ]
    concluded += [Row(number, "", "", "", "", "bytes_down", 1e6) for number in (1, 2)]
    serving = {tier: ServedModel(tier, True) for tier in ("large", "small")}
    return Arm(name, serving, [concluded] * seeds, metric=PERPLEXITY)


def test_conclude_prefers_lower_perplexity() -> None:
    concluded = result(worse("this", 20, 30, seeds=3), worse("other", 40, 30, seeds=3))
    assert concluded.winners == {"large": "this", "small": None}
    assert [one.claim for one in concluded.overall] == ["holds"]
    assert (
        "this reaches 40.5 on large devices sooner than other (in 3 of 3 seeds): all seeds agree, may be claimed"
        in concluded.verdict
    )
    record = concluded.records[0]
    assert record["perplexity"]["large"]["mean"] == 20 and record["worst_tier"]["mean"] == 30
    text = to_markdown(concluded)
    assert "| this | **20.0** | 30.0 | 30.0 |" in text and "Perplexity on the global test, of the model" in text
    assert "this beats other on the average device by 10.0 (± 0.0, 3 seeds): beyond noise, may be claimed" in text


def test_conclude_perplexity_of_one_seed_is_undecided() -> None:
    one, two = worse("this", 20, 30, seeds=1), worse("other", 40, 30, seeds=1)
    assert result(one, two).winners == {"large": None, "small": None}
    assert str(compute_difference(one, two, "large", "global", 100)) == (
        "this beats other on large devices by 20.0 (1 seed): one seed cannot tell, not to be claimed"
    )
