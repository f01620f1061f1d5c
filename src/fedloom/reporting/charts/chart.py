"""A figure of the report before it is drawn: its numbers, one sentence that reads them, and how its panels look."""

import csv
import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from matplotlib.axes import Axes

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
