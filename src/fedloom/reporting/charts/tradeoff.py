"""What accuracy costs: tiers and sub-nets by multiply-adds, and the front that no other betters."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes

from ...evaluation.pareto import pareto_front
from ..paired_stats import ACCURACY, Metric
from ..report_data import ReportData
from . import drawing
from .drawing import MissingChart, Chart, Mark, Panel, ChartRow, pluralize


@dataclass(frozen=True)
class CostPoint:
    arm: str
    model: str
    parameters: int
    macs: int
    value: float
    index: int
    tier: str = ""


def build_pareto_chart(report: ReportData) -> Chart | MissingChart:
    metric, title = report.metric, f"{report.metric.name.capitalize()} against multiply-adds"
    points = [*_tiers(report), *(_subnets(report) if metric is ACCURACY else ())]
    if not points:
        return MissingChart(title, "the run does not say what its models cost, or nothing was judged yet")
    best = set(_front(points, metric))
    records: list[ChartRow] = [
        (one.arm, one.model, one.parameters, one.macs, one.value, int((one.macs, one.value) in best)) for one in points
    ]
    names = dict.fromkeys((one.arm if report.has_several_arms or not one.tier else one.tier, one.index) for one in points)
    legend = [Mark(name, index, "" if report.has_several_arms or name not in report.tiers else name) for name, index in names]
    alt = f"{pluralize(len(points), 'model')} by multiply-adds and {metric.name}; {_ends(points, metric)}"
    columns = ("arm", "model", "parameters", "macs", metric.name, "on_front")
    panel = Panel(alt, _drawing(points, metric))
    return Chart("pareto", title, _read(points, best, metric), columns, records, [panel], legend, "points")


def _front(points: Sequence[CostPoint], metric: Metric) -> list[tuple[float, float]]:
    edge = pareto_front((float(one.macs), metric.sign * one.value) for one in points)
    return [(macs, metric.sign * value) for macs, value in edge]


def _tiers(report: ReportData) -> list[CostPoint]:
    found = []
    for number, group in enumerate(report.groups):
        known = {tier["name"]: tier for tier in group.readers[0].fleet["tiers"] if "macs" in tier}
        for index, tier in enumerate(report.tiers):
            served = group.arm.serving[tier].tier
            ends = group.arm.final_values(tier, report.test) if any(group.arm.curves(tier, report.test)) else []
            values = [value for value in ends if not math.isnan(value)]
            if served == tier and values and tier in known:
                one, mean = known[tier], sum(values) / len(values)
                shown = number if report.has_several_arms else index
                found.append(CostPoint(group.name, tier, one["parameters"], one["macs"], mean, shown, tier))
    return found


def _subnets(report: ReportData) -> list[CostPoint]:
    """Judged by `fedloom subnet`, if it was called; on as many examples as most of them were."""
    found = []
    for number, group in enumerate(report.groups):
        kept = group.readers[0].subnets
        most = max((one["examples"] for one in kept), default=0)
        index = number if report.has_several_arms else len(report.tiers)
        name = group.name if report.has_several_arms else "sub-nets"
        for one in kept:
            if one["examples"] == most:
                found.append(CostPoint(name, "sub-net", one["parameters"], one["macs"], one["accuracy"], index))
    return found


def _drawing(points: Sequence[CostPoint], metric: Metric) -> Callable[[Axes], None]:
    def draw(axes: Axes) -> None:
        edge = _front(points, metric)
        x, y = ([point[at] for point in edge] for at in (0, 1))
        axes.plot(x, y, drawstyle="steps-post", color=drawing.INK, linewidth=0.8, alpha=0.6)
        for one in points:
            small = one.model == "sub-net"
            artists = axes.plot(
                one.macs, one.value, color=drawing.color(one.index), linestyle="",
                marker=drawing.marker(one.index), markersize=3.5 if small else 8,
                alpha=0.6 if small else 1.0,
            )  # fmt: skip
            drawing.tag_tier(list(artists), one.tier)
        axes.set_xscale("log")
        drawing.use_log_ticks(axes.xaxis)
        drawing.set_labels(axes, "multiply-adds for one example (logarithmic)", metric.axis_label)

    return draw


def _ends(points: Sequence[CostPoint], metric: Metric) -> str:
    small, large = min(points, key=lambda one: one.macs), max(points, key=lambda one: one.macs)
    return (
        f"the smallest takes {small.macs:,} and gets {metric.format(small.value)}, the largest takes {large.macs:,} and "
        f"gets {metric.format(large.value)}"
    )


def _read(points: Sequence[CostPoint], best: set[tuple[float, float]], metric: Metric) -> str:
    subnets = sum(one.model == "sub-net" for one in points)
    front_of = f"{len(best)} of {pluralize(len(points), 'model')} are on the front: no other is better for its cost"
    said = f"{_ends(points, metric)}; {front_of}."
    more = "" if subnets else " `fedloom subnet` judges sub-nets between them."
    return said[0].upper() + said[1:] + more
