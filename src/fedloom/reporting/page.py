"""The report: one HTML file that needs nothing else, with the numbers behind every figure beside it."""

import base64
import re
import shlex
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape

from ..files import write_whole
from . import overview
from .charts import COMPARED, SINGLE, Absent, Chart
from .charts.drawing import drawn, styled, swatch
from .report_data import ReportData

FIGURES = "figures"
LARGEST_INLINE = 40_000  # bytes of a CSV that the page carries itself
MOST_ROWS = 60  # of a table under a figure
AGAIN = 5  # seconds after which a page in progress looks for a newer one


@dataclass(frozen=True)
class Page:
    html: str
    csvs: dict[str, str]  # by file name

    def write(self, file: Path) -> None:
        folder = file.parent / figures_of(file)
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in self.csvs.items():
            (folder / name).write_text(content, encoding="utf-8")
        write_whole(file, self.html.encode())


def figures_of(file: Path) -> str:
    """The folder beside a page; two pages in one folder have one each."""
    return FIGURES if file.name == "report.html" else f"{file.stem}-{FIGURES}"


def page(subject: ReportData, figures: str = FIGURES) -> Page:
    compared, single = ([make(subject) for make in makers] for makers in (COMPARED, SINGLE))
    charts = [one for one in (*compared, *single) if isinstance(one, Chart)]
    absent = [one for one in (*compared, *single) if isinstance(one, Absent)]
    lines = overview.table(subject)
    csvs = {f"{chart.key}.csv": chart.csv() for chart in charts}
    csvs["tiers.csv"] = _tiers_csv(lines)
    with styled():
        shown = {chart.key: _figure(chart, csvs[f"{chart.key}.csv"], figures) for chart in charts}
    content: dict[str, Any] = {
        "subject": subject,
        "facts": overview.facts(subject),
        "verdict": overview.verdict(subject),
        "lines": lines,
        "tiers_csv": _link(csvs["tiers.csv"], "tiers.csv", figures),
        "compared": [shown[one.key] for one in compared if isinstance(one, Chart)],
        "single": [shown[one.key] for one in single if isinstance(one, Chart)],
        "absent": absent,
        "repeat": _repeat(subject),
        "again": AGAIN,
        **{name: Markup(_bundled(f"page.{name}")) for name in ("css", "js")},
    }
    return Page(_template().render(content), csvs)


def _figure(chart: Chart, csv: str, figures: str) -> dict[str, Any]:
    panels = [
        {"svg": Markup(drawn(panel, f"{chart.key}-{number}")), "tier": panel.tier, "title": panel.title}
        for number, panel in enumerate(chart.panels)
    ]
    return {
        "key": chart.key, "title": chart.title, "sentence": chart.sentence, "panels": panels,
        "legend": [(mark, Markup(swatch(mark.place, chart.marks))) for mark in chart.legend],
        "columns": chart.columns, "records": chart.records[:MOST_ROWS], "rows": len(chart.records),
        "link": _link(csv, f"{chart.key}.csv", figures),
    }  # fmt: skip


def _link(csv: str, name: str, figures: str) -> dict[str, str]:
    """To the numbers: in the page itself, unless they are many."""
    if len(csv) > LARGEST_INLINE:
        return {"href": f"{figures}/{name}", "name": name}
    return {"href": "data:text/csv;base64," + base64.b64encode(csv.encode()).decode(), "name": name}


def _tiers_csv(lines: list[overview.Line]) -> str:
    records = [
        (one.arm, one.tier, int(one.can_carry), one.share, one.parameters, one.macs, one.bytes_down, one.bytes_up,
         one.value, one.spread, one.seeds, one.over_standalone)
        for one in lines
    ]  # fmt: skip
    return Chart("tiers", "", "", overview.COLUMNS, records, ()).csv()


def _repeat(subject: ReportData) -> dict[str, Any]:
    """The command, and what its result must have in common with this one."""
    story = subject.first
    own = story.fleet.get("own_names") or []
    command = subject.command or f"fedloom run {shlex.quote(str(story.folder / 'recipe.toml'))}"
    told = {key: story.manifest.get(key) for key in ("fedloom", "python", "torch", "numpy", "machine", "threads")}
    runs = [
        (group.name, one.seed, str(one.folder), one.manifest.get("sha256", ""))
        for group in subject.groups
        for one in group.stories
    ]
    return {
        "command": command + (" --with YOUR_FILE.py" if own else ""),
        "own": own,
        "data": story.manifest.get("data", ""),
        "versions": ", ".join(f"{key} {value}" for key, value in told.items() if value is not None),
        "runs": runs,
        "recipe": (story.folder / "recipe.toml").read_text(encoding="utf-8"),
    }


def _bundled(name: str) -> str:
    return (files("fedloom.reporting") / name).read_text(encoding="utf-8")


def _template() -> Any:
    made = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    made.filters["cell"] = _cell
    made.filters["coded"] = _coded
    made.filters["count"] = lambda value: "–" if value is None else f"{value:,.0f}"
    return made.from_string(_bundled("page.html"))


def _coded(text: str) -> Markup:
    """`Commands` as such."""
    whole = re.sub(r"(\d) (%|points?)", "\\1\u00a0\\2", str(escape(text)))  # a number keeps its unit
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", whole))


def _cell(value: Any) -> str:
    if value is None or value != value:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
