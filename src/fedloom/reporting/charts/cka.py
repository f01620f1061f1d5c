"""How alike the tiers' models see the same examples, layer by layer: linear CKA."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes

from ..report_data import ReportData
from . import drawing
from .drawing import MissingChart, Chart, Panel, ChartRow, label_width

TITLE = "How alike the models see (CKA)"
COLUMNS = ("tier", "layer", "against_tier", "against_layer", "cka")


def build_cka_chart(report: ReportData) -> Chart | MissingChart:
    found = report.first.cka
    if not found:
        why = "the run goes on" if report.first.is_running else "no model of the largest tier is here to be looked at"
        return MissingChart(TITLE, why)
    records: list[ChartRow] = [
        (one["tier"], layer, one["against"], other, value)
        for one in found
        for layer, line in zip(one["layers"], one["cka"], strict=True)
        for other, value in zip(one["layers_against"], line, strict=True)
    ]
    return Chart("cka", TITLE, _read(found), COLUMNS, records, [_panel(found)])


def _panel(found: list[dict[str, Any]]) -> Panel:
    """The largest tier's layers against those of all tiers, one below the other."""
    against, columns = found[0]["against"], found[0]["layers_against"]
    rows = [f"{one['tier']} {layer}" for one in found for layer in one["layers"]]
    values = np.array([line for one in found for line in one["cka"]], dtype=float)

    def draw(axes: Axes) -> None:
        drawing.draw_heatmap(axes, 0.6 * values, np.zeros(values.shape), columns, rows)
        if values.size <= 120:
            for (row, column), value in np.ndenumerate(values):
                axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=8)
        drawing.set_labels(axes, f"layer of {against}", "")
        axes.tick_params(axis="x", rotation=30 if len(columns) > 4 else 0)

    alt = f"Map of linear CKA: layers of every tier against those of {against}; darker is more alike"
    left = label_width(rows)
    wide, high = min(6.4, left + 0.4 + 0.6 * len(columns)), min(7.0, 0.8 + 0.26 * len(rows))
    return Panel(alt, draw, size=(wide, high), left=left)


def _read(found: list[dict[str, Any]]) -> str:
    ends = [(one["tier"], one["cka"][-1][-1]) for one in found if one["tier"] != one["against"]]
    known = [(tier, value) for tier, value in ends if value is not None]
    against, last = found[0]["against"], found[0]["layers_against"][-1]
    if not known:
        return f"There is no other tier to set beside {against}; within it, layers are compared with each other."
    said = ", ".join(f"{tier} {value:.2f}" for tier, value in known)
    return f"In the last layer ({last}) the models see as {against} does to this degree, 1 being the same: {said}."
