"""The first screen in words and numbers: the finding, what it rests on, and three to five large numbers.

Everything is computed from the runs, and nothing is called better unless it is beyond noise.
"""

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..wording import format_bytes, format_points, format_seconds, join_words, pluralize
from .findings import SIMPLE_ALTERNATIVES, has_rival_methods
from .paired_stats import (
    Arm,
    ComparedMetric,
    Difference,
    compute_difference,
    describe_tests,
    mean_and_std,
    mean_by_share,
    on_test,
    other_test,
    transfer_rows,
)
from .report_data import Group, ReportData, RunReader

TILE_TESTS = {"global": "whole test set", "local": "devices' own tests"}
ADMITTED = "admitted"


@dataclass(frozen=True)
class TierSummary:
    """What a device of a tier runs, transfers and ends up with in one arm."""

    arm: str
    tier: str
    can_run: bool
    share: float  # of the devices
    parameters: int | None
    macs: int | None
    bytes_down: float | None  # per device and round
    bytes_up: float | None
    mean: float
    std: float
    seeds: int
    gain_over_standalone: str  # empty: unknown


TIER_COLUMNS = tuple(TierSummary.__dataclass_fields__)


def summarize_tiers(report: ReportData) -> list[TierSummary]:
    standalone = next((group.arm for group in report.groups if group.name == "standalone"), None)
    return [_summarize_tier(report, group, tier, standalone) for group in report.groups for tier in report.tiers]


def _summarize_tier(report: ReportData, group: Group, tier: str, standalone: Arm | None) -> TierSummary:
    arm, served = group.arm, group.arm.serving[tier]
    fleet = group.readers[0].fleet
    costs: dict[str, Any] = next((one for one in fleet["tiers"] if one["name"] == served.tier), {})
    values = [value for value in arm.final_values(tier, report.test) if not math.isnan(value)]
    return TierSummary(
        group.name, tier, served.can_run, report.terms.shares.get(tier, 0.0),
        costs.get("parameters"), costs.get("macs"), *_bytes_per_device(group.readers[0], served.tier),
        **(mean_and_std(values) if values else {"mean": math.nan, "std": 0.0}), seeds=len(group.readers),
        gain_over_standalone=_gain_over_standalone(report, group.arm, standalone, tier),
    )  # fmt: skip


def _gain_over_standalone(report: ReportData, arm: Arm, standalone: Arm | None, tier: str) -> str:
    """The difference to training alone, with its noise unless it is beyond it."""
    if standalone is None or standalone is arm or report.result is None or not arm.serving[tier].can_run:
        return ""
    gap = compute_difference(arm, standalone, tier, report.test, report.terms.examples)
    if math.isnan(gap.mean):
        return ""
    number = gap.metric.number
    noise = f"± {number(gap.noise)}" if math.isfinite(gap.noise) else "unknown"
    return number(gap.mean, "+") + ("" if gap.beyond_noise else f" (noise {noise})")


def _bytes_per_device(reader: RunReader, tier: str) -> tuple[float | None, float | None]:
    """Bytes down per request and bytes up per admitted reply."""
    requests, replies, down, up = 0, 0, 0, 0
    for line in reader.participation:
        if line["tier"] == tier:
            requests += len(line["devices"])
            down += line["bytes_down"]
            if line["outcome"] == ADMITTED:
                replies += len(line["devices"])
                up += sum(line["bytes_up"].values())
    return (down / requests if requests else None), (up / replies if replies else None)


# --- sentences


def write_sentences(report: ReportData) -> list[str]:
    """The finding first, then what it rests on, then every statement of a comparison."""
    verdict = report.result.verdict if report.result is not None else []
    return [write_headline(report), *write_basis(report), *verdict]


def write_headline(report: ReportData) -> str:
    """What came out, in one sentence."""
    evaluated = [one for one in summarize_tiers(report) if not math.isnan(one.mean)]
    if report.result is not None and report.result.finding:
        return f"{_so_far(report)}{report.result.finding}"
    if not evaluated:
        return _without_values(report)
    if report.has_several_arms:
        return f"{pluralize(len(report.groups), 'arm')} side by side, not compared: {report.missing_result_reason}."
    return _run_headline(report, evaluated)


def _without_values(report: ReportData) -> str:
    reader = report.first
    if reader.manifest.get("status") == "failed" and not report.has_several_arms:
        rounds = f"{reader.rounds} of {pluralize(reader.recipe['rounds'], 'round')}"
        return f"{report.groups[0].name} failed after {rounds}; what it had measured does not count."
    return "Nothing has been evaluated yet."


def write_progress(report: ReportData) -> str:
    """How far the runs are, and what came out so far; for the terminal."""
    done = sum(reader.rounds for reader in report.readers)
    rounds = sum(reader.recipe["rounds"] for reader in report.readers)
    return f"{done} of {pluralize(rounds, 'round')}: {write_headline(report)}"


def _so_far(report: ReportData) -> str:
    if not report.is_running:
        return ""
    done, planned = (
        sum(values) for values in zip(*((r.rounds, r.recipe["rounds"]) for r in report.readers), strict=True)
    )
    return f"So far, after {done} of {pluralize(planned, 'round')}: "


def _run_headline(report: ReportData, evaluated: Sequence[TierSummary]) -> str:
    reader, metric, name = report.first, report.metric, report.groups[0].name
    values = join_words([f"{metric.format(one.mean)} on {one.tier}" for one in evaluated])
    article = "an" if metric.name[0] in "aeiou" else "a"
    reached = f"{article} {metric.name.replace('_', ' ')} of {values} devices"
    seeds = len(report.groups[0].readers)
    over = f", mean over {pluralize(seeds, 'seed')}" if seeds > 1 else ""
    rounds = f"{reader.rounds} of {pluralize(reader.recipe['rounds'], 'round')}"
    status = reader.manifest.get("status")
    if report.is_running:
        return f"So far, after {rounds}, {name} reaches {reached}{over}."
    if status == "interrupted":
        return f"{name} was interrupted after {rounds}, at {reached}{over}."
    return f"{name} reaches {reached}{over}."


def write_basis(report: ReportData) -> list[str]:
    """What the finding rests on: the test, the seeds and the noise; then the other test, or what did not count."""
    evaluated = [one for one in summarize_tiers(report) if not math.isnan(one.mean)]
    if not evaluated:
        return []
    lines = [_test_sentence(report), _noise_sentence(report, evaluated)]
    lines += filter(None, [describe_tests(report.test, report.terms.headlines) if report.result is None else ""])
    return [*lines, *_other_test_sentence(report), *_void_sentence(report)]


def _test_sentence(report: ReportData) -> str:
    seeds = pluralize(len(report.groups[0].readers), "seed")
    return f"Judged {on_test(report.test)} ({pluralize(report.terms.examples, 'example')} in all), {seeds}."


def _noise_sentence(report: ReportData, evaluated: Sequence[TierSummary]) -> str:
    """The uncertainty that the test set and the seeds leave."""
    metric = report.metric
    gains = report.result.gains if report.result is not None else []
    noises = [gain.noise for gain in gains if math.isfinite(gain.noise)]
    if gains and not noises:
        return "One seed cannot say how much of a difference is noise; `fedloom compare --seeds 5` can."
    if noises:
        most = metric.number(max(noises))
        return f"Differences below {most}{metric.difference_unit} can be noise."
    if not metric.has_standard_error:
        return "`fedloom compare --seeds 5` shows how much results vary between seeds."
    noise = 2 * metric.standard_error(statistics.fmean(one.mean for one in evaluated), report.terms.examples)
    return f"Each value is known to about ± {format_points(noise)}."


def _other_test_sentence(report: ReportData) -> list[str]:
    """The final values on the test that comes second; of a single arm."""
    other = other_test(report.test)
    if report.has_several_arms:
        return []
    shown = replace(report, terms=replace(report.terms, test=other))
    values = [one for one in summarize_tiers(shown) if not math.isnan(one.mean)]
    parts = [f"{report.metric.format(one.mean)} on {one.tier}" for one in values]
    where = f"{on_test(other)[0].upper()}{on_test(other)[1:]}"
    if report.tests_agree:
        return [f"{where} the values are the same."]
    return [f"{where}: {join_words(parts)} devices."] if parts else []


def _void_sentence(report: ReportData) -> list[str]:
    count = len(report.first.void_rounds)
    return [f"{pluralize(count, 'round')} did not count: too few replies."] if count else []


# --- large numbers


@dataclass(frozen=True)
class Figure:
    """A large number, what it is of, and a note below it."""

    value: str
    unit: str = ""
    note: str = ""
    of: str = ""
    tone: str = ""  # "good" or "bad" if it may be claimed
    tier: str = ""  # whose number it is; empty: of all
    arm: str = ""


@dataclass(frozen=True)
class Tile:
    title: str
    figures: Sequence[Figure]


def build_tiles(report: ReportData) -> list[Tile]:
    """Three to five: gains or values by tier, devices served, bytes and time."""
    if report.result is not None:
        return [*_gain_tiles(report), _served_tile(report), _bytes_tile(report), *_time_tile(report)]
    evaluated = [one for one in summarize_tiers(report) if not math.isnan(one.mean)]
    if not evaluated or report.has_several_arms:
        return [*_bytes_tiles_without_result(report), *_time_tile(report)] if evaluated else []
    tiles = [_value_tile(report, evaluated), *_other_test_tile(report)]
    return [*tiles, *_reply_tile(report.first), _bytes_tile(report), *_time_tile(report)]


def _bytes_tiles_without_result(report: ReportData) -> list[Tile]:
    served = Tile("Arms side by side", [Figure(str(len(report.groups)), note=report.missing_result_reason)])
    return [served, _bytes_tile(report)]


def _gain_tiles(report: ReportData) -> list[Tile]:
    assert report.result is not None
    gains = report.result.gains
    if not gains:
        return []
    arms = [group.arm for group in report.groups]
    rivals = has_rival_methods(arms, report.terms.controls)
    alone = not rivals and all(gain.this == arms[0].name and gain.other in SIMPLE_ALTERNATIVES for gain in gains)
    title = (
        f"Gain of {gains[0].this} over the best simple alternative" if alone else "Lead of the best arm over the next"
    )
    return [Tile(title, [_gain_figure(gain, not alone) for gain in gains])]


def _gain_figure(gain: Difference, named: bool) -> Figure:
    metric = gain.metric
    value = metric.signed(gain.advantage)  # more is better, also where lower values are
    noise = f"± {metric.number(gain.noise)}, " if math.isfinite(gain.noise) else ""
    pair = f"{gain.this} over {gain.other}" if named else f"over {gain.other}"
    tone = ("good" if gain.advantage > 0 else "bad") if gain.beyond_noise else ""
    verdict = "level" if float(metric.number(gain.mean)) == 0 else gain.verdict.partition(",")[0]
    return Figure(
        value,
        metric.difference_unit.strip(),
        f"{pair}: {noise}{verdict}",
        f"{gain.tier} devices",
        tone,
        gain.tier,
    )


def _served_tile(report: ReportData) -> Tile:
    assert report.result is not None
    first, *others = report.result.records
    name = first["arm"]
    least = min(others, key=lambda record: record["served_percent"])
    same = all(record["served_percent"] == first["served_percent"] for record in others)
    note = (
        f"by {name}; the same in every arm" if same else f"by {name}; {least['arm']}: {least['served_percent']:.0f} %"
    )
    return Tile("Devices served", [Figure(f"{first['served_percent']:.0f}", "%", note)])


def _bytes_tile(report: ReportData) -> Tile:
    first, *others = [(group.name, group.arm.bytes_per_round()) for group in report.groups]
    value, _, unit = format_bytes(first[1]).partition(" ")
    if others:
        return Tile("Bytes per round", [Figure(value, unit, f"{first[0]}; {_range_of_bytes(others)}")])
    total = sum(row.value for row in transfer_rows(report.first.rows))
    return Tile("Bytes per round", [Figure(value, unit, f"down and up, all devices; {format_bytes(total)} in all")])


def _range_of_bytes(arms: Sequence[tuple[str, float]]) -> str:
    """The least and the most of several arms, in words."""
    low, high = min(arms, key=lambda one: one[1]), max(arms, key=lambda one: one[1])
    if len(arms) == 1:
        return f"{low[0]}: {format_bytes(low[1])}"
    if low[1] == high[1]:
        return f"others: {format_bytes(low[1])}"
    return f"others: {format_bytes(low[1])} ({low[0]}) to {format_bytes(high[1])} ({high[0]})"


def _time_tile(report: ReportData) -> list[Tile]:
    """Simulated seconds where devices have a speed, else those of this machine."""
    first = report.groups[0]
    several = len(first.readers) > 1
    of = f" of {first.name}" if report.has_several_arms else ""
    whose = f"a run{of}, " if several else f"{first.name}, " if of else ""
    simulated = first.arm.simulated_seconds()
    spent = _machine_seconds(first)
    if simulated:
        value = format_seconds(statistics.fmean(simulated))
        note = (
            f"on the fleet, simulated; {format_seconds(spent)} on this machine" if spent else "on the fleet, simulated"
        )
    elif spent:
        value, note = format_seconds(spent), "on this machine"
    else:
        return []
    number, _, unit = value.partition(" ")
    return [Tile("Time", [Figure(number, unit or "h:m:s", f"{whose}{note}")])]


def _machine_seconds(group: Group) -> float:
    """Mean over the runs of an arm."""
    return statistics.fmean(sum(line["seconds"] for line in reader.timings) for reader in group.readers)


def _value_tile(report: ReportData, evaluated: Sequence[TierSummary]) -> Tile:
    metric, where = report.metric, TILE_TESTS.get(report.test, f"{report.test} test")
    figures = [
        Figure(
            metric.number(one.mean), metric.unit.strip(), _value_note(report, metric, one), f"{one.tier} devices",
            tier=one.tier,
        )
        for one in evaluated
    ]  # fmt: skip
    return Tile(f"{metric.title}, {where}", figures)


def _value_note(report: ReportData, metric: ComparedMetric, one: TierSummary) -> str:
    if one.std:
        return f"± {metric.number(one.std)} between seeds"
    noise = 2 * metric.standard_error(one.mean, report.terms.examples)
    return f"± {metric.number(noise)} by test size" if noise else "noise unknown"


def _other_test_tile(report: ReportData) -> list[Tile]:
    other = other_test(report.test)
    shown = replace(report, terms=replace(report.terms, test=other))
    values = {one.tier: one.mean for one in summarize_tiers(shown) if not math.isnan(one.mean)}
    if report.tests_agree or not values or sum(report.terms.shares.get(tier, 0.0) for tier in values) == 0:
        return []
    mean = mean_by_share(values, report.terms.shares)
    return [
        Tile(
            TILE_TESTS[other].capitalize(),
            [Figure(report.metric.number(mean), report.metric.unit.strip(), "the average device")],
        )
    ]


def _reply_tile(reader: RunReader) -> list[Tile]:
    outcomes = Counter[str]()
    for line in reader.participation:
        outcomes[line["outcome"]] += len(line["devices"])
    if not outcomes.total():
        return []
    share = 100 * outcomes[ADMITTED] / outcomes.total()
    digits = f"{share:.0f}" if share in (0, 100) or 0.5 <= share < 99.5 else f"{share:.2f}"
    return [Tile("Replies admitted", [Figure(digits, "%", f"of {pluralize(outcomes.total(), 'request')} to devices")])]
