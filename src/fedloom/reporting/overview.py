"""What came of it, before any figure: a few sentences, and a table by arm and tier."""

import math
import statistics
from collections import Counter
from dataclasses import dataclass
from typing import Any

from .charts.drawing import counted, listed, size
from .paired_stats import Arm, difference, travelled
from .report_data import Group, ReportData, RunReader


@dataclass(frozen=True)
class Line:
    """A row of the table: what a device of the tier carries, moves and gets."""

    arm: str
    tier: str
    can_carry: bool
    share: float  # of the devices
    parameters: int | None
    macs: int | None
    bytes_down: float | None  # for a device, in a round
    bytes_up: float | None
    value: float
    spread: float
    seeds: int
    over_standalone: str  # empty: unknown


COLUMNS = (
    "arm", "tier", "can_carry", "share", "parameters", "macs", "bytes_down", "bytes_up", "mean", "std", "seeds",
    "gain_over_standalone",
)  # fmt: skip


def table(subject: ReportData) -> list[Line]:
    alone = next((group.arm for group in subject.groups if group.name == "standalone"), None)
    return [_line(subject, group, tier, alone) for group in subject.groups for tier in subject.tiers]


def _line(subject: ReportData, group: Group, tier: str, alone: Arm | None) -> Line:
    arm, served = group.arm, group.arm.serving[tier]
    known: dict[str, Any] = next((one for one in group.stories[0].fleet["tiers"] if one["name"] == served.tier), {})
    down, up = _moved(group.stories[0], served.tier)
    values = [value for value in arm.ends(tier, subject.test) if not math.isnan(value)]
    return Line(
        group.name, tier, served.can_carry, subject.terms.shares.get(tier, 0.0),
        known.get("parameters"), known.get("macs"), down, up,
        statistics.fmean(values) if values else math.nan, statistics.stdev(values) if len(values) > 1 else 0.0,
        len(group.stories), _over(subject, group.arm, alone, tier),
    )  # fmt: skip


def _over(subject: ReportData, arm: Arm, alone: Arm | None, tier: str) -> str:
    """The gain over a device that learns alone, with what it would take to be sure."""
    if alone is None or alone is arm or not subject.judged or not arm.serving[tier].can_carry:
        return ""
    gap = difference(arm, alone, tier, subject.test, subject.terms.examples)
    if math.isnan(gap.mean):
        return ""
    noise = f"± {gap.noise:.1f}" if math.isfinite(gap.noise) else "unknown"
    return f"{gap.mean:+.1f}" + ("" if gap.beyond_noise else f" (noise {noise})")


def _moved(story: RunReader, tier: str) -> tuple[float | None, float | None]:
    """Bytes down for each time a device was asked, bytes up for each reply that was admitted."""
    asked, heard, down, up = 0, 0, 0, 0
    for line in story.participation:
        if line["tier"] == tier:
            asked += len(line["devices"])
            down += line["bytes_down"]
            if line["outcome"] == "admitted":
                heard += len(line["devices"])
                up += sum(line["bytes_up"].values())
    return (down / asked if asked else None), (up / heard if heard else None)


def verdict(subject: ReportData) -> list[str]:
    if subject.result is not None:
        return [*_winners(subject), *subject.result.verdict]
    story, lines = subject.first, table(subject)
    judged = [one for one in lines if not math.isnan(one.value)]
    if not judged:
        return ["Nothing was judged yet."]
    return [_reached(subject, judged), *_heard(story), _uncertain(subject, judged)]


def _winners(subject: ReportData) -> list[str]:
    assert subject.result is not None
    found = subject.result.winners
    won = [f"{name} for tier {tier}" for tier, name in found.items() if name]
    open_ = [tier for tier, name in found.items() if not name]
    lines = [f"Best beyond noise: {listed(won)}."] if won else []
    return [*lines, *([f"No arm is best beyond noise for tier {listed(open_)}."] if open_ else [])]


def _reached(subject: ReportData, judged: list[Line]) -> str:
    story, metric = subject.first, subject.metric
    ends = [f"{one.tier} {metric.said(one.value)}" + (f" ± {one.spread:.1f}" if one.spread else "") for one in judged]
    if subject.several:
        ends = [f"{one.arm} {end}" for one, end in zip(judged, ends, strict=True)]
    when = (
        f"So far, after {story.rounds} of {story.recipe['rounds']} rounds"
        if subject.under_way
        else (f"After {counted(story.rounds, 'round')}")
    )
    over = (
        f", mean over {counted(len(subject.groups[0].stories), 'seed')}" if len(subject.groups[0].stories) > 1 else ""
    )
    return f"{when}, {metric.name} on the {subject.test} test{over}: {listed(ends)}."


def _heard(story: RunReader) -> list[str]:
    outcomes = Counter[str]()
    for line in story.participation:
        outcomes[line["outcome"]] += len(line["devices"])
    moved = sum(row.value for row in travelled(story.rows))
    if not outcomes.total():
        return []
    share = 100 * outcomes["admitted"] / outcomes.total()
    void = f" {counted(len(story.voided), 'round')} did not count for want of a quorum." if story.voided else ""
    return [f"{share:.0f} % of {outcomes.total():,} questions to devices were answered; {size(moved)} moved.{void}"]


def _uncertain(subject: ReportData, judged: list[Line]) -> str:
    """What the test set alone leaves open."""
    seeds = counted(len(subject.groups[0].stories), "seed")
    if not subject.metric.unit:
        return f"This is {seeds}; `fedloom compare --seeds 5` says how much another seed would change."
    examples = subject.terms.examples
    noise = 2 * subject.metric.test_error(statistics.fmean(one.value for one in judged), examples)
    return f"With {seeds} and {examples:,} test examples, each of these is known to about ± {noise:.1f} points."


def facts(subject: ReportData) -> dict[str, Any]:
    """What the run was, in a line."""
    story = subject.first
    return {
        "method": " · ".join(group.name for group in subject.groups),
        "paper": "" if subject.several else story.fleet["method"].get("paper", ""),
        "data": f"{story.recipe['data']['dataset']}, {story.recipe['data']['devices']} devices",
        "rounds": f"{story.rounds} of {story.recipe['rounds']} rounds",
        "seeds": f"seed {', '.join(str(one.seed) for one in subject.groups[0].stories)}",
        "started": story.manifest.get("started", ""),
    }
