"""Charts as data (numbers, one sentence, panels), and panels rendered as inline SVG in the colors of the page.

Text stays text, and elements carry the name of their tier, so that the page can hide the other tiers.
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

MAX_COLUMN_LABELS, MAX_ROW_LABELS = 16, 20  # of a heatmap
MAX_LABELS_LENGTH = 80  # characters that fit side by side below a chart
MAX_LEVEL_LABEL = 10  # of one name; a longer one would stick out at the ends
MAX_LABEL = 18  # of one name, where it is slanted

CellValue = str | int | float | None
ChartRow = tuple[CellValue, ...]


@dataclass(frozen=True)
class Mark:
    """The look of a series: its color, and a dash and marker for readers who cannot tell colors apart."""

    label: str
    index: int  # into the palette, the dashes and the markers
    tier: str = ""  # empty: belongs to all tiers


@dataclass(frozen=True)
class Panel:
    alt: str  # text alternative
    draw: Callable[[Axes], None]
    title: str = ""
    tier: str = ""  # empty: belongs to all tiers
    size: tuple[float, float] = (6.4, 3.4)  # inches
    left: float = 0.62  # inches for the labels of the y axis
    labels: float = 0.0  # further inches for long labels of the x axis


@dataclass(frozen=True)
class Chart:
    key: str  # the name of its CSV file
    title: str
    sentence: str
    columns: tuple[str, ...]
    records: Sequence[ChartRow]
    panels: Sequence[Panel]
    legend: Sequence[Mark] = field(default_factory=tuple)
    marks: Literal["lines", "points", "areas"] = "lines"

    def csv(self) -> str:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(self.columns)
        writer.writerows([_plain(cell) for cell in record] for record in self.records)
        return text.getvalue()


@dataclass(frozen=True)
class MissingChart:
    """A chart that does not apply to this run."""

    title: str
    reason: str


def _plain(cell: CellValue) -> CellValue:
    if cell is None or (isinstance(cell, float) and not math.isfinite(cell)):
        return ""
    return int(cell) if isinstance(cell, bool) else cell


def label_width(names: Sequence[str]) -> float:
    """Inches that names take beside the y axis."""
    return 0.25 + 0.078 * max(map(len, names))


# Okabe and Ito's colors, which suit color-blind readers; the page has lighter ones of the same hue for the dark
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f6000", "#5d3a9b")
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.2, 1.6)), (0, (5, 1.5, 1.2, 1.5)), (0, (8, 2)))
MARKERS = "osD^v<>*"
SHAPES = (  # the same markers as SVG paths for the legend
    "M11 5a3 3 0 1 0 6 0a3 3 0 1 0-6 0z", "M11 2h6v6h-6z", "M14 1l4 4l-4 4l-4-4z", "M14 1.5l3.5 6.5h-7z",
    "M14 8.5l-3.5-6.5h7z", "M10.5 5l6-3.5v7z", "M17.5 5l-6-3.5v7z",
    "M14 1l1.2 2.8l3 .2l-2.3 2l.8 3l-2.7-1.6l-2.7 1.6l.8-3l-2.3-2l3-.2z",
)  # fmt: skip
INK, GRID = "#111111", "#d0d0d0"
STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "fedloom",  # makes the SVG deterministic
    "font.size": 9,
    "axes.edgecolor": INK, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK, "text.color": INK,
    "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": True, "axes.axisbelow": True, "grid.color": GRID, "grid.linewidth": 0.6,
}  # fmt: skip
CSS_VARIABLES = {INK: "--ink", GRID: "--grid"} | {color: f"--c{index}" for index, color in enumerate(PALETTE)}
BELOW, RIGHT, ABOVE = 0.5, 0.14, 0.1  # inches around the axes


def render_svg(panel: Panel, prefix: str) -> str:
    """Render a panel; `prefix` makes its ids unique on the page. Margins are fixed, as measuring them is slow."""
    wide, high = panel.size[0], panel.size[1] + panel.labels
    figure = Figure(figsize=(wide, high))
    FigureCanvasSVG(figure)
    below = BELOW + panel.labels
    box = (panel.left / wide, below / high, 1 - (panel.left + RIGHT) / wide, 1 - (below + ABOVE) / high)
    panel.draw(figure.add_axes(box))
    svg = io.StringIO()
    figure.savefig(svg, format="svg", transparent=True, metadata={"Date": None})
    return _inline_svg(svg.getvalue(), panel, prefix)


def chart_style() -> AbstractContextManager[None]:
    return matplotlib.rc_context(STYLE)


def _inline_svg(svg: str, panel: Panel, prefix: str) -> str:
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="tier:([^"]+)"', r'<g data-tier="\1"', svg)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{prefix}-\1"', svg)
    svg = re.sub(r"url\(#([^)]+)\)", rf"url(#{prefix}-\1)", svg)
    svg = re.sub(r'xlink:href="#([^"]+)"', rf'href="#{prefix}-\1"', svg)
    svg = svg.replace("xlink:href", "href")
    for color, name in CSS_VARIABLES.items():
        svg = svg.replace(color, f"var({name})")
    svg = re.sub(r"font: ([\d.]+px) [^;\"]+", r"font: \1 var(--font)", svg)
    svg = re.sub(r">\s+<", "><", svg)
    width, height = re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)[0]
    most = f'style="max-width:{1.35 * float(width):.0f}pt"'  # keeps small panels small
    head = f'<svg viewBox="0 0 {width} {height}" role="img" aria-labelledby="{prefix}-alt" {most}>'
    return re.sub(r"<svg[^>]*>", f'{head}<title id="{prefix}-alt">{_escape(panel.alt)}</title>', svg, count=1).strip()


def swatch(index: int, kind: str) -> str:
    """The legend's sample of a series."""
    hue = f"var(--c{index % len(PALETTE)})"
    if kind == "areas":
        shown = f'<rect width="28" height="10" rx="2" fill="{hue}"/>'
    else:
        shown = f'<path d="{SHAPES[index % len(SHAPES)]}" fill="{hue}"/>'
    if kind == "lines":
        gaps = "" if dash(index) == "-" else " ".join(f"{1.6 * length:g}" for length in dash(index)[1])
        shown += f'<path d="M0 5H28" stroke="{hue}" stroke-width="2" stroke-dasharray="{gaps or "none"}"/>'
    return f'<svg class="swatch" viewBox="0 0 28 10" aria-hidden="true" focusable="false">{shown}</svg>'


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def tag_tier(artists: Any, tier: str) -> None:
    """Mark artists as belonging to a tier; the page hides them when another tier is selected."""
    for artist in artists if isinstance(artists, list | tuple) else [artists]:
        if tier:
            artist.set_gid(f"tier:{tier}")


def color(index: int) -> str:
    return PALETTE[index % len(PALETTE)]


def dash(index: int) -> Any:
    return DASHES[index % len(DASHES)]


def marker(index: int) -> str:
    return MARKERS[index % len(MARKERS)]


def draw_line(axes: Axes, x: Sequence[float], y: Sequence[float], index: int, tier: str = "") -> None:
    (drawn,) = axes.plot(
        x, y, color=color(index), linestyle=dash(index), linewidth=1.6,
        marker=marker(index) if len(x) <= 30 else None, markersize=4,
    )  # fmt: skip
    tag_tier(drawn, tier)


def draw_band(
    axes: Axes, x: Sequence[float], low: Sequence[float], high: Sequence[float], index: int, tier: str = ""
) -> None:
    tag_tier(axes.fill_between(x, low, high, color=color(index), alpha=0.18, linewidth=0), tier)


def draw_heatmap(
    axes: Axes, opacities: Any, indices: Any, columns: Sequence[str], rows: Sequence[str], slant: bool = False
) -> None:
    """Draw cells in the palette's color of their index, with an opacity from 0 to 1; `slant`: long column names."""
    hues = np.array([[int(color[at : at + 2], 16) for at in (1, 3, 5)] for color in PALETTE], dtype=np.uint8)
    opacity, index = np.asarray(opacities, dtype=float), np.asarray(indices, dtype=int)
    image = np.dstack([hues[index % len(PALETTE)], (255 * np.nan_to_num(opacity).clip(0, 1)).astype(np.uint8)])
    axes.imshow(image, aspect="auto", interpolation="none", origin="upper")
    axes.grid(False)
    shown, labels = _sparse(columns, MAX_COLUMN_LABELS)
    axes.set_xticks(shown, labels, **(slanted(labels) if slant else {}))
    axes.set_yticks(*_sparse(rows, MAX_ROW_LABELS))


def heatmap_labels_height(columns: Sequence[str]) -> float:
    """The further inches that slanted column names of a heatmap need."""
    return slanted_height(_sparse(columns, MAX_COLUMN_LABELS)[1])


def _sparse(names: Sequence[str], most: int) -> tuple[list[int], list[str]]:
    """Every so many of the names, with their places."""
    shown = list(range(0, len(names), max(1, -(-len(names) // most))))
    return shown, [names[at] for at in shown]


def slanted(labels: Sequence[str]) -> dict[str, Any]:
    """Settings of labels below an axis: slanted if they are too long to stand side by side."""
    return {"rotation": 60, "ha": "right", "rotation_mode": "anchor"} if _are_long(labels) else {}


def slanted_height(labels: Sequence[str]) -> float:
    """The further inches that such labels need."""
    return 0.065 * max(map(len, labels)) - 0.1 if _are_long(labels) else 0.0


def shorten(names: Sequence[str]) -> list[str]:
    """Names that fit as labels."""
    return [name if len(name) <= MAX_LABEL else f"{name[: MAX_LABEL - 1]}…" for name in names]


def _are_long(labels: Sequence[str]) -> bool:
    lengths = [len(label) for label in labels]
    return max(lengths, default=0) > MAX_LEVEL_LABEL or sum(lengths) + 2 * len(lengths) > MAX_LABELS_LENGTH


def use_integer_ticks(axis: Axis) -> None:
    axis.set_major_locator(MaxNLocator(integer=True, nbins=8))


def start_at_zero(axes: Axes) -> None:
    axes.set_ylim(0, 1.08 * axes.dataLim.ymax or 1.0)


def use_log_ticks(axis: Axis) -> None:
    """Label a logarithmic axis 2k, 5k, 10k; over many magnitudes only the powers of ten."""
    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 1000 * low else (1,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: _format_magnitude(value)))
    axis.set_minor_locator(NullLocator())


def _format_magnitude(value: float) -> str:
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:g}{unit}"
    return f"{value:g}"


def set_labels(axes: Axes, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
