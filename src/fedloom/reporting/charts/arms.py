"""What each arm gives the devices of each tier, all arms in one picture.

The first arm against every other, paired by seed, with the uncertainty of each difference.
"""

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes

from ..paired_stats import LOCAL_TEST, Difference, Metric, compute_difference
from ..report_data import ReportData
from . import drawing
from .drawing import MissingChart, Chart, Mark, Panel, ChartRow, label_width, pluralize

TITLE = "What every arm gives whom"
SPREAD = 0.5  # of a row, so that tiers with the same model can be told apart


def build_arms_chart(report: ReportData) -> Chart | MissingChart:
    if report.result is None:
        return MissingChart(TITLE, report.missing_result_reason)
    metric, found, tiers = report.metric, report.result.records, list(report.tiers)
    tests = {"": metric.name, **({LOCAL_TEST: "local_test"} if any(one["local_test"] for one in found) else {})}
    records: list[ChartRow] = [
        (one["arm"], tier, test or report.test, *_value(one, key, tier).values(), int(one["can_run"][tier]))
        for test, key in tests.items()
        for one in found
        for tier in tiers
    ]
    columns = ("arm", "tier", "test", f"{metric.name}_mean", f"{metric.name}_std", "can_run")
    legend = [Mark(tier, index, tier) for index, tier in enumerate(tiers)]
    titles = ("on the whole test", "on devices' own tests") if len(tests) > 1 else ("",)
    panels = [_panel(found, tiers, metric, *one) for one in zip(tests.values(), titles, strict=True)]
    return Chart("arms", TITLE, _read(found, metric), columns, records, panels, legend, "points")


def _value(one: dict[str, Any], key: str, tier: str) -> dict[str, float]:
    """Mean and standard deviation over seeds."""
    value: dict[str, float] = (one[key] or {}).get(tier, {"mean": math.nan, "std": math.nan})
    return value


def _panel(found: Sequence[dict[str, Any]], tiers: Sequence[str], metric: Metric, key: str, title: str) -> Panel:
    names = [one["arm"] for one in found]

    def draw(axes: Axes) -> None:
        for row, one in enumerate(found):
            for index, tier in enumerate(tiers):
                value, able = _value(one, key, tier), one["can_run"][tier]
                beside_others = row + SPREAD * (index - (len(tiers) - 1) / 2) / len(tiers)
                artists = axes.errorbar(
                    value["mean"], beside_others, xerr=value["std"] or None, color=drawing.color(index), capsize=2,
                    marker=drawing.marker(index), markersize=6, markerfacecolor=None if able else "none",
                )  # fmt: skip
                drawing.tag_tier(list(artists.get_children()), tier)
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(len(names) - 0.5, -0.5)
        drawing.set_labels(axes, metric.axis_label, "")

    said = [f"{one['arm']} " + ", ".join(f"{tier} {_end(one, tier, metric, key)}" for tier in tiers) for one in found]
    alt = f"{metric.name.capitalize()} by arm and tier{', ' + title if title else ''}: {'; '.join(said)}"
    return Panel(alt, draw, title, "", (6.4, 0.7 + 0.3 * len(found)), label_width(names))


def _end(one: dict[str, Any], tier: str, metric: Metric, key: str) -> str:
    mean = _value(one, key, tier)["mean"]
    return "nothing" if math.isnan(mean) else metric.format(mean) + ("" if one["can_run"][tier] else " (too large)")


def _read(found: Sequence[dict[str, Any]], metric: Metric) -> str:
    hollow = any(not able for one in found for able in one["can_run"].values())
    more = " Hollow: a model that these devices cannot carry." if hollow else ""
    whole = [one for one in found if not math.isnan(one["worst_tier"]["mean"])]
    if not whole:
        return f"None of {len(found)} arms gives every device a model it can carry.{more}"
    best = max(whole, key=lambda one: metric.sign * one["worst_tier"]["mean"])
    return (
        f"Of {len(found)} arms {best['arm']} leaves the worst-off tier best, with "
        f"{metric.format(best['worst_tier']['mean'])}; whiskers are one standard deviation over seeds.{more}"
    )


DIFFERENCES_TITLE = "Paired differences"
COLUMNS = ("tier", "arm", "other", "arm_mean", "other_mean", "difference", "noise", "beyond_noise", "seeds")


def build_differences_chart(report: ReportData) -> Chart | MissingChart:
    if report.result is None:
        return MissingChart(DIFFERENCES_TITLE, report.missing_result_reason)
    found = _differences(report)
    if not found:
        return MissingChart(DIFFERENCES_TITLE, "no other arm gives these devices a model they can carry")
    seeds = len(report.groups[0].readers)
    records: list[ChartRow] = [
        (
            one.tier,
            one.this,
            one.other,
            one.this_mean,
            one.other_mean,
            one.mean,
            one.noise,
            int(one.beyond_noise),
            seeds,
        )
        for one in found
    ]
    tiers = [tier for tier in report.tiers if any(one.tier == tier for one in found)]
    panels = [_differences_panel(tier, [one for one in found if one.tier == tier]) for tier in tiers]
    return Chart("differences", DIFFERENCES_TITLE, _differences_read(report, found, seeds), COLUMNS, records, panels)


def _differences(report: ReportData) -> list[Difference]:
    first, *others = report.groups
    terms = report.terms
    found = [
        compute_difference(first.arm, other.arm, tier, terms.test, terms.examples)
        for tier in report.tiers
        for other in others
        if other.arm.serving[tier].can_run and first.arm.serving[tier].can_run
    ]
    return [one for one in found if not math.isnan(one.mean)]


def _differences_panel(tier: str, found: list[Difference]) -> Panel:
    unit = found[0].metric.difference_unit.strip() or found[0].metric.name

    def draw(axes: Axes) -> None:
        axes.axvline(0, color=drawing.INK, linewidth=0.8)
        for row, one in enumerate(found):
            strong, noise = one.beyond_noise, one.noise if math.isfinite(one.noise) else None
            color = drawing.PALETTE[(0 if one.advantage > 0 else 1) if strong else 6]
            axes.errorbar(
                one.advantage, row, xerr=noise, fmt="o" if strong else "s", color=color, capsize=3, markersize=6,
                markerfacecolor=color if strong else "none",
            )  # fmt: skip
        axes.set_yticks(range(len(found)), [one.other for one in found])
        axes.set_ylim(len(found) - 0.5, -0.5)
        drawing.set_labels(axes, f"{unit} that {found[0].this} is ahead", "")

    parts = [f"{one.other} {one.mean:+.1f} ± {one.noise:.1f}" for one in found]
    alt = f"{found[0].this} minus others for tier {tier}, in {unit}: {'; '.join(parts)}"
    return Panel(alt, draw, f"tier {tier}", tier, (5.0, 0.7 + 0.42 * len(found)), label_width([one.other for one in found]))


def _differences_read(report: ReportData, found: list[Difference], seeds: int) -> str:
    ahead = sum(one.beyond_noise and one.advantage > 0 for one in found)
    behind = sum(one.beyond_noise and one.advantage < 0 for one in found)
    return (
        f"Of {pluralize(len(found), 'compute_difference')}, {found[0].this} is ahead beyond noise in {ahead} and behind in "
        f"{behind}; the others (hollow) are within noise. "
        f"Whiskers are two standard errors, of {'the test set and of ' if report.metric.unit else ''}"
        f"{pluralize(seeds, 'seed')}."
    )
