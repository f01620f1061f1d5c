"""All arms of a comparison: final values by arm and tier, and paired differences of the first arm to the others."""

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes

from ...wording import pluralize
from ..paired_stats import ComparedMetric, Difference, compute_difference, other_test
from ..report_data import ReportData
from . import drawing
from .drawing import Chart, ChartRow, Mark, MissingChart, Panel, label_width

ARMS_TITLE, DIFFERENCES_TITLE = "Final values by arm and tier", "Paired differences"
ROW_SPREAD = 0.5  # of a row, so that tiers with the same model stay visible
DIFFERENCE_COLUMNS = ("tier", "arm", "other", "arm_mean", "other_mean", "difference", "noise", "beyond_noise", "seeds")


def build_arms_chart(report: ReportData) -> Chart | MissingChart:
    if report.result is None:
        return MissingChart(ARMS_TITLE, report.missing_result_reason)
    metric, arms, tiers = report.metric, report.result.records, list(report.tiers)
    other = other_test(report.test)
    key = f"{other}_test"
    tests = {"": metric.name, **({other: key} if any(arm[key] for arm in arms) else {})}
    records: list[ChartRow] = [
        (arm["arm"], tier, test or report.test, *_value(arm, key, tier).values(), int(arm["can_run"][tier]))
        for test, key in tests.items()
        for arm in arms
        for tier in tiers
    ]
    columns = ("arm", "tier", "test", f"{metric.name}_mean", f"{metric.name}_std", "can_run")
    legend = [Mark(tier, index, tier) for index, tier in enumerate(tiers)]
    titles = (f"{report.test} test", f"{other} test") if len(tests) > 1 else ("",)
    panels = [_arms_panel(arms, tiers, metric, *panel) for panel in zip(tests.values(), titles, strict=True)]
    return Chart("arms", ARMS_TITLE, _arms_sentence(arms, metric), columns, records, panels, legend, "points")


def _value(arm: dict[str, Any], key: str, tier: str) -> dict[str, float]:
    """Mean and standard deviation over seeds."""
    value: dict[str, float] = (arm[key] or {}).get(tier, {"mean": math.nan, "std": math.nan})
    return value


def _arms_panel(
    arms: Sequence[dict[str, Any]], tiers: Sequence[str], metric: ComparedMetric, key: str, title: str
) -> Panel:
    names = [arm["arm"] for arm in arms]

    def draw(axes: Axes) -> None:
        for row, arm in enumerate(arms):
            for index, tier in enumerate(tiers):
                value = _value(arm, key, tier)
                y = row + ROW_SPREAD * (index - (len(tiers) - 1) / 2) / len(tiers)
                artists = axes.errorbar(
                    value["mean"], y, xerr=value["std"] or None, color=drawing.color(index), capsize=2,
                    marker=drawing.marker(index), markersize=6,
                    markerfacecolor=None if arm["can_run"][tier] else "none",
                )  # fmt: skip
                drawing.tag_tier(list(artists.get_children()), tier)
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(len(names) - 0.5, -0.5)
        drawing.set_labels(axes, metric.axis_label, "")

    parts = [
        f"{arm['arm']} " + ", ".join(f"{tier} {_format_final(arm, tier, metric, key)}" for tier in tiers)
        for arm in arms
    ]
    alt = f"{metric.title} by arm and tier{', ' + title if title else ''}: {'; '.join(parts)}"
    return Panel(alt, draw, title, "", (6.4, 0.7 + 0.3 * len(arms)), label_width(names))


def _format_final(arm: dict[str, Any], tier: str, metric: ComparedMetric, key: str) -> str:
    mean = _value(arm, key, tier)["mean"]
    return "nothing" if math.isnan(mean) else metric.format(mean) + ("" if arm["can_run"][tier] else " (too large)")


def _arms_sentence(arms: Sequence[dict[str, Any]], metric: ComparedMetric) -> str:
    has_hollow = any(not can_run for arm in arms for can_run in arm["can_run"].values())
    hollow = " Hollow: a model that these devices cannot run." if has_hollow else ""
    complete = [arm for arm in arms if not math.isnan(arm["worst_tier"]["mean"])]
    if not complete:
        return f"None of {len(arms)} arms gives every device a model it can run.{hollow}"
    best = max(complete, key=lambda arm: metric.sign * arm["worst_tier"]["mean"])
    return (
        f"Of {len(arms)} arms, {best['arm']} is best for the worst-off tier, with "
        f"{metric.format(best['worst_tier']['mean'])}; whiskers are one standard deviation over seeds.{hollow}"
    )


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
    sentence = _differences_sentence(report, differences, seeds)
    return Chart("differences", DIFFERENCES_TITLE, sentence, DIFFERENCE_COLUMNS, records, panels)


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

    def draw(axes: Axes) -> None:
        axes.axvline(0, color=drawing.INK, linewidth=0.8)
        for row, gap in enumerate(differences):
            strong, noise = gap.beyond_noise, gap.noise if math.isfinite(gap.noise) else None
            color = drawing.PALETTE[(0 if gap.advantage > 0 else 1) if strong else 6]
            axes.errorbar(
                gap.advantage, row, xerr=noise, fmt="o" if strong else "s", color=color, capsize=3, markersize=6,
                markerfacecolor=color if strong else "none",
            )  # fmt: skip
        axes.set_yticks(range(len(others)), others)
        axes.set_ylim(len(others) - 0.5, -0.5)
        drawing.set_labels(axes, f"advantage of {this}, {unit}", "")

    parts = [f"{gap.other} {metric.number(gap.mean, '+')} ± {metric.number(gap.noise)}" for gap in differences]
    alt = f"{this} minus others for tier {tier}, in {unit}: {'; '.join(parts)}"
    return Panel(alt, draw, f"tier {tier}", tier, (5.0, 0.7 + 0.42 * len(others)), label_width(others))


def _differences_sentence(report: ReportData, differences: list[Difference], seeds: int) -> str:
    better = sum(gap.beyond_noise and gap.advantage > 0 for gap in differences)
    worse = sum(gap.beyond_noise and gap.advantage < 0 for gap in differences)
    return (
        f"Of {pluralize(len(differences), 'difference')}, {differences[0].this} is better beyond noise in {better} and "
        f"worse in {worse}; the others (hollow) are within noise. "
        f"Whiskers are two standard errors, of {'the test set and of ' if report.metric.has_standard_error else ''}"
        f"{pluralize(seeds, 'seed')}."
    )
