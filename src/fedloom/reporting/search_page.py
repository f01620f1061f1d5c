"""The page of a search for settings: what was chosen for each arm, and what all trials scored."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..runs.folder import read_manifest
from ..wording import format_bytes, pluralize
from .charts.drawing import Chart
from .charts.looks import look_among
from .charts.search import draw_settings, draw_stages
from .page import FIGURES, REFRESH_SECONDS, Page, describe_figure, render_template, sample_of, shared_content
from .report_data import ReportError
from .search import (
    SearchRecord,
    metric_of_search,
    read_searches,
    stage_scores,
    summarize_search,
    write_budget,
    write_choices,
)
from .summary import Figure, Tile

MAX_SCORES = 4  # arms whose scores are large numbers


@dataclass(frozen=True)
class SearchReport:
    """Everything that the page of a search shows."""

    home: Path
    manifest: dict[str, Any]
    searches: Sequence[SearchRecord]  # in the order of the arms

    @property
    def is_running(self) -> bool:
        return bool(self.manifest["status"] == "running")

    @property
    def arms(self) -> list[str]:
        return [search["arm"] for search in self.searches]

    @property
    def data(self) -> str:
        """The data set and its devices."""
        recipe = self.manifest["arms"][self.arms[0]]
        return f"{recipe['data']['dataset']}, {pluralize(recipe['data']['devices'], 'device')}"


def read_search_report(home: Path) -> SearchReport:
    """Read a search, finished or still running. Refuses one whose first trial has not begun."""
    manifest, by_arm = read_manifest(home), {search["arm"]: search for search in read_searches(home)}
    searches = [by_arm[arm] for arm in manifest["arms"] if arm in by_arm]
    if not searches:
        raise ReportError(f"no trial of {home} has begun yet")
    return SearchReport(home, manifest, searches)


def write_search_headline(report: SearchReport) -> str:
    """What was chosen, in one sentence."""
    if not any(scores for search in report.searches for scores in stage_scores(search).values()):
        return "No trial has been scored yet."
    choices = write_choices(report.searches)
    return f"So far: {choices}" if report.is_running else choices


def write_search_progress(report: SearchReport) -> str:
    """How many trials have begun."""
    begun = sum(len(search["tried"]) for search in report.searches)
    return f"{begun} of {pluralize(sum(search['trials'] for search in report.searches), 'trial')} begun"


def build_search_page(report: SearchReport, figures: str = FIGURES, refresh: float = REFRESH_SECONDS) -> Page:
    """The page; while the search goes on, it brings itself up to date every `refresh` seconds."""
    stages, settings = draw_stages(report.searches), draw_settings(report.searches)
    csvs = {f"{chart.key}.csv": chart.csv() for chart in (stages, settings)}
    headline, progress = write_search_headline(report), write_search_progress(report)

    def shown(chart: Chart) -> dict[str, Any]:
        return describe_figure(chart, csvs[f"{chart.key}.csv"], figures)

    content = {
        **shared_content(report.is_running, refresh),
        "title": " · ".join(report.arms),
        "progress": progress,
        "data": report.data,
        "started": report.manifest["started"],
        "headline": headline,
        "basis": [write_budget(report.searches)],
        "tiles": build_search_tiles(report),
        "heroes": [shown(stages)],
        "figures": [shown(settings)],
        "arms": [(arm, sample_of(look_among(report.arms, arm))) for arm in report.arms],
        "searches": list(map(summarize_search, report.searches)),
        "metric": metric_of_search(report.searches[0]),
        "commands": _commands(report),
    }
    return Page(render_template("search.html", content), csvs, report.is_running, f"{progress}: {headline}")


def build_search_tiles(report: SearchReport) -> list[Tile]:
    """What the choices scored, then trials, validation examples and bytes."""
    searches, metric = report.searches, metric_of_search(report.searches[0])
    chosen = [one for one in map(summarize_search, searches) if one.score is not None]
    scores = [
        Figure(
            metric.number(one.score or 0.0), metric.unit.strip(),
            f"trial {one.chosen_trial}; the recipe itself: {one.own}", one.arm, arm=one.arm,
        )
        for one in chosen
    ]  # fmt: skip
    trials, each = sum(len(search["tried"]) for search in searches), len(searches[0]["tried"])
    of_arms = f"{each} in each of {pluralize(len(searches), 'arm')}" if len(searches) > 1 else f"of {report.arms[0]}"
    amount, _, unit = format_bytes(sum(search["bytes"] for search in searches)).partition(" ")
    return [
        *([Tile(f"Best {metric.name} on validation examples", scores)] if 0 < len(scores) <= MAX_SCORES else []),
        Tile("Trials", [Figure(str(trials), note=of_arms)]),
        Tile(
            "Validation examples", [Figure(f"{searches[0]['validation_examples']:,}", note="no device trains on them")]
        ),
        Tile("Bytes", [Figure(amount, unit, "transferred by all trials")]),
    ]


def _commands(report: SearchReport) -> list[str]:
    if report.is_running:
        return [f"fedloom resume {report.home}"]
    return [
        f"fedloom run {report.home / search['arm'] / 'chosen.toml'}" for search in report.searches if search["choice"]
    ]
