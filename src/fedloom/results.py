"""Results that a notebook can show: a short repr, an HTML table with a picture, a data frame, a plain dict."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from html import escape
from importlib import import_module
from typing import Any

Record = dict[str, Any]


class Result(ABC):
    """Base of what the verbs return. A subclass says what its table holds; the rest follows."""

    @abstractmethod
    def records(self) -> list[Record]:
        """The rows of the result's table."""

    @property
    def title(self) -> str:
        """What this is, in a line."""
        return type(self).__name__

    def picture(self) -> str:
        """An SVG drawing for notebooks; "" if there is nothing to draw."""
        return ""

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain Python values, which JSON can hold: what the command line writes with `--format json`."""
        plain: dict[str, Any] = to_plain(self.content())
        return plain

    def content(self) -> dict[str, Any]:
        """Everything, by name."""
        return {"records": self.records()}

    def to_frame(self) -> Any:
        """The table as a pandas data frame.

        Raises
        ------
        ImportError
            If pandas is not installed.
        """
        try:
            pandas = import_module("pandas")
        except ImportError:
            raise ImportError("to_frame needs pandas: pip install pandas; to_dict and records do without") from None
        return pandas.DataFrame(self.records())

    def __repr__(self) -> str:
        records = self.records()
        return f"{self.title}\n{text_table(records)}" if records else self.title

    def _repr_html_(self) -> str:
        return f"<p><b>{escape(self.title)}</b></p>{html_table(self.records())}{self.picture()}"


def to_plain(value: Any) -> Any:
    """A value as JSON can hold it: numbers that are not finite become None, unknown objects their text.

    Parameters
    ----------
    value : anything.
    """
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, bool | int | float | str | None) else str(value)


def format_cell(value: Any) -> str:
    """A value as a table shows it.

    Parameters
    ----------
    value : the value; None and NaN are shown as a dash.
    """
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.2f}" if abs(value) < 1e6 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _columns(records: Sequence[Record]) -> list[str]:
    return list(dict.fromkeys(key for record in records for key in record))


def text_table(records: Sequence[Record], most: int = 20) -> str:
    """A plain table of the first rows.

    Parameters
    ----------
    records : the rows; a cell that a row lacks is empty.
    most : how many are shown.
    """
    if not records:
        return "(nothing)"
    names = _columns(records)
    rows = [names, *([format_cell(record.get(name)) for name in names] for record in records[:most])]
    widths = [max(len(row[n]) for row in rows) for n in range(len(names))]
    numeric = [all(isinstance(r.get(name), int | float | None) for r in records) for name in names]
    lines = [
        "  ".join(
            c.rjust(w) if number else c.ljust(w) for c, w, number in zip(row, widths, numeric, strict=True)
        ).rstrip()
        for row in rows
    ]
    return "\n".join([*lines, *([f"… {len(records) - most:,} more rows"] if len(records) > most else [])])


def html_table(records: Sequence[Record], most: int = 20) -> str:
    """The same for a notebook.

    Parameters
    ----------
    records : the rows.
    most : how many are shown.
    """
    if not records:
        return ""
    names = _columns(records)
    head = "".join(f"<th>{escape(name.replace('_', ' '))}</th>" for name in names)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(format_cell(record.get(name)))}</td>" for name in names) + "</tr>"
        for record in records[:most]
    )
    more = f"<p>… {len(records) - most:,} more rows</p>" if len(records) > most else ""
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{more}"


def line_chart(series: Mapping[str, Sequence[tuple[float, float]]], label: str = "") -> str:
    """A small line chart as SVG: a line per name, of (round, value) points. "" without two points.

    It is drawn by hand, so that showing a result in a notebook loads no plotting library.

    Parameters
    ----------
    series : the points of each line, by its name.
    label : what is drawn.
    """
    lines = {name: [p for p in points if math.isfinite(p[1])] for name, points in series.items()}
    lines = {name: points for name, points in lines.items() if len(points) > 1}
    if not lines:
        return ""
    width, height, left, bottom = 480, 220, 44, 30
    xs = [x for points in lines.values() for x, _ in points]
    ys = [y for points in lines.values() for _, y in points]
    low, high = min(ys), max(ys) if max(ys) > min(ys) else min(ys) + 1

    def place(x: float, y: float) -> str:
        across = (x - min(xs)) / ((max(xs) - min(xs)) or 1)
        return (
            f"{left + across * (width - left - 130):.1f},{10 + (high - y) / (high - low) * (height - bottom - 10):.1f}"
        )

    colors = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#999999")
    drawn = [
        f'<polyline fill="none" stroke="{color}" stroke-width="2" points="{" ".join(place(*p) for p in points)}"/>'
        f'<text x="{width - 124}" y="{24 + 16 * n}" fill="{color}">{escape(name)}</text>'
        for n, ((name, points), color) in enumerate(zip(lines.items(), colors * (1 + len(lines) // 7), strict=False))
    ]
    axis = (
        f'<text x="2" y="16" fill="currentColor">{high:.3g}</text>'
        f'<text x="2" y="{height - bottom}" fill="currentColor">{low:.3g}</text>'
        f'<text x="{left}" y="{height - 8}" fill="currentColor">round {min(xs):g} to {max(xs):g}'
        f"{escape(f': {label}') if label else ''}</text>"
    )
    style = f'width="{width}" height="{height}" font-size="12" font-family="sans-serif"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {style} role="img">{axis}{"".join(drawn)}</svg>'
