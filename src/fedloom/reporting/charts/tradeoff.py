"""What accuracy costs: tiers and sub-nets by multiply-adds, and the front that no other betters."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes

from ...evaluation.pareto import front
from ..paired_stats import ACCURACY, Metric
from ..report_data import ReportData
from . import drawing
from .drawing import Absent, Chart, Mark, Panel, Record, counted


@dataclass(frozen=True)
class Point:
    arm: str
    model: str
    parameters: int
    macs: int
    value: float
    place: int
    tier: str = ""


def pareto(subject: ReportData) -> Chart | Absent:
    metric, title = subject.metric, f"{subject.metric.name.capitalize()} against multiply-adds"
    points = [*_tiers(subject), *(_subnets(subject) if metric is ACCURACY else ())]
    if not points:
        return Absent(title, "the run does not say what its models cost, or nothing was judged yet")
    best = set(_front(points, metric))
    records: list[Record] = [
        (one.arm, one.model, one.parameters, one.macs, one.value, int((one.macs, one.value) in best)) for one in points
    ]
    names = dict.fromkeys((one.arm if subject.several or not one.tier else one.tier, one.place) for one in points)
    legend = [Mark(name, place, "" if subject.several or name not in subject.tiers else name) for name, place in names]
    alt = f"{counted(len(points), 'model')} by multiply-adds and {metric.name}; {_ends(points, metric)}"
    columns = ("arm", "model", "parameters", "macs", metric.name, "on_front")
    panel = Panel(alt, _drawing(points, metric))
    return Chart("pareto", title, _read(points, best, metric), columns, records, [panel], legend, "points")


def _front(points: Sequence[Point], metric: Metric) -> list[tuple[float, float]]:
    edge = front((float(one.macs), metric.sign * one.value) for one in points)
    return [(macs, metric.sign * value) for macs, value in edge]


def _tiers(subject: ReportData) -> list[Point]:
    found = []
    for number, group in enumerate(subject.groups):
        known = {tier["name"]: tier for tier in group.stories[0].fleet["tiers"] if "macs" in tier}
        for place, tier in enumerate(subject.tiers):
            served = group.arm.serving[tier].tier
            ends = group.arm.ends(tier, subject.test) if any(group.arm.curves(tier, subject.test)) else []
            values = [value for value in ends if not math.isnan(value)]
            if served == tier and values and tier in known:
                one, mean = known[tier], sum(values) / len(values)
                shown = number if subject.several else place
                found.append(Point(group.name, tier, one["parameters"], one["macs"], mean, shown, tier))
    return found


def _subnets(subject: ReportData) -> list[Point]:
    """Judged by `fedloom subnet`, if it was called; on as many examples as most of them were."""
    found = []
    for number, group in enumerate(subject.groups):
        kept = group.stories[0].subnets
        most = max((one["examples"] for one in kept), default=0)
        place = number if subject.several else len(subject.tiers)
        name = group.name if subject.several else "sub-nets"
        for one in kept:
            if one["examples"] == most:
                found.append(Point(name, "sub-net", one["parameters"], one["macs"], one["accuracy"], place))
    return found


def _drawing(points: Sequence[Point], metric: Metric) -> Callable[[Axes], None]:
    def draw(axes: Axes) -> None:
        edge = _front(points, metric)
        x, y = ([point[at] for point in edge] for at in (0, 1))
        axes.plot(x, y, drawstyle="steps-post", color=drawing.INK, linewidth=0.8, alpha=0.6)
        for one in points:
            small = one.model == "sub-net"
            made = axes.plot(
                one.macs, one.value, color=drawing.colour(one.place), linestyle="",
                marker=drawing.marker(one.place), markersize=3.5 if small else 8,
                alpha=0.6 if small else 1.0,
            )  # fmt: skip
            drawing.of_tier(list(made), one.tier)
        axes.set_xscale("log")
        drawing.magnitudes(axes.xaxis)
        drawing.told(axes, "multiply-adds for one example (logarithmic)", metric.axis)

    return draw


def _ends(points: Sequence[Point], metric: Metric) -> str:
    small, large = min(points, key=lambda one: one.macs), max(points, key=lambda one: one.macs)
    return (
        f"the smallest takes {small.macs:,} and gets {metric.said(small.value)}, the largest takes {large.macs:,} and "
        f"gets {metric.said(large.value)}"
    )


def _read(points: Sequence[Point], best: set[tuple[float, float]], metric: Metric) -> str:
    subnets = sum(one.model == "sub-net" for one in points)
    front_of = f"{len(best)} of {counted(len(points), 'model')} are on the front: no other is better for its cost"
    said = f"{_ends(points, metric)}; {front_of}."
    more = "" if subnets else " `fedloom subnet` judges sub-nets between them."
    return said[0].upper() + said[1:] + more
