"""All arms of a comparison: final values by tier, with the controls as lines, and differences of the first arm."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ...wording import join_words, pluralize
from ..paired_stats import (
    REFERENCES,
    ComparedMetric,
    Difference,
    compute_difference,
    error_of_examples,
    other_test,
)
from ..report_data import ReportData
from .drawing import NARROW, Axis, Chart, ChartRow, Dot, Look, MarkKind, MissingChart, Panel, ReferenceLine, row_height
from .looks import arm_look, is_control

DIFFERENCES_TITLE = "Paired differences"
DIFFERENCE_COLUMNS = ("tier", "arm", "other", "arm_mean", "other_mean", "difference", "noise", "beyond_noise", "seeds")


def build_arms_chart(report: ReportData) -> Chart | MissingChart:
    """The chart of the first screen: a panel per tier, a row per arm, and a line at each of the two usual controls."""
    title = f"Final {report.metric.name.replace('_', ' ')} by arm and tier"
    if report.result is None:
        return MissingChart(title, report.missing_result_reason)
    arms, tiers = report.result.records, list(report.tiers)
    metric, other = report.metric, other_test(report.test)
    tests = {
        report.test: metric.name,
        **({other: f"{other}_test"} if any(arm[f"{other}_test"] for arm in arms) else {}),
    }
    records: list[ChartRow] = [
        (arm["arm"], tier, test, *_value(arm, key, tier).values(), int(arm["can_run"][tier]))
        for test, key in tests.items()
        for arm in arms
        for tier in tiers
    ]
    columns = ("arm", "tier", "test", f"{metric.name}_mean", f"{metric.name}_std", "can_run")
    extent = _extent(report, arms)
    panels = [_arms_panel(report, arms, tier, extent) for tier in tiers]
    return Chart("arms", title, _arms_sentence(arms, metric), columns, records, panels, note=_arms_note(report, arms))


def _value(arm: dict[str, Any], key: str, tier: str) -> dict[str, float]:
    """Mean and standard deviation over seeds."""
    value: dict[str, float] = (arm[key] or {}).get(tier, {"mean": math.nan, "std": math.nan})
    return value


def _uncertainty(report: ReportData, value: dict[str, float], seeds: int) -> float:
    """Two standard errors of a mean: of the test set, and of the seeds."""
    if math.isnan(value["mean"]):
        return 0.0
    of_test = report.metric.standard_error(value["mean"], report.terms.examples)
    return 2 * math.hypot(of_test, value["std"] / math.sqrt(seeds))


def _extent(report: ReportData, arms: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """The same scale in every panel, with room for the whiskers."""
    values = [_value(arm, report.metric.name, tier) for arm in arms for tier in report.tiers]
    seeds = len(report.groups[0].readers)
    known = [(value["mean"], _uncertainty(report, value, seeds)) for value in values if not math.isnan(value["mean"])]
    if not known:  # every arm failed
        return 0.0, 1.0
    low, high = min(mean - noise for mean, noise in known), max(mean + noise for mean, noise in known)
    room = 0.05 * (high - low) or 0.5
    return low - room, high + room


def _arms_panel(report: ReportData, arms: Sequence[dict[str, Any]], tier: str, extent: tuple[float, float]) -> Panel:
    metric, names = report.metric, [arm["arm"] for arm in arms]
    marks: list[MarkKind] = []
    for row, arm in enumerate(arms):
        value, look = _value(arm, metric.name, tier), arm_look(report, arm["arm"], tier)
        final = format_final(arm, tier, metric)
        text = "–" if math.isnan(value["mean"]) else metric.format(value["mean"])
        noise = _uncertainty(report, value, len(report.groups[0].readers))
        can_run, tip = arm["can_run"][tier], f"{arm['arm']}, {tier}: {final}"
        solid = replace(look, dash="")
        marks.append(Dot(value["mean"], row, solid, tip, noise, not can_run, 5.5, text if can_run else f"({text})"))
        if arm["arm"] in REFERENCES and is_control(report, arm["arm"]) and not math.isnan(value["mean"]):
            marks.append(ReferenceLine(value["mean"], look, tip=f"{arm['arm']}: {final}"))
    parts = [f"{arm['arm']} {format_final(arm, tier, metric)}" for arm in arms]
    alt = f"{metric.title} on {tier} devices: {'; '.join(parts)}"
    axis = Axis(metric.axis_label, low=extent[0], high=extent[1])
    return Panel(
        alt,
        marks,
        axis,
        Axis(names=names),
        f"{tier} devices",
        tier,
        NARROW,
        row_height(len(names), 24 if len(names) <= 10 else 17),
    )


def format_final(arm: dict[str, Any], tier: str, metric: ComparedMetric) -> str:
    value = _value(arm, metric.name, tier)
    spread = f" ± {metric.number(value['std'])}" if value["std"] and not math.isnan(value["std"]) else ""
    if math.isnan(value["mean"]):
        return "nothing"
    return metric.format(value["mean"]) + spread + ("" if arm["can_run"][tier] else " (too large)")


def _arms_sentence(arms: Sequence[dict[str, Any]], metric: ComparedMetric) -> str:
    complete = [arm for arm in arms if not math.isnan(arm["worst_tier"]["mean"])]
    if not complete:
        return f"None of {len(arms)} arms gives every device a model it can run."
    best = max(complete, key=lambda arm: metric.sign * arm["worst_tier"]["mean"])
    kind = "highest" if metric.sign > 0 else "lowest"
    return (
        f"Of {pluralize(len(complete), 'arm')} with a model for every device, {best['arm']} has the {kind} mean on the "
        f"worst-off tier, {metric.format(best['worst_tier']['mean'])}."
    )


def _arms_note(report: ReportData, arms: Sequence[dict[str, Any]]) -> str:
    """What the lines, whiskers and hollow marks are, if there are any."""
    lines = [arm["arm"] for arm in arms if arm["arm"] in REFERENCES and is_control(report, arm["arm"])]
    seeds = len(report.groups[0].readers)
    sources = ["the test set"] if report.metric.has_standard_error else []
    sources += [f"{seeds} seeds"] if seeds > 1 else []
    hollow = any(not can_run for arm in arms for can_run in arm["can_run"].values())
    sides = [(group.arm, {report.tiers[0]: 1.0}) for group in report.groups]
    paired = all(error_of_examples(sides[0], other, report.test) is not None for other in sides[1:])
    parts = [f"Dashed lines: {join_words(lines)}"] if lines else []
    parts += [f"whiskers: two standard errors, of {join_words(sources)}"] if sources else []
    parts += ["hollow, in brackets: a model that these devices cannot run"] if hollow else []
    parts += ["all arms saw the same examples, so differences are known better than whiskers show"] if paired else []
    text = "; ".join(parts)
    return f"{text[0].upper()}{text[1:]}." if text else ""


def build_differences_chart(report: ReportData) -> Chart | MissingChart:
    if report.result is None:
        return MissingChart(DIFFERENCES_TITLE, report.missing_result_reason)
    differences = _differences(report)
    if not differences:
        return MissingChart(DIFFERENCES_TITLE, "no other arm gives these devices a model they can run")
    seeds = len(report.groups[0].readers)
    records: list[ChartRow] = [
        (
            gap.tier,
            gap.this,
            gap.other,
            gap.this_mean,
            gap.other_mean,
            gap.mean,
            gap.noise,
            int(gap.beyond_noise),
            seeds,
        )
        for gap in differences
    ]
    tiers = [tier for tier in report.tiers if any(gap.tier == tier for gap in differences)]
    panels = [_differences_panel(tier, [gap for gap in differences if gap.tier == tier]) for tier in tiers]
    sentence, note = _differences_sentence(differences), _differences_note(report, seeds)
    return Chart("differences", DIFFERENCES_TITLE, sentence, DIFFERENCE_COLUMNS, records, panels, note=note)


def _differences(report: ReportData) -> list[Difference]:
    first, *others = report.groups
    terms = report.terms
    differences = [
        compute_difference(first.arm, other.arm, tier, terms.test, terms.examples)
        for tier in report.tiers
        for other in others
        if other.arm.serving[tier].can_run and first.arm.serving[tier].can_run
    ]
    return [gap for gap in differences if not math.isnan(gap.mean)]


def _differences_panel(tier: str, differences: list[Difference]) -> Panel:
    this, metric = differences[0].this, differences[0].metric
    unit, others = metric.difference_unit.strip() or metric.name, [gap.other for gap in differences]
    marks: list[MarkKind] = [ReferenceLine(0.0, Look("--ink"))]
    for row, gap in enumerate(differences):
        color = ("--good" if gap.advantage > 0 else "--bad") if gap.beyond_noise else "--soft"
        noise = gap.noise if math.isfinite(gap.noise) else 0.0
        look = Look(color, "", 0, gap.other, tier)
        text = metric.signed(gap.advantage)
        marks.append(Dot(gap.advantage, row, look, str(gap), noise, not gap.beyond_noise, 5.5, text))
    parts = [
        f"{gap.other} {metric.number(gap.mean, '+')}"
        + (f" ± {metric.number(gap.noise)}" if math.isfinite(gap.noise) else ", noise unknown")
        for gap in differences
    ]
    alt = f"{this} minus others for tier {tier}, in {unit}: {'; '.join(parts)}"
    x, y = Axis(f"advantage of {this}, {unit}"), Axis(names=others)
    return Panel(alt, marks, x, y, f"{tier} devices", tier, NARROW, row_height(len(others)))


def _differences_sentence(differences: list[Difference]) -> str:
    better = sum(gap.beyond_noise and gap.advantage > 0 for gap in differences)
    worse = sum(gap.beyond_noise and gap.advantage < 0 for gap in differences)
    rest = len(differences) - better - worse
    return (
        f"Of {pluralize(len(differences), 'difference')}, {differences[0].this} is better beyond noise in {better} and "
        f"worse in {worse}; {rest} may not be claimed."
    )


def _differences_note(report: ReportData, seeds: int) -> str:
    if not report.metric.has_standard_error and seeds == 1:
        return "With one seed, the noise of this metric is unknown."
    sources = "the test set and of " if report.metric.has_standard_error else ""
    return f"Whiskers: two standard errors, of {sources}{pluralize(seeds, 'seed')}. Hollow: not to be claimed."
