"""The report: one self-contained HTML page with the finding, large numbers and charts, and a CSV file per chart."""

import base64
import re
import shlex
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup, escape

from ..design import stylesheet
from ..files import write_atomic
from ..wording import plural, pluralize
from .charts import OF_ONE_RUN, SECTIONS, Chart, MissingChart, build_charts, build_hero_charts
from .charts.drawing import Key, Look, render_svg, shared_margins, swatch
from .charts.looks import arm_look, tier_look
from .paired_stats import on_test
from .report_data import ReportData
from .search import metric_of_search, search_sentence, summarize_search, write_budget
from .summary import TIER_COLUMNS, build_tiles, summarize_tiers, write_basis, write_headline, write_progress

FIGURES = "figures"
MAX_INLINE_CSV = 40_000  # bytes of a CSV file that the page embeds
LISTED_CLASSES = 20
MAX_TABLE_ROWS = 60  # in the table of a chart
REFRESH_SECONDS = 5.0  # how often the page of a running experiment is brought up to date


@dataclass(frozen=True)
class Page:
    """A page and its files; whether it shows something that goes on, and how far that is."""

    html: str
    csvs: dict[str, str]  # by file name
    is_running: bool = False
    progress: str = ""

    def write(self, file: Path) -> None:
        folder = file.parent / figures_folder(file)
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in self.csvs.items():
            (folder / name).write_text(content, encoding="utf-8")
        write_atomic(file, self.html.encode())


def figures_folder(file: Path) -> str:
    """The name of the folder for a page's CSV files; each page in a folder has its own."""
    return FIGURES if file.name == "report.html" else f"{file.stem}-{FIGURES}"


def build_page(report: ReportData, figures: str = FIGURES, refresh: float = REFRESH_SECONDS) -> Page:
    """The page; while the run goes on, it brings itself up to date every `refresh` seconds."""
    heroes, charts = build_hero_charts(report), build_charts(report)
    drawn = [chart for built in (heroes, *charts.values()) for chart in built if isinstance(chart, Chart)]
    summaries, facts, several = summarize_tiers(report), _facts(report), report.has_several_arms
    csvs = {f"{chart.key}.csv": chart.csv() for chart in drawn}
    csvs["tiers.csv"] = Chart("tiers", "", "", TIER_COLUMNS, [astuple(one) for one in summaries], ()).csv()
    shown = {chart.key: describe_figure(chart, csvs[f"{chart.key}.csv"], figures) for chart in drawn}
    sections = [
        {
            "key": section.key, "title": section.title, "about": section.about,
            "figures": [shown[chart.key] for chart in charts[section.key] if isinstance(chart, Chart)],
        }
        for section in SECTIONS
    ]  # fmt: skip
    content: dict[str, Any] = {
        "report": report,
        **shared_content(report.is_running, refresh),
        "facts": facts,
        "title": facts["method"],
        "progress": f"{facts['rounds']} finished",
        "headline": write_headline(report),
        "basis": write_basis(report),
        "tiles": build_tiles(report),
        "heroes": [shown[chart.key] for chart in heroes if isinstance(chart, Chart)],
        "verdict": _verdict(report),
        "sections": [section for section in sections if section["figures"] or section["key"] == "cost"],
        "where": on_test(report.test),
        "which": f"{report.groups[0].name}, seed {report.first.seed}" if several else "",
        "searches": list(map(summarize_search, report.searches)),
        "search_metric": metric_of_search(report.searches[0]) if report.searches else None,
        "budget": write_budget(report.searches) if report.searches else "",
        "lines": summaries,
        "tiers_csv": _csv_link(csvs["tiers.csv"], "tiers.csv", figures),
        "absent": _absent([*heroes, *(chart for built in charts.values() for chart in built)]),
        "arms": [(group.name, sample_of(arm_look(report, group.name))) for group in report.groups],
        "tiers": [(tier, "" if several else sample_of(tier_look(report, tier))) for tier in report.tiers],
        "last_round": max((reader.rounds for reader in report.readers), default=0),
        "repeat": _repeat_instructions(report),
        "left_out": report.left_out,
    }
    return Page(render_template("page.html", content), csvs, report.is_running, write_progress(report))


def shared_content(is_running: bool, refresh: float) -> dict[str, Any]:
    """What the frame of every page needs."""
    return {
        "is_running": is_running,
        "again": f"{refresh:g}",
        "seconds": plural("second", refresh),
        "css": Markup(stylesheet() + read_resource("page.css")),
        "js": Markup(read_resource("page.js")),
    }


def _verdict(report: ReportData) -> list[str]:
    """Every statement of a comparison but those on the search, which has a section."""
    searched = set(map(search_sentence, report.searches))
    return [line for line in (report.result.verdict if report.result is not None else []) if line not in searched]


def _absent(charts: Sequence[Chart | MissingChart]) -> list[MissingChart]:
    return list(dict.fromkeys(chart for chart in charts if isinstance(chart, MissingChart)))


def sample_of(look: Look) -> Markup:
    """What a mark looks like, for the choice of what is shown."""
    return Markup(swatch(Key("", look, "point")))


def _facts(report: ReportData) -> dict[str, Any]:
    """What was run, in one line."""
    reader = report.first
    names, seeds = [group.name for group in report.groups], [one.seed for one in report.groups[0].readers]
    return {
        "method": " · ".join(names) if len(names) < 5 else f"{' · '.join(names[:3])} and {len(names) - 3} more",
        "paper": "" if report.has_several_arms else reader.fleet["method"].get("paper", ""),
        "data": f"{reader.recipe['data']['dataset']}, {pluralize(reader.recipe['data']['devices'], 'device')}",
        "deviation": reader.manifest.get("data_deviation", ""),
        "classes": _list_classes(reader.fleet.get("class_names", ())),
        "rounds": f"{reader.rounds} of {pluralize(reader.recipe['rounds'], 'round')}",
        "seeds": f"{plural('seed', len(seeds))} {', '.join(map(str, seeds))}",
        "started": reader.manifest.get("started", ""),
    }


def _list_classes(names: Sequence[str]) -> str:
    """The names of the classes, of many only the first ones."""
    if not names:
        return ""
    more = f" and {len(names) - LISTED_CLASSES} more" if len(names) > LISTED_CLASSES else ""
    return f"{len(names)} classes: {', '.join(names[:LISTED_CLASSES])}{more}"


def describe_figure(chart: Chart, csv: str, figures: str) -> dict[str, Any]:
    """A chart as templates show it."""
    are_alike = all(panel.tier or panel.arm for panel in chart.panels)  # the same for every tier or arm
    margins = shared_margins(chart.panels) if chart.panels and are_alike else None
    panels = [
        {"svg": Markup(render_svg(panel, f"{chart.key}-{number}", margins)), "tier": panel.tier, "arm": panel.arm,
         "title": panel.title, "width": panel.width}
        for number, panel in enumerate(chart.panels)
    ]  # fmt: skip
    return {
        "key": chart.key, "title": chart.title, "sentence": chart.sentence, "panels": panels, "note": chart.note,
        "legend": [(key, Markup(swatch(key))) for key in chart.legend], "of_one_run": chart.key in OF_ONE_RUN,
        "columns": chart.columns, "records": chart.records[:MAX_TABLE_ROWS], "rows": len(chart.records),
        "link": _csv_link(csv, f"{chart.key}.csv", figures),
    }  # fmt: skip


def _csv_link(csv: str, name: str, figures: str) -> dict[str, str]:
    """Embed the CSV file in the link unless it is large."""
    if len(csv) > MAX_INLINE_CSV:
        return {"href": f"{figures}/{name}", "name": name}
    return {"href": "data:text/csv;base64," + base64.b64encode(csv.encode()).decode(), "name": name}


def _repeat_instructions(report: ReportData) -> dict[str, Any]:
    """The command that repeats it, and the versions and fingerprints that prove an equal result."""
    reader = report.first
    custom = reader.fleet.get("own_names") or []
    command = report.command or f"fedloom run {shlex.quote(str(reader.folder / 'recipe.toml'))}"
    versions = {key: reader.manifest.get(key) for key in ("fedloom", "python", "torch", "numpy", "machine", "threads")}
    runs = [
        (group.name, one.seed, str(one.folder), one.manifest.get("sha256", ""))
        for group in report.groups
        for one in group.readers
    ]
    return {
        "command": command + (" --with YOUR_FILE.py" if custom else ""),
        "own": custom,
        "data": reader.manifest.get("data", ""),
        "versions": ", ".join(f"{key} {value}" for key, value in versions.items() if value is not None),
        "runs": runs,
        "recipe": (reader.folder / "recipe.toml").read_text(encoding="utf-8"),
    }


def read_resource(name: str) -> str:
    """The text of a file of this folder."""
    return (files("fedloom.reporting") / name).read_text(encoding="utf-8")


def render_template(name: str, content: dict[str, Any]) -> str:
    """A template of this folder, filled in."""
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        loader=FunctionLoader(read_resource),
    )  # fmt: skip
    environment.filters["cell"] = _format_cell
    environment.filters["code"] = _mark_code
    environment.filters["whole"] = _keep_names_whole
    environment.filters["count"] = lambda value: "–" if value is None else f"{value:,.0f}"
    return environment.get_template(name).render(content).lstrip()


def _mark_code(text: str) -> Markup:
    """Show text in backticks as code, and keep numbers and their units on one line."""
    html = re.sub(r"(\d) (%|points?|[kMG]?B\b|s\b)", "\\1\u00a0\\2", str(escape(text))).replace("± ", "±\u00a0")
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", html))


def _keep_names_whole(html: Markup) -> Markup:
    """Do not break lines inside names with hyphens, such as small-for-all."""
    return Markup(re.sub(r"\b\w+(?:-\w+)+", r'<span class="whole">\g<0></span>', str(html)))  # Markup would escape it


def _format_cell(value: Any) -> str:
    if value is None or value != value:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
