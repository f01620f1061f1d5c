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
from .charts import Chart, build_hero_charts
from .charts.drawing import render_svg
from .page import read_resource, render_template
from .report_data import ReportData, ReportError, read_report_data
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
    kind = "comparison" if "arms" in manifest else "run"
    about = folder.name, kind, str(manifest.get("status", "")), str(manifest.get("started", ""))[:16].replace("T", " ")
    try:
        data = read_report_data([folder])
        headline, facts, picture = write_headline(data), _facts(data), _picture(data, number)
    except (ReportError, OSError, KeyError, ValueError, json.JSONDecodeError) as error:
        headline, facts, picture = f"It cannot be shown: {error}.", "", ""
    link = quote(f"{folder.relative_to(home)}/{REPORT}") if (folder / REPORT).is_file() else ""
    return GalleryEntry(*about, headline, facts, picture, link, "" if link else f"fedloom report {folder}")


def _facts(data: ReportData) -> str:
    recipe, names = data.first.recipe, [group.name for group in data.groups]
    arms = ", ".join(names) if len(names) < 6 else f"{', '.join(names[:4])} and {len(names) - 4} more"
    return f"{arms}; {recipe['data']['dataset']}, {pluralize(recipe['data']['devices'], 'device')}"


def _picture(data: ReportData, number: int) -> str:
    """The first panel of the first screen."""
    chart = build_hero_charts(data)[0]
    return Markup(render_svg(chart.panels[0], f"run-{number}")) if isinstance(chart, Chart) else ""
