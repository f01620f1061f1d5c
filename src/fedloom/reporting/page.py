"""The report: one self-contained HTML file with sentences, a table by tier and charts, and a CSV file per chart."""

import base64
import math
import re
import shlex
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape

from ..files import write_atomic
from ..wording import format_bytes, format_points, join_words, plural, pluralize
from .charts import COMPARED, SINGLE, Chart, MissingChart, build_metric_charts
from .charts.drawing import chart_style, render_svg, swatch
from .paired_stats import Arm, compute_difference, mean_and_std, other_test, transfer_rows
from .report_data import Group, ReportData, RunReader

FIGURES = "figures"
MAX_INLINE_CSV = 40_000  # bytes of a CSV file that the page embeds
LISTED_CLASSES = 20
MAX_TABLE_ROWS = 60  # in the table of a chart
REFRESH_SECONDS = 5.0  # how often the page of a running experiment reloads itself


@dataclass(frozen=True)
class Page:
    html: str
    csvs: dict[str, str]  # by file name

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
    """The page; while the run goes on, it reloads itself every `refresh` seconds."""
    compared, single = ([build(report) for build in builders] for builders in (COMPARED, SINGLE))
    compared += build_metric_charts(report)
    charts = [chart for chart in (*compared, *single) if isinstance(chart, Chart)]
    summaries = summarize_tiers(report)
    csvs = {f"{chart.key}.csv": chart.csv() for chart in charts}
    csvs["tiers.csv"] = Chart("tiers", "", "", TIER_COLUMNS, [astuple(one) for one in summaries], ()).csv()
    with chart_style():
        shown = {chart.key: _figure(chart, csvs[f"{chart.key}.csv"], figures) for chart in charts}
    content: dict[str, Any] = {
        "report": report,
        "facts": _facts(report),
        "verdict": write_sentences(report),
        "lines": summaries,
        "tiers_csv": _csv_link(csvs["tiers.csv"], "tiers.csv", figures),
        "compared": [shown[chart.key] for chart in compared if isinstance(chart, Chart)],
        "single": [shown[chart.key] for chart in single if isinstance(chart, Chart)],
        "absent": [chart for chart in (*compared, *single) if isinstance(chart, MissingChart)],
        "repeat": _repeat_instructions(report),
        "again": f"{refresh:g}",
        "seconds": plural("second", refresh),
        "left_out": report.left_out,
        **{name: Markup(_read_resource(f"page.{name}")) for name in ("css", "js")},
    }
    return Page(_template().render(content), csvs)


@dataclass(frozen=True)
class TierSummary:
    """What a device of a tier runs, transfers and ends up with in one arm."""

    arm: str
    tier: str
    can_run: bool
    share: float  # of the devices
    parameters: int | None
    macs: int | None
    bytes_down: float | None  # per device and round
    bytes_up: float | None
    mean: float
    std: float
    seeds: int
    gain_over_standalone: str  # empty: unknown


TIER_COLUMNS = tuple(TierSummary.__dataclass_fields__)


def summarize_tiers(report: ReportData) -> list[TierSummary]:
    standalone = next((group.arm for group in report.groups if group.name == "standalone"), None)
    return [_summarize_tier(report, group, tier, standalone) for group in report.groups for tier in report.tiers]


def _summarize_tier(report: ReportData, group: Group, tier: str, standalone: Arm | None) -> TierSummary:
    arm, served = group.arm, group.arm.serving[tier]
    fleet = group.readers[0].fleet
    costs: dict[str, Any] = next((one for one in fleet["tiers"] if one["name"] == served.tier), {})
    values = [value for value in arm.final_values(tier, report.test) if not math.isnan(value)]
    return TierSummary(
        group.name, tier, served.can_run, report.terms.shares.get(tier, 0.0),
        costs.get("parameters"), costs.get("macs"), *_bytes_per_device(group.readers[0], served.tier),
        **(mean_and_std(values) if values else {"mean": math.nan, "std": 0.0}), seeds=len(group.readers),
        gain_over_standalone=_gain_over_standalone(report, group.arm, standalone, tier),
    )  # fmt: skip


def _gain_over_standalone(report: ReportData, arm: Arm, standalone: Arm | None, tier: str) -> str:
    """The difference to training alone, with its noise unless it is beyond it."""
    if standalone is None or standalone is arm or not report.is_evaluated or not arm.serving[tier].can_run:
        return ""
    gap = compute_difference(arm, standalone, tier, report.test, report.terms.examples)
    if math.isnan(gap.mean):
        return ""
    number = gap.metric.number
    noise = f"± {number(gap.noise)}" if math.isfinite(gap.noise) else "unknown"
    return number(gap.mean, "+") + ("" if gap.beyond_noise else f" (noise {noise})")


def _bytes_per_device(reader: RunReader, tier: str) -> tuple[float | None, float | None]:
    """Bytes down per request and bytes up per admitted reply."""
    requests, replies, down, up = 0, 0, 0, 0
    for line in reader.participation:
        if line["tier"] == tier:
            requests += len(line["devices"])
            down += line["bytes_down"]
            if line["outcome"] == "admitted":
                replies += len(line["devices"])
                up += sum(line["bytes_up"].values())
    return (down / requests if requests else None), (up / replies if replies else None)


def write_sentences(report: ReportData) -> list[str]:
    """The verdict in sentences: of a comparison its result, of a run its final values."""
    if report.result is not None:
        return [*_winner_sentences(report), *report.result.verdict]
    evaluated = [summary for summary in summarize_tiers(report) if not math.isnan(summary.mean)]
    if not evaluated:
        return ["Nothing has been evaluated yet."]
    participation = _participation_sentences(report.first)
    final = [_final_value_sentence(report, evaluated), *_other_test_sentence(report)]
    return [*final, *participation, _noise_sentence(report, evaluated)]


def _winner_sentences(report: ReportData) -> list[str]:
    assert report.result is not None
    winners = report.result.winners
    won = [f"{name} for tier {tier}" for tier, name in winners.items() if name]
    undecided = [tier for tier, name in winners.items() if not name]
    lines = [f"Best beyond noise: {join_words(won)}."] if won else []
    tiers = f"{plural('tier', len(undecided))} {join_words(undecided)}" if undecided else ""
    return [*lines, *([f"No arm is best beyond noise for {tiers}."] if undecided else [])]


def _final_value_sentence(report: ReportData, evaluated: list[TierSummary]) -> str:
    reader, metric, seeds = report.first, report.metric, len(report.groups[0].readers)
    values = [
        f"{one.tier} {metric.format(one.mean)}" + (f" ± {metric.number(one.std)}" if one.std else "")
        for one in evaluated
    ]
    if report.has_several_arms:
        values = [f"{one.arm} {value}" for one, value in zip(evaluated, values, strict=True)]
    when = f"After {pluralize(reader.rounds, 'round')}"
    if report.is_running:
        when = f"So far, after {reader.rounds} of {pluralize(reader.recipe['rounds'], 'round')}"
    over = f", mean over {pluralize(seeds, 'seed')}" if seeds > 1 else ""
    return f"{when}, {metric.name} on the {report.test} test{over}: {join_words(values)}."


def _other_test_sentence(report: ReportData) -> list[str]:
    """The final values on the test that comes second."""
    other = other_test(report.test)
    shown = replace(report, terms=replace(report.terms, test=other))
    values = [one for one in summarize_tiers(shown) if not math.isnan(one.mean)]
    prefix = "{0.arm} {0.tier}" if report.has_several_arms else "{0.tier}"
    parts = [f"{prefix.format(one)} {report.metric.format(one.mean)}" for one in values]
    return [f"On the {other} test: {join_words(parts)}."] if parts else []


def _participation_sentences(reader: RunReader) -> list[str]:
    outcomes = Counter[str]()
    for line in reader.participation:
        outcomes[line["outcome"]] += len(line["devices"])
    moved = sum(row.value for row in transfer_rows(reader.rows))
    if not outcomes.total():
        return []
    share = 100 * outcomes["admitted"] / outcomes.total()
    replies = f"{share:.0f} % of {outcomes.total():,} requests to devices led to an admitted reply"
    void = f"{pluralize(len(reader.void_rounds), 'round')} did not count: too few replies."
    return [f"{replies}; {format_bytes(moved)} were transferred." + (f" {void}" if reader.void_rounds else "")]


def _noise_sentence(report: ReportData, evaluated: list[TierSummary]) -> str:
    """The uncertainty that the size of the test set leaves."""
    seeds = pluralize(len(report.groups[0].readers), "seed")
    if not report.metric.has_standard_error:
        return f"This is based on {seeds}; `fedloom compare --seeds 5` shows how much results vary between seeds."
    examples = report.terms.examples
    noise = 2 * report.metric.standard_error(statistics.fmean(one.mean for one in evaluated), examples)
    known = f"each value is known to about ± {format_points(noise)}"
    return f"With {seeds} and {pluralize(examples, 'test example')}, {known}."


def _facts(report: ReportData) -> dict[str, Any]:
    """What was run, in one line."""
    reader = report.first
    return {
        "method": " · ".join(group.name for group in report.groups),
        "paper": "" if report.has_several_arms else reader.fleet["method"].get("paper", ""),
        "data": f"{reader.recipe['data']['dataset']}, {pluralize(reader.recipe['data']['devices'], 'device')}",
        "deviation": reader.manifest.get("data_deviation", ""),
        "classes": _list_classes(reader.fleet.get("class_names", ())),
        "rounds": f"{reader.rounds} of {pluralize(reader.recipe['rounds'], 'round')}",
        "seeds": f"seed {', '.join(str(one.seed) for one in report.groups[0].readers)}",
        "started": reader.manifest.get("started", ""),
    }


def _list_classes(names: Sequence[str]) -> str:
    """The names of the classes, of many only the first ones."""
    if not names:
        return ""
    more = f" and {len(names) - LISTED_CLASSES} more" if len(names) > LISTED_CLASSES else ""
    return f"{len(names)} classes: {', '.join(names[:LISTED_CLASSES])}{more}"


def _figure(chart: Chart, csv: str, figures: str) -> dict[str, Any]:
    panels = [
        {"svg": Markup(render_svg(panel, f"{chart.key}-{number}")), "tier": panel.tier, "title": panel.title}
        for number, panel in enumerate(chart.panels)
    ]
    return {
        "key": chart.key, "title": chart.title, "sentence": chart.sentence, "panels": panels,
        "legend": [(mark, Markup(swatch(mark.index, chart.marks))) for mark in chart.legend],
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


def _read_resource(name: str) -> str:
    return (files("fedloom.reporting") / name).read_text(encoding="utf-8")


def _template() -> Any:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["cell"] = _format_cell
    environment.filters["code"] = _mark_code
    environment.filters["count"] = lambda value: "–" if value is None else f"{value:,.0f}"
    return environment.from_string(_read_resource("page.html"))


def _mark_code(text: str) -> Markup:
    """Show text in backticks as code, and keep numbers and their units on one line."""
    html = re.sub(r"(\d) (%|points?)", "\\1\u00a0\\2", str(escape(text)))
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", html))


def _format_cell(value: Any) -> str:
    if value is None or value != value:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
