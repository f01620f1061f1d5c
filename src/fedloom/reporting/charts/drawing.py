"""Panels as SVG that belongs to a page: its colours are the page's, its letters text, its parts known by tier.

A figure of the report before it is drawn: its numbers, one sentence that reads them, and how its panels look.
"""

import csv
import io
import math
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

Cell = str | int | float | None
Record = tuple[Cell, ...]


@dataclass(frozen=True)
class Mark:
    """How a series is told from others: by colour, and by dash and marker for whoever sees no colours."""

    label: str
    place: int  # in the palette, and in the lists of dashes and markers
    tier: str = ""  # the one it belongs to; empty: to all


@dataclass(frozen=True)
class Panel:
    alt: str  # for whoever cannot see it
    draw: Callable[[Axes], None]
    title: str = ""
    tier: str = ""  # the one it belongs to; empty: to all
    size: tuple[float, float] = (6.4, 3.4)  # inches
    left: float = 0.62  # inches for what stands beside the axis


@dataclass(frozen=True)
class Chart:
    key: str  # names its files
    title: str
    sentence: str
    columns: tuple[str, ...]
    records: Sequence[Record]
    panels: Sequence[Panel]
    legend: Sequence[Mark] = field(default_factory=tuple)
    marks: Literal["lines", "points", "areas"] = "lines"

    def csv(self) -> str:
        written = io.StringIO()
        lines = csv.writer(written, lineterminator="\n")
        lines.writerow(self.columns)
        lines.writerows([_plain(cell) for cell in record] for record in self.records)
        return written.getvalue()


@dataclass(frozen=True)
class Absent:
    """A figure that this run has no use for, and why."""

    title: str
    why: str


def _plain(cell: Cell) -> Cell:
    return "" if cell is None or (isinstance(cell, float) and not math.isfinite(cell)) else cell


def size(count: float) -> str:
    """Bytes, for people."""
    for unit in ("B", "kB", "MB"):
        if abs(count) < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"


def beside(names: Sequence[str]) -> float:
    """Inches for names beside an axis."""
    return 0.25 + 0.078 * max(map(len, names))


def listed(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def counted(number: int, word: str) -> str:
    return f"{number:,} {word if number == 1 else word + 's'}"


# Okabe and Ito's colours, which nearly everybody can tell apart; the page has lighter ones of the same hue for the dark
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f6000", "#5d3a9b")
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.2, 1.6)), (0, (5, 1.5, 1.2, 1.5)), (0, (8, 2)))
MARKERS = "osD^v<>*"
SHAPES = (  # the same markers in the middle of a swatch
    "M11 5a3 3 0 1 0 6 0a3 3 0 1 0-6 0z", "M11 2h6v6h-6z", "M14 1l4 4l-4 4l-4-4z", "M14 1.5l3.5 6.5h-7z",
    "M14 8.5l-3.5-6.5h7z", "M10.5 5l6-3.5v7z", "M17.5 5l-6-3.5v7z",
    "M14 1l1.2 2.8l3 .2l-2.3 2l.8 3l-2.7-1.6l-2.7 1.6l.8-3l-2.3-2l3-.2z",
)  # fmt: skip
INK, GRID = "#111111", "#d0d0d0"
STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "fedloom",  # the same page from the same run
    "font.size": 9,
    "axes.edgecolor": INK, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK, "text.color": INK,
    "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": True, "axes.axisbelow": True, "grid.color": GRID, "grid.linewidth": 0.6,
}  # fmt: skip
NAMES = {INK: "--ink", GRID: "--grid"} | {colour: f"--c{place}" for place, colour in enumerate(PALETTE)}


BELOW, RIGHT, ABOVE = 0.5, 0.14, 0.1  # inches around the axes


def drawn(panel: Panel, prefix: str) -> str:
    """One panel; `prefix` keeps its names apart from those of other panels on the page. Margins are known before: to
    measure them takes as long as to draw."""
    wide, high = panel.size
    figure = Figure(figsize=panel.size)
    FigureCanvasSVG(figure)
    box = (panel.left / wide, BELOW / high, 1 - (panel.left + RIGHT) / wide, 1 - (BELOW + ABOVE) / high)
    panel.draw(figure.add_axes(box))
    written = io.StringIO()
    figure.savefig(written, format="svg", transparent=True, metadata={"Date": None})
    return _adopted(written.getvalue(), panel, prefix)


def styled() -> AbstractContextManager[None]:
    return matplotlib.rc_context(STYLE)


def _adopted(svg: str, panel: Panel, prefix: str) -> str:
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="tier:([^"]+)"', r'<g data-tier="\1"', svg)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{prefix}-\1"', svg)
    svg = re.sub(r"url\(#([^)]+)\)", rf"url(#{prefix}-\1)", svg)
    svg = re.sub(r'xlink:href="#([^"]+)"', rf'href="#{prefix}-\1"', svg)
    svg = svg.replace("xlink:href", "href")
    for colour, name in NAMES.items():
        svg = svg.replace(colour, f"var({name})")
    svg = re.sub(r"font: ([\d.]+px) [^;\"]+", r"font: \1 var(--font)", svg)
    svg = re.sub(r">\s+<", "><", svg)
    width, height = re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)[0]
    most = f'style="max-width:{1.35 * float(width):.0f}pt"'  # small ones stay small
    head = f'<svg viewBox="0 0 {width} {height}" role="img" aria-labelledby="{prefix}-alt" {most}>'
    return re.sub(r"<svg[^>]*>", f'{head}<title id="{prefix}-alt">{_escaped(panel.alt)}</title>', svg, count=1).strip()


def swatch(place: int, kind: str) -> str:
    """What a series looks like, for a legend."""
    hue = f"var(--c{place % len(PALETTE)})"
    if kind == "areas":
        shown = f'<rect width="28" height="10" rx="2" fill="{hue}"/>'
    else:
        shown = f'<path d="{SHAPES[place % len(SHAPES)]}" fill="{hue}"/>'
    if kind == "lines":
        gaps = "" if dash(place) == "-" else " ".join(f"{1.6 * one:g}" for one in dash(place)[1])
        shown += f'<path d="M0 5H28" stroke="{hue}" stroke-width="2" stroke-dasharray="{gaps or "none"}"/>'
    return f'<svg class="swatch" viewBox="0 0 28 10" aria-hidden="true" focusable="false">{shown}</svg>'


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def of_tier(artists: Any, tier: str) -> None:
    """The page hides these when another tier is looked at."""
    for artist in artists if isinstance(artists, list | tuple) else [artists]:
        if tier:
            artist.set_gid(f"tier:{tier}")


def colour(place: int) -> str:
    return PALETTE[place % len(PALETTE)]


def dash(place: int) -> Any:
    return DASHES[place % len(DASHES)]


def marker(place: int) -> str:
    return MARKERS[place % len(MARKERS)]


def line(axes: Axes, x: Sequence[float], y: Sequence[float], place: int, tier: str = "") -> None:
    few = len(x) <= 30
    (made,) = axes.plot(
        x, y, color=colour(place), linestyle=dash(place), linewidth=1.6,
        marker=marker(place) if few else None, markersize=4,
    )  # fmt: skip
    of_tier(made, tier)


def band(
    axes: Axes, x: Sequence[float], low: Sequence[float], high: Sequence[float], place: int, tier: str = ""
) -> None:
    of_tier(axes.fill_between(x, low, high, color=colour(place), alpha=0.18, linewidth=0), tier)


def cells(axes: Axes, shades: Any, places: Any, columns: Sequence[str], rows: Sequence[str]) -> None:
    """A map of cells: each in the palette's colour of its place, as strong as its shade from 0 to 1."""
    hues = np.array([[int(colour[at : at + 2], 16) for at in (1, 3, 5)] for colour in PALETTE], dtype=np.uint8)
    shade, place = np.asarray(shades, dtype=float), np.asarray(places, dtype=int)
    image = np.dstack([hues[place % len(PALETTE)], (255 * np.nan_to_num(shade).clip(0, 1)).astype(np.uint8)])
    axes.imshow(image, aspect="auto", interpolation="none", origin="upper")
    axes.grid(False)
    _some_ticks(axes, columns, "x")
    _some_ticks(axes, rows, "y")


def _some_ticks(axes: Axes, names: Sequence[str], which: str) -> None:
    step = max(1, -(-len(names) // (16 if which == "x" else 20)))
    shown = list(range(0, len(names), step))
    (axes.set_xticks if which == "x" else axes.set_yticks)(shown, [names[at] for at in shown])


def whole(axis: Axis) -> None:
    """There is no half of what it counts."""
    axis.set_major_locator(MaxNLocator(integer=True, nbins=8))


def from_zero(axes: Axes) -> None:
    axes.set_ylim(0, 1.08 * axes.dataLim.ymax or 1.0)


def magnitudes(axis: Axis) -> None:
    """A logarithmic axis that reads 2k, 5k, 10k; or only the powers, where there are many."""
    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 1000 * low else (1,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: _short(value)))
    axis.set_minor_locator(NullLocator())


def _short(value: float) -> str:
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:g}{unit}"
    return f"{value:g}"


def told(axes: Axes, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
