"""Charts as data: numbers, one sentence, and panels of marks, drawn as inline SVG in the colors of the page.

Text stays text, sizes are in pixels, and every mark carries its arm, its tier and the value it shows, so that the page
can hide arms and tiers and show values without drawing anything again.
"""

import csv
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from markupsafe import escape

from ...wording import format_magnitude

CellValue = str | int | float | None
ChartRow = tuple[CellValue, ...]

WIDE, NARROW = 480, 400  # pixels: a panel alone, and one of several
HEIGHT = 250
CHARACTER, LINE_HEIGHT = 6.9, 14  # pixels: mean width of a letter of a label, lines
ABOVE, BELOW, BESIDE = 10, 40, 12  # pixels around the axes
ROW = 22  # pixels of a row with a name
MAX_LABEL = 18  # characters of a name below an axis
MAX_COLUMN_LABELS, MAX_ROW_LABELS = 16, 24  # of a map
MAX_MARKED_POINTS = 30  # on a line
MAX_CELLS_WITH_VALUE = 700  # of a map; beyond, cells of equal shade are one path
SHADES = 8


@dataclass(frozen=True)
class Look:
    """How a series looks: a color of the page, and a dash and a marker for readers who cannot tell colors apart."""

    color: str  # the name of a CSS variable
    dash: str = ""
    marker: int = 0
    arm: str = ""  # whose mark it is; empty: of all
    tier: str = ""


@dataclass(frozen=True)
class Line:
    """A curve; `low` and `high` draw a band around it."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    look: Look
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    step: bool = False
    labeled: bool = True  # at its end
    end: str = ""  # what its label says besides its name
    format: Callable[[float], str] = "{:.4g}".format


@dataclass(frozen=True)
class Dot:
    """A point, maybe hollow, maybe with a whisker along x, and text beside it."""

    x: float
    y: float
    look: Look
    tip: str = ""
    spread: float = 0.0
    hollow: bool = False
    size: float = 4.5
    text: str = ""
    opacity: float = 1.0


@dataclass(frozen=True)
class Bar:
    """A rectangle from (x0, y0) to (x1, y1) in the units of the axes."""

    x0: float
    x1: float
    y0: float
    y1: float
    look: Look
    tip: str = ""
    text: str = ""
    opacity: float = 1.0


@dataclass(frozen=True)
class ReferenceLine:
    """A line across the panel at a value of the x or the y axis."""

    value: float
    look: Look
    label: str = ""
    across: Literal["x", "y"] = "x"
    tip: str = ""


@dataclass(frozen=True)
class Cells:
    """A map: a shade from 0 to 1 for each row and column; `values` are shown on hover, and inside if `written`."""

    shades: Sequence[Sequence[float]]
    values: Sequence[Sequence[str]]
    rows: Sequence[str]
    columns: Sequence[str]
    colors: Sequence[Sequence[str]] | None = None  # CSS variables; None: the one of amounts
    written: bool = False


MarkKind = Line | Dot | Bar | ReferenceLine | Cells


@dataclass(frozen=True)
class Axis:
    """An axis: numbers, logarithms or names."""

    label: str = ""
    names: Sequence[str] = ()  # row or column 0, 1, 2 … if it has names
    log: bool = False
    integer: bool = False
    from_zero: bool = False
    low: float | None = None
    high: float | None = None
    is_round: bool = False  # rounds of training, which the page lets a reader narrow down


@dataclass(frozen=True)
class Panel:
    alt: str  # text alternative
    marks: Sequence[MarkKind]
    x: Axis = field(default_factory=Axis)
    y: Axis = field(default_factory=Axis)
    title: str = ""
    tier: str = ""  # empty: belongs to all tiers
    width: int = WIDE
    height: int = HEIGHT
    arm: str = ""  # empty: belongs to all arms


@dataclass(frozen=True)
class Key:
    """An entry of a legend, where marks cannot be labeled directly."""

    label: str
    look: Look
    kind: Literal["line", "point", "area"] = "area"


@dataclass(frozen=True)
class Chart:
    key: str  # the name of its CSV file
    title: str
    sentence: str
    columns: tuple[str, ...]
    records: Sequence[ChartRow]
    panels: Sequence[Panel]
    legend: Sequence[Key] = field(default_factory=tuple)
    note: str = ""  # how to read it

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


INK = Look("--ink")
AMOUNT = "--amount"  # the color of maps of amounts


def row_height(rows: int, each: int = ROW, least: int = 60) -> int:
    """The height of a panel with so many rows."""
    return max(least, ABOVE + BELOW + rows * each)


def shorten(names: Sequence[str], most: int = MAX_LABEL) -> list[str]:
    """Names that fit as labels."""
    return [name if len(name) <= most else f"{name[: most - 1]}…" for name in names]


# --- scales


@dataclass(frozen=True)
class Scale:
    """From values to pixels."""

    low: float
    high: float
    start: float  # pixels
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, at = (math.log(max(one, 1e-12)) if self.log else one for one in (self.low, self.high, value))
        return self.start + (self.end - self.start) * (at - low) / (high - low)


def nice_ticks(low: float, high: float, most: int = 6, integer: bool = False) -> list[float]:
    """Round numbers from `low` to `high`, at most so many."""
    if not high > low:
        return [low]
    magnitude = 10.0 ** math.floor(math.log10((high - low) / most))
    steps = [factor * magnitude for factor in (1, 2, 5, 10, 20)]
    step = next((one for one in steps if (high - low) / one <= most and (not integer or one >= 1)), steps[-1])
    step = max(1.0, round(step)) if integer else step
    first = math.ceil(low / step - 1e-9)
    return [round(step * number, 12) for number in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """2k, 5k, 10k; over many magnitudes only powers of ten."""
    factors = (1, 2, 5) if high < 1000 * low else (1,)
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [tick for at in exponents for factor in factors if low <= (tick := factor * 10.0**at) <= high * 1.0001]


def _tick_text(value: float, axis: Axis) -> str:
    return format_magnitude(value) if axis.log or abs(value) >= 10_000 else f"{value:g}"


def _values(marks: Sequence[MarkKind], of: Literal["x", "y"]) -> list[float]:
    found: list[float] = []
    for mark in marks:
        match mark:
            case Line():
                found += [*mark.x] if of == "x" else [*mark.y, *mark.low, *mark.high]
            case Dot():
                found += [mark.x - mark.spread, mark.x + mark.spread] if of == "x" else [mark.y]
            case Bar():
                found += [mark.x0, mark.x1] if of == "x" else [mark.y0, mark.y1]
            case ReferenceLine():
                found += [mark.value] if mark.across == of else []
            case Cells():
                pass
    return [value for value in found if math.isfinite(value)]


def _extent(axis: Axis, marks: Sequence[MarkKind], of: Literal["x", "y"]) -> tuple[float, float]:
    """The lowest and the highest value of an axis, with some room around the marks."""
    if axis.names:
        return -0.5, len(axis.names) - 0.5
    values = [value for value in _values(marks, of) if value > 0 or not axis.log] or [1.0, 2.0]
    low, high = min(values), max(values)
    if axis.log:
        return (axis.low or low / 1.3, axis.high or high * 1.3)
    room = 0.0 if axis.is_round else 0.06 * (high - low) or 0.5
    low = 0.0 if axis.from_zero else low - room
    low, high = (low if axis.low is None else axis.low), (high + room if axis.high is None else axis.high)
    return (low, high) if high > low else (low - 0.5, low + 0.5)


# --- drawing


@dataclass(frozen=True)
class Frame:
    """The scales of a panel."""

    x: Scale
    y: Scale

    @property
    def left(self) -> float:
        return self.x.start

    @property
    def right(self) -> float:
        return self.x.end

    @property
    def top(self) -> float:
        return min(self.y.start, self.y.end)

    @property
    def bottom(self) -> float:
        return max(self.y.start, self.y.end)


def shared_margins(panels: Sequence[Panel]) -> tuple[float, float]:
    """Room for labels left and right of the axes that is enough for all panels, so that their axes are equally long."""
    found = [_margins(_with_cell_names(panel)) for panel in panels]
    return max(left for left, _ in found), max(right for _, right in found)


def _margins(panel: Panel) -> tuple[float, float]:
    lines = [mark for mark in panel.marks if isinstance(mark, Line) and mark.labeled and mark.x]
    return _left_margin(panel, panel.marks), _right_margin(_end_labels(lines), panel.marks)


def _with_cell_names(panel: Panel) -> Panel:
    """A panel whose axes have the names of its map, if it is one."""
    cells = next((mark for mark in panel.marks if isinstance(mark, Cells)), None)
    if cells is None:
        return panel
    return replace(panel, x=replace(panel.x, names=cells.columns), y=replace(panel.y, names=cells.rows))


def render_svg(panel: Panel, prefix: str, margins: tuple[float, float] | None = None) -> str:
    """Draw a panel; `prefix` makes its ids unique on the page, `margins` are left and right of the axes."""
    panel = _with_cell_names(panel)
    marks = panel.marks
    slanted = _is_slanted(panel)
    below = BELOW + (5.2 * max(map(len, shorten(panel.x.names))) if slanted else 0)
    lines = [mark for mark in marks if isinstance(mark, Line) and mark.labeled and mark.x]
    ends = _end_labels(lines)
    height = max(panel.height, int(ABOVE + below + LINE_HEIGHT * len(ends))) + (int(below) - BELOW)
    rules = [mark for mark in marks if isinstance(mark, ReferenceLine) and mark.label]
    above = ABOVE + LINE_HEIGHT * _rule_lanes(rules)
    left, beside = margins or _margins(panel)
    right = panel.width - beside
    x_low, x_high = _extent(panel.x, marks, "x")
    y_low, y_high = _extent(panel.y, marks, "y")
    top, bottom = (float(above), float(height - below))
    y_scale = Scale(y_low, y_high, top, bottom) if panel.y.names else Scale(y_low, y_high, bottom, top, panel.y.log)
    frame = Frame(Scale(x_low, x_high, left, right, panel.x.log), y_scale)
    parts = [
        *_draw_axes(panel, frame, slanted, height),
        *(piece for mark in _by_depth(marks) for piece in _draw_mark(mark, frame)),
        *_draw_end_labels(ends, lines, frame),
        *_draw_rule_labels(rules, frame),
    ]
    rounds = ""
    if panel.x.is_round:
        rounds = f' data-rounds="{x_low:g} {x_high:g} {left:g} {right:g}"'
    return (
        f'<svg viewBox="0 0 {panel.width} {height}" role="img" aria-labelledby="{prefix}-alt"{rounds}>'
        f'<title id="{prefix}-alt">{escape(panel.alt)}</title>{"".join(parts)}</svg>'
    )


def _by_depth(marks: Sequence[MarkKind]) -> list[MarkKind]:
    """Rules and areas first, points last."""
    order = {Cells: 0, Bar: 1, ReferenceLine: 2, Line: 3, Dot: 4}
    return sorted(marks, key=lambda mark: order[type(mark)])


def _is_slanted(panel: Panel) -> bool:
    """Whether the names below the axis are too long to stand side by side."""
    names = _thin(shorten(panel.x.names), MAX_COLUMN_LABELS)[1] if panel.x.names else []
    return sum(len(name) + 2 for name in names) * CHARACTER > panel.width - 80


def _thin(names: Sequence[str], most: int) -> tuple[list[int], list[str]]:
    """Every so many of the names, with their places."""
    shown = list(range(0, len(names), max(1, -(-len(names) // most))))
    return shown, [names[at] for at in shown]


def _left_margin(panel: Panel, marks: Sequence[MarkKind]) -> float:
    if panel.y.names:
        return BESIDE + CHARACTER * max(map(len, shorten(panel.y.names, 24)), default=0)
    low, high = _extent(panel.y, marks, "y")
    ticks = _ticks(panel.y, low, high, 6)
    return BESIDE + CHARACTER * max((len(_tick_text(tick, panel.y)) for tick in ticks), default=1) + 18


def _right_margin(ends: Sequence[tuple[str, float]], marks: Sequence[MarkKind]) -> float:
    texts = [text for text, _ in ends]
    texts += [mark.text for mark in marks if isinstance(mark, Dot | Bar)]
    wide = 1.1 * CHARACTER  # they are bold
    return BESIDE + wide * max((len(text) for text in texts), default=0) + (6 if any(texts) else 0)


def _ticks(axis: Axis, low: float, high: float, most: int) -> list[float]:
    return log_ticks(low, high) if axis.log else nice_ticks(low, high, most, axis.integer)


def _draw_axes(panel: Panel, frame: Frame, slanted: bool, height: float) -> list[str]:
    x, y, parts = panel.x, panel.y, []
    if y.names:
        shown, names = _thin(shorten(y.names, 24), MAX_ROW_LABELS)
        parts += [_text(frame.left - 8, frame.y(at) + 4, name, "end") for at, name in zip(shown, names, strict=True)]
    else:
        for tick in _ticks(y, frame.y.low, frame.y.high, 6):
            at = frame.y(tick)
            parts.append(f'<path class="grid" d="M{frame.left:.1f} {at:.1f}H{frame.right:.1f}"/>')
            parts.append(_text(frame.left - 6, at + 4, _tick_text(tick, y), "end", "tick"))
    if x.names:
        shown, names = _thin(shorten(x.names), MAX_COLUMN_LABELS)
        for at, name in zip(shown, names, strict=True):
            parts.append(_below(frame.x(at), frame.bottom + 15, name, slanted))
    else:
        parts.append('<g class="x-ticks">')
        for tick in _ticks(x, frame.x.low, frame.x.high, 6):
            at = frame.x(tick)
            parts.append(f'<path class="grid" d="M{at:.1f} {frame.top:.1f}V{frame.bottom:.1f}"/>')
            parts.append(_text(at, frame.bottom + 15, _tick_text(tick, x), "middle", "tick"))
        parts.append("</g>")
    if not any(isinstance(mark, Cells) for mark in panel.marks):
        parts.append(f'<path class="axis" d="M{frame.left:.1f} {frame.bottom:.1f}H{frame.right:.1f}"/>')
    middle = (frame.left + frame.right) / 2
    if x.label:
        parts.append(_text(middle, height - 6, x.label, "middle", "axis-label"))
    if y.label:
        at = (frame.top + frame.bottom) / 2
        turned = f' transform="rotate(-90 11 {at:.0f})"'
        parts.append(
            f'<text class="axis-label" x="11" y="{at:.0f}" text-anchor="middle"{turned}>{escape(y.label)}</text>'
        )
    return parts


def _below(x: float, y: float, name: str, slanted: bool) -> str:
    if not slanted:
        return _text(x, y, name, "middle", "tick")
    turned = f' transform="rotate(-50 {x:.0f} {y - 6:.0f})"'
    return f'<text class="tick" x="{x:.1f}" y="{y - 4:.1f}" text-anchor="end"{turned}>{escape(name)}</text>'


def _text(x: float, y: float, text: str, anchor: str = "start", kind: str = "") -> str:
    name = f' class="{kind}"' if kind else ""
    return f'<text{name} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _draw_mark(mark: MarkKind, frame: Frame) -> list[str]:
    match mark:
        case Line():
            return _draw_line(mark, frame)
        case Dot():
            return _draw_dot(mark, frame)
        case Bar():
            return _draw_bar(mark, frame)
        case ReferenceLine():
            return _draw_rule(mark, frame)
        case Cells():
            return _draw_cells(mark, frame)


def _owner(look: Look) -> str:
    """The attributes by which the page hides an arm or a tier."""
    names: Mapping[str, str] = {"arm": look.arm, "tier": look.tier}
    return "".join(f' data-{kind}="{escape(name)}"' for kind, name in names.items() if name)


def _paint(look: Look) -> str:
    return f"var({look.color})"


def _draw_line(line: Line, frame: Frame) -> list[str]:
    points = [(x, y) for x, y in zip(line.x, line.y, strict=True) if math.isfinite(x) and math.isfinite(y)]
    if not points:
        return []
    parts = [f"<g{_owner(line.look)}>"]
    if line.low:
        edges = [one for one in zip(line.x, line.low, line.high, strict=True) if all(map(math.isfinite, one))]
        upper = [(frame.x(x), frame.y(high)) for x, _, high in edges]
        lower = [(frame.x(x), frame.y(low)) for x, low, _ in edges]
        edge = " ".join(f"{x:.1f},{y:.1f}" for x, y in [*upper, *reversed(lower)])
        parts.append(f'<polygon class="band" points="{edge}" fill="{_paint(line.look)}"/>')
    pixels = [(frame.x(x), frame.y(y)) for x, y in points]
    if line.step:
        pixels = [point for (x, y), (after, _) in zip(pixels, [*pixels[1:], pixels[-1]], strict=True)
                  for point in ((x, y), (after, y))]  # fmt: skip
    dash = f' stroke-dasharray="{line.look.dash}"' if line.look.dash else ""
    shown = " ".join(f"{x:.1f},{y:.1f}" for x, y in pixels)
    values = "" if line.step else (
        f' data-label="{escape(line.label)}" data-x="{" ".join(f"{x:g}" for x, _ in points)}"'
        f' data-v="{escape("|".join(line.format(y) for _, y in points))}"'
    )  # fmt: skip
    parts.append(f'<polyline points="{shown}" stroke="{_paint(line.look)}"{dash}{values}/>')
    if not line.step and len(points) <= MAX_MARKED_POINTS:
        parts += [_marker(line.look, x, y, 3.0) for x, y in pixels]
    return [*parts, "</g>"]


MARKER_PATHS = (
    "M-1 0a1 1 0 1 0 2 0a1 1 0 1 0-2 0z", "M-.9-.9h1.8v1.8h-1.8z", "M0-1.3L1.3 0L0 1.3L-1.3 0z",
    "M0-1.2L1.2 1H-1.2z", "M0 1.2L-1.2-1H1.2z", "M-1.2 0L1-1.2V1.2z", "M1.2 0L-1 1.2V-1.2z",
    "M-.4-1.2h.8v.8h.8v.8h-.8v.8h-.8v-.8h-.8v-.8h.8z",
)  # fmt: skip


def _marker(look: Look, x: float, y: float, size: float, hollow: bool = False, opacity: float = 1.0) -> str:
    path = MARKER_PATHS[look.marker % len(MARKER_PATHS)]
    fill = "var(--paper)" if hollow else _paint(look)
    edge = f' stroke="{_paint(look)}" stroke-width="{1.6 / size:.2f}"' if hollow else ""
    seen = f' opacity="{opacity:g}"' if opacity < 1 else ""
    place = f'transform="translate({x:.1f} {y:.1f}) scale({size:g})"'
    return f'<path class="mark" {place} d="{path}" fill="{fill}"{edge}{seen}/>'


def _tip(text: str) -> str:
    return f"<title>{escape(text)}</title>" if text else ""


def _draw_dot(dot: Dot, frame: Frame) -> list[str]:
    if not (math.isfinite(dot.x) and math.isfinite(dot.y)):
        return []
    x, y = frame.x(dot.x), frame.y(dot.y)
    parts = [f'<g class="dot"{_owner(dot.look)}>{_tip(dot.tip)}']
    if dot.spread:
        low, high = frame.x(dot.x - dot.spread), frame.x(dot.x + dot.spread)
        ends = f"M{low:.1f} {y - 3:.1f}v6M{high:.1f} {y - 3:.1f}v6"
        parts.append(f'<path class="whisker" d="M{low:.1f} {y:.1f}H{high:.1f}{ends}" stroke="{_paint(dot.look)}"/>')
    parts.append(_marker(dot.look, x, y, dot.size, dot.hollow, dot.opacity))
    if dot.text:
        parts.append(_text(frame.right + 8, y + 4, dot.text, "start", "value"))
    return [*parts, "</g>"]


def _draw_bar(bar: Bar, frame: Frame) -> list[str]:
    x0, x1 = sorted((frame.x(bar.x0), frame.x(bar.x1)))
    y0, y1 = sorted((frame.y(bar.y0), frame.y(bar.y1)))
    seen = f' opacity="{bar.opacity:g}"' if bar.opacity < 1 else ""
    box = f'x="{x0:.1f}" y="{y0:.1f}" width="{max(x1 - x0, 0.5):.1f}" height="{max(y1 - y0, 0.5):.1f}"'
    label = _text(x1 + 6, (y0 + y1) / 2 + 4, bar.text, "start", "value") if bar.text else ""
    return [f'<g class="bar"{_owner(bar.look)}>{_tip(bar.tip)}<rect {box} fill="{_paint(bar.look)}"{seen}/>{label}</g>']


def _draw_rule(rule: ReferenceLine, frame: Frame) -> list[str]:
    if not math.isfinite(rule.value):
        return []
    dash = f' stroke-dasharray="{rule.look.dash}"' if rule.look.dash else ""
    if rule.across == "x":
        path = f"M{frame.x(rule.value):.1f} {frame.top:.1f}V{frame.bottom:.1f}"
    else:
        path = f"M{frame.left:.1f} {frame.y(rule.value):.1f}H{frame.right:.1f}"
    return [
        f'<g{_owner(rule.look)}>{_tip(rule.tip)}<path class="rule" d="{path}" stroke="{_paint(rule.look)}"{dash}/></g>'
    ]


def _rule_lanes(rules: Sequence[ReferenceLine]) -> int:
    """How many lines of text above the axes the labels of rules need: one each, so that they never meet."""
    return len([rule for rule in rules if rule.across == "x"])


def _draw_rule_labels(rules: Sequence[ReferenceLine], frame: Frame) -> list[str]:
    """The label of a rule across x, above the axes, one line each, and joined to its rule."""
    parts = []
    upright = sorted((rule for rule in rules if rule.across == "x"), key=lambda rule: rule.value)
    for lane, rule in enumerate(upright):
        if not math.isfinite(rule.value):
            continue
        x, y = frame.x(rule.value), frame.top - LINE_HEIGHT * (len(upright) - lane) + 8
        at_end = x + CHARACTER * len(rule.label) > frame.right + 60
        path = f'<path class="leader" d="M{x:.1f} {y - 8:.1f}V{frame.top:.1f}" stroke="{_paint(rule.look)}"/>'
        text = _text(x + (-5 if at_end else 5), y, rule.label, "end" if at_end else "start", "rule-label")
        parts.append(f"<g{_owner(rule.look)}>{path}{text}</g>")
    return parts


def _end_labels(lines: Sequence[Line]) -> list[tuple[str, float]]:
    """Labels at the ends of curves, and the value they stand at; none for a curve alone without a name."""
    return [(f"{line.label} {line.end}".strip(), line.y[-1]) for line in lines if line.label or line.end]


def _draw_end_labels(ends: Sequence[tuple[str, float]], lines: Sequence[Line], frame: Frame) -> list[str]:
    """Each label beside the end of its curve, moved apart where they would overlap."""
    named = [line for line in lines if line.label or line.end]
    wanted = [(frame.y(line.y[-1]) if math.isfinite(line.y[-1]) else frame.bottom, line) for line in named]
    places = spread_labels([at for at, _ in wanted], LINE_HEIGHT, frame.top, frame.bottom)
    parts = []
    for (_, line), (text, _), at in zip(wanted, ends, places, strict=True):
        parts.append(f"<g{_owner(line.look)}>{_text(frame.right + 8, at + 4, text, 'start', 'end-label')}</g>")
    return parts


def spread_labels(wanted: Sequence[float], apart: float, top: float, bottom: float) -> list[float]:
    """Places near the wanted ones, in the same order, `apart` from each other and between `top` and `bottom`."""
    order = sorted(range(len(wanted)), key=lambda at: wanted[at])
    places = dict.fromkeys(order, 0.0)
    last = top - apart
    for at in order:
        last = places[at] = max(wanted[at], last + apart)
    limit = max(bottom, top + apart * (len(wanted) - 1))
    for at in reversed(order):
        limit = places[at] = min(places[at], limit)
        limit -= apart
    return [places[at] for at in range(len(wanted))]


def _draw_cells(cells: Cells, frame: Frame) -> list[str]:
    """Cells with a gap between them, so that even a full map shows its rows and columns."""
    wide = (frame.right - frame.left) / max(1, len(cells.columns))
    high = (frame.bottom - frame.top) / max(1, len(cells.rows))
    gap = min(1.5, 0.15 * min(wide, high))
    found = [
        (row, column, shade)
        for row, shades in enumerate(cells.shades)
        for column, shade in enumerate(shades)
        if math.isfinite(shade) and shade > 0
    ]
    w, h = wide - gap, high - gap

    def place(row: int, column: int) -> tuple[float, float]:
        return frame.left + column * wide + gap / 2, frame.top + row * high + gap / 2

    def paint(row: int, column: int) -> str:
        return cells.colors[row][column] if cells.colors else AMOUNT

    parts = []
    if len(found) <= MAX_CELLS_WITH_VALUE:
        for row, column, shade in found:
            x, y = place(row, column)
            tip = f"{cells.rows[row]}, {cells.columns[column]}: {cells.values[row][column]}"
            parts.append(
                f'<g class="cell">{_tip(tip)}<rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}"'
                f' fill="var({paint(row, column)})" fill-opacity="{shade:.2f}"/>'
            )
            if cells.written:
                parts.append(_text(x + w / 2, y + h / 2 + 4, cells.values[row][column], "middle", "cell-value"))
            parts.append("</g>")
        return parts
    paths: dict[tuple[str, int], list[str]] = {}
    for row, column, shade in found:
        x, y = place(row, column)
        level = max(1, math.ceil(SHADES * min(1.0, shade)))
        paths.setdefault((paint(row, column), level), []).append(f"M{x:.1f} {y:.1f}h{w:.1f}v{h:.1f}h-{w:.1f}z")
    for (color, level), drawn in paths.items():
        parts.append(f'<path fill="var({color})" fill-opacity="{level / SHADES:.2f}" d="{"".join(drawn)}"/>')
    return parts


def swatch(key: Key) -> str:
    """The legend's sample of a series."""
    paint = _paint(key.look)
    if key.kind == "area":
        shown = f'<rect width="14" height="10" rx="2" fill="{paint}"/>'
    else:
        shown = _marker(key.look, 14 if key.kind == "line" else 7, 5, 3.4)
    if key.kind == "line":
        dash = f' stroke-dasharray="{key.look.dash}"' if key.look.dash else ""
        shown = f'<path d="M0 5H28" stroke="{paint}" stroke-width="2"{dash}/>{shown}'
    wide = 28 if key.kind == "line" else 14
    return (
        f'<svg class="swatch" viewBox="0 0 {wide} 10" width="{wide}" aria-hidden="true" focusable="false">{shown}</svg>'
    )
