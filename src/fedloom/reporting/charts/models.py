"""The models themselves: accuracy against multiply-adds with its Pareto front, and linear CKA between tiers."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from ...evaluation.metrics import UndeclaredDirection, pareto_front
from ...wording import pluralize
from ..paired_stats import ACCURACY, ComparedMetric
from ..report_data import ReportData
from . import drawing
from .drawing import Chart, ChartRow, Mark, MissingChart, Panel, label_width

SUBNET = "subnet"
CKA_TITLE = "Similarity of the tiers' models (CKA)"
CKA_COLUMNS = ("tier", "layer", "against_tier", "against_layer", "cka")


@dataclass(frozen=True)
class CostPoint:
    arm: str
    model: str
    parameters: int
    macs: int
    value: float
    index: int  # of its color
    tier: str = ""


def build_pareto_chart(report: ReportData) -> Chart | MissingChart:
    metric, title = report.metric, f"{report.metric.title} against multiply-adds"
    if not metric.is_directed:
        return MissingChart(title, str(UndeclaredDirection(metric.name)))
    points = [*_tier_points(report), *(_subnet_points(report) if metric == ACCURACY else ())]
    if not points:
        return MissingChart(title, "costs of the models are unknown, or nothing has been evaluated yet")
    best = set(_front(points, metric))
    records: list[ChartRow] = [
        (point.arm, point.model, point.parameters, point.macs, point.value, int((point.macs, point.value) in best))
        for point in points
    ]
    several = report.has_several_arms
    names = dict.fromkeys((point.arm if several or not point.tier else point.tier, point.index) for point in points)
    legend = [Mark(name, index, "" if several or name not in report.tiers else name) for name, index in names]
    alt = f"{pluralize(len(points), 'model')} by multiply-adds and {metric.name}; {_extremes(points, metric)}"
    columns = ("arm", "model", "parameters", "macs", metric.name, "on_front")
    panel = Panel(alt, _draw_points(points, metric))
    return Chart("pareto", title, _pareto_sentence(points, best, metric), columns, records, [panel], legend, "points")


def _front(points: Sequence[CostPoint], metric: ComparedMetric) -> list[tuple[float, float]]:
    edge = pareto_front((float(point.macs), metric.sign * point.value) for point in points)
    return [(macs, metric.sign * value) for macs, value in edge]


def _tier_points(report: ReportData) -> list[CostPoint]:
    points = []
    for number, group in enumerate(report.groups):
        costs = {tier["name"]: tier for tier in group.readers[0].fleet["tiers"] if "macs" in tier}
        for index, tier in enumerate(report.tiers):
            values = [value for value in group.arm.final_values(tier, report.test) if not math.isnan(value)]
            if group.arm.serving[tier].tier == tier and values and tier in costs:
                cost, mean = costs[tier], sum(values) / len(values)
                color = number if report.has_several_arms else index
                points.append(CostPoint(group.name, tier, cost["parameters"], cost["macs"], mean, color, tier))
    return points


def _subnet_points(report: ReportData) -> list[CostPoint]:
    """Subnets evaluated by `fedloom subnet`, on the most examples that any were."""
    points = []
    for number, group in enumerate(report.groups):
        subnets = group.readers[0].subnets
        examples = max((subnet["examples"] for subnet in subnets), default=0)
        index = number if report.has_several_arms else len(report.tiers)
        name = group.name if report.has_several_arms else "subnets"
        for subnet in subnets:
            if subnet["examples"] == examples:
                costs = subnet["parameters"], subnet["macs"]
                points.append(CostPoint(name, SUBNET, *costs, subnet["accuracy"], index))
    return points


def _draw_points(points: Sequence[CostPoint], metric: ComparedMetric) -> Callable[[Axes], None]:
    def draw(axes: Axes) -> None:
        edge = _front(points, metric)
        x, y = ([point[axis] for point in edge] for axis in (0, 1))
        axes.plot(x, y, drawstyle="steps-post", color=drawing.INK, linewidth=0.8, alpha=0.6)
        for point in points:
            small = point.model == SUBNET
            artists = axes.plot(
                point.macs, point.value, color=drawing.color(point.index), linestyle="",
                marker=drawing.marker(point.index), markersize=3.5 if small else 8, alpha=0.6 if small else 1.0,
            )  # fmt: skip
            drawing.tag_tier(list(artists), point.tier)
        axes.set_xscale("log")
        drawing.use_log_ticks(axes.xaxis)
        drawing.set_labels(axes, "multiply-adds for one example (logarithmic)", metric.axis_label)

    return draw


def _extremes(points: Sequence[CostPoint], metric: ComparedMetric) -> str:
    small, large = min(points, key=lambda point: point.macs), max(points, key=lambda point: point.macs)
    return (
        f"the smallest takes {small.macs:,} and reaches {metric.format(small.value)}, the largest takes "
        f"{large.macs:,} and reaches {metric.format(large.value)}"
    )


def _pareto_sentence(points: Sequence[CostPoint], best: set[tuple[float, float]], metric: ComparedMetric) -> str:
    on_front = f"{len(best)} of {pluralize(len(points), 'model')} are on the Pareto front"
    sentence = f"{_extremes(points, metric)}; {on_front}."
    has_subnets = any(point.model == SUBNET for point in points)
    hint = "" if has_subnets else " `fedloom subnet` evaluates subnets between them."
    return sentence[0].upper() + sentence[1:] + hint


def build_cka_chart(report: ReportData) -> Chart | MissingChart:
    maps = report.first.cka
    if not maps:
        running = report.first.is_running
        reason = "it is computed at the end of the run" if running else "no model of the largest tier is available"
        return MissingChart(CKA_TITLE, reason)
    records: list[ChartRow] = [
        (pair["tier"], layer, pair["against"], other, value)
        for pair in maps
        for layer, values in zip(pair["layers"], pair["cka"], strict=True)
        for other, value in zip(pair["layers_against"], values, strict=True)
    ]
    return Chart("cka", CKA_TITLE, _cka_sentence(maps), CKA_COLUMNS, records, [_cka_panel(maps)])


def _cka_panel(maps: list[dict[str, Any]]) -> Panel:
    """The layers of all tiers, one below the other, against those of the largest tier."""
    against, columns = maps[0]["against"], maps[0]["layers_against"]
    rows = [f"{pair['tier']} {layer}" for pair in maps for layer in pair["layers"]]
    values = np.array([line for pair in maps for line in pair["cka"]], dtype=float)

    def draw(axes: Axes) -> None:
        drawing.draw_heatmap(axes, 0.6 * values, np.zeros(values.shape), columns, rows)
        if values.size <= 120:
            for (row, column), value in np.ndenumerate(values):
                axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=8)
        drawing.set_labels(axes, f"layer of {against}", "")
        axes.tick_params(axis="x", rotation=30 if len(columns) > 4 else 0)

    alt = f"Map of linear CKA: layers of every tier against those of {against}; darker is more similar"
    left = label_width(rows)
    wide, high = min(6.4, left + 0.4 + 0.6 * len(columns)), min(7.0, 0.8 + 0.26 * len(rows))
    return Panel(alt, draw, size=(wide, high), left=left)


def _cka_sentence(maps: list[dict[str, Any]]) -> str:
    last_values = [(pair["tier"], pair["cka"][-1][-1]) for pair in maps if pair["tier"] != pair["against"]]
    known = [(tier, value) for tier, value in last_values if value is not None]
    against, last = maps[0]["against"], maps[0]["layers_against"][-1]
    if not known:
        return f"There is no other tier to compare with {against}; its layers are compared with each other."
    values = ", ".join(f"{tier} {value:.2f}" for tier, value in known)
    return f"Similarity to {against} in the last layer ({last}), where 1 means identical: {values}."
