"""One page of all runs in a folder: what came out of each, its chart, and a link to its report."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from markupsafe import Markup

from ..design import stylesheet
from ..wording import pluralize
from .charts import Chart, MissingChart, build_hero_charts
from .charts.drawing import render_svg
from .charts.search import draw_stages
from .page import read_resource, render_template
from .report_data import ReportError, read_report_data
from .search import is_search
from .search_page import read_search_report, write_search_headline
from .summary import write_headline

REPORT = "report.html"


@dataclass(frozen=True)
class GalleryEntry:
    """A run or comparison, as the gallery shows it."""

    name: str
    kind: str
    status: str
    started: str
    headline: str
    facts: str = ""
    picture: str = ""  # SVG
    link: str = ""  # to its report; empty: there is none
    command: str = ""  # that writes one


def build_gallery(home: Path, runs: Mapping[Path, Mapping[str, Any]]) -> str:
    """The page. `runs` are the folders in `home` with their manifests, in the order in which they are shown."""
    entries = [_describe(number, folder, manifest, home) for number, (folder, manifest) in enumerate(runs.items())]
    content = {
        "home": home.resolve().name,
        "count": _count(entries),
        "entries": entries,
        "css": Markup(stylesheet() + read_resource("page.css") + read_resource("gallery.css")),
    }
    return render_template("gallery.html", content)


def _count(entries: Sequence[GalleryEntry]) -> str:
    """How many there are, and how many have not finished."""
    if not entries:
        return "There is no run here yet; `fedloom run` makes one."
    left = sum(entry.status != "finished" for entry in entries)
    unfinished = f"; {left} of them {'has' if left == 1 else 'have'} not finished" if left else ", all finished"
    return f"{pluralize(len(entries), 'run')}{unfinished}."


def _describe(number: int, folder: Path, manifest: Mapping[str, Any], home: Path) -> GalleryEntry:
    kind = str(manifest.get("kind", "run"))
    about = folder.name, kind, str(manifest.get("status", "")), str(manifest.get("started", ""))[:16].replace("T", " ")
    try:
        headline, facts, picture = (
            _describe_search(folder, number) if is_search(folder) else _describe_runs(folder, number)
        )
    except (ReportError, OSError, KeyError, ValueError, json.JSONDecodeError) as error:
        headline, facts, picture = f"It cannot be shown: {error}.", "", ""
    link = quote(f"{folder.relative_to(home)}/{REPORT}") if (folder / REPORT).is_file() else ""
    return GalleryEntry(*about, headline, facts, picture, link, "" if link else f"fedloom report {folder}")


def _describe_runs(folder: Path, number: int) -> tuple[str, str, str]:
    """Finding, facts and picture of a run or comparison."""
    data = read_report_data([folder])
    recipe = data.first.recipe
    about = f"{recipe['data']['dataset']}, {pluralize(recipe['data']['devices'], 'device')}"
    facts = f"{_list_arms([group.name for group in data.groups])}; {about}"
    return write_headline(data), facts, _picture(build_hero_charts(data)[0], number)


def _describe_search(folder: Path, number: int) -> tuple[str, str, str]:
    """Finding, facts and picture of a search."""
    search = read_search_report(folder)
    return (
        write_search_headline(search),
        f"{_list_arms(search.arms)}; {search.data}",
        _picture(draw_stages(search.searches), number),
    )


def _list_arms(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) < 6 else f"{', '.join(names[:4])} and {len(names) - 4} more"


def _picture(chart: Chart | MissingChart, number: int) -> str:
    """The first panel of a chart."""
    return Markup(render_svg(chart.panels[0], f"run-{number}")) if isinstance(chart, Chart) else ""
