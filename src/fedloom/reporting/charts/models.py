"""The models themselves: accuracy against multiply-adds with its Pareto front, and linear CKA between tiers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...evaluation.metrics import UndeclaredDirection, pareto_front
from ...wording import format_amount, pluralize
from ..paired_stats import ACCURACY, ComparedMetric
from ..report_data import ReportData
from .drawing import (
    INK,
    WIDE,
    Axis,
    Cells,
    Chart,
    ChartRow,
    Dot,
    Key,
    Line,
    Look,
    MarkKind,
    MissingChart,
    Panel,
    row_height,
)
from .looks import arm_look, series_look

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
    look: Look


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
    looks = {point.arm if several or point.model == SUBNET else point.model: point.look for point in points}
    legend = [Key(name, replace(look, tier="") if several else look, "point") for name, look in looks.items()]
    alt = f"{pluralize(len(points), 'model')} by multiply-adds and {metric.name}; {_extremes(points, metric)}"
    columns = ("arm", "model", "parameters", "macs", metric.name, "on_front")
    x = Axis("multiply-adds for one example (logarithmic)", log=True)
    panel = Panel(alt, _point_marks(points, metric), x, Axis(metric.axis_label))
    sentence, note = _pareto_sentence(points, best, metric), "Line: the best value within each budget of multiply-adds."
    return Chart("pareto", title, sentence, columns, records, [panel], legend, note)


def _front(points: Sequence[CostPoint], metric: ComparedMetric) -> list[tuple[float, float]]:
    edge = pareto_front((float(point.macs), metric.sign * point.value) for point in points)
    return [(macs, metric.sign * value) for macs, value in edge]


def _tier_points(report: ReportData) -> list[CostPoint]:
    points = []
    for group in report.groups:
        costs = {tier["name"]: tier for tier in group.readers[0].fleet["tiers"] if "macs" in tier}
        for tier in report.tiers:
            values = [value for value in group.arm.final_values(tier, report.test) if not math.isnan(value)]
            if group.arm.serving[tier].tier == tier and values and tier in costs:
                cost, mean = costs[tier], sum(values) / len(values)
                look = series_look(report, group.name, tier)
                points.append(CostPoint(group.name, tier, cost["parameters"], cost["macs"], mean, look))
    return points


def _subnet_points(report: ReportData) -> list[CostPoint]:
    """Subnets evaluated by `fedloom subnet`, on the most examples that any were."""
    points = []
    for group in report.groups:
        subnets = group.readers[0].subnets
        examples = max((subnet["examples"] for subnet in subnets), default=0)
        look = arm_look(report, group.name) if report.has_several_arms else Look("--soft")
        name = group.name if report.has_several_arms else "subnets"
        for subnet in subnets:
            if subnet["examples"] == examples:
                costs = subnet["parameters"], subnet["macs"]
                points.append(CostPoint(name, SUBNET, *costs, subnet["accuracy"], look))
    return points


def _point_marks(points: Sequence[CostPoint], metric: ComparedMetric) -> list[MarkKind]:
    edge = _front(points, metric)
    marks: list[MarkKind] = [Line("", [x for x, _ in edge], [y for _, y in edge], INK, step=True)]
    for point in points:
        small = point.model == SUBNET
        tip = f"{point.arm} {point.model}: {metric.format(point.value)}, {format_amount(point.macs)} multiply-adds"
        size, opacity = (2.5, 0.6) if small else (6.0, 1.0)
        marks.append(Dot(point.macs, point.value, point.look, tip, size=size, opacity=opacity))
    return marks


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
    shades = [[0.6 * (value or 0.0) for value in line] for pair in maps for line in pair["cka"]]
    values = [["–" if value is None else f"{value:.2f}" for value in line] for pair in maps for line in pair["cka"]]
    alt = f"Map of linear CKA: layers of every tier against those of {against}; darker is more similar"
    cells = Cells(shades, values, rows, columns, written=len(rows) * len(columns) <= 120)
    return Panel(alt, [cells], Axis(f"layer of {against}"), width=WIDE, height=row_height(len(rows)))


def _cka_sentence(maps: list[dict[str, Any]]) -> str:
    last_values = [(pair["tier"], pair["cka"][-1][-1]) for pair in maps if pair["tier"] != pair["against"]]
    known = [(tier, value) for tier, value in last_values if value is not None]
    against, last = maps[0]["against"], maps[0]["layers_against"][-1]
    if not known:
        return f"There is no other tier to compare with {against}; its layers are compared with each other."
    values = ", ".join(f"{tier} {value:.2f}" for tier, value in known)
    return f"Similarity to {against} in the last layer ({last}), where 1 means identical: {values}."
