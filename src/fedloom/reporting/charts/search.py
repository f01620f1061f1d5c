"""The search for settings: what trials scored stage by stage, and against the settings that were tried."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ...wording import pluralize
from ..paired_stats import ComparedMetric
from ..report_data import ReportData
from ..search import (
    SearchRecord,
    format_setting,
    format_settings,
    metric_of_search,
    short_key,
    stage_scores,
    trial_records,
    write_choices,
    write_stages,
)
from .drawing import NARROW, Axis, Chart, ChartRow, Dot, Key, Line, Look, MarkKind, MissingChart, Panel, shorten
from .looks import look_among

STAGES_TITLE, SETTINGS_TITLE = "Trials by stage", "Scores by setting"
NO_SEARCH = "settings were not searched; `fedloom compare --tune N` searches them"
HEIGHT = 210
LOG = ":log"  # the end of a range that is searched by orders of magnitude


def build_stages_chart(report: ReportData) -> Chart | MissingChart:
    return draw_stages(report.searches) if report.searches else MissingChart(STAGES_TITLE, NO_SEARCH)


def build_settings_chart(report: ReportData) -> Chart | MissingChart:
    return draw_settings(report.searches) if report.searches else MissingChart(SETTINGS_TITLE, NO_SEARCH)


def draw_stages(searches: Sequence[SearchRecord]) -> Chart:
    """A panel per arm with a line per trial, the chosen one in the arm's color; all on one scale."""
    metric = metric_of_search(searches[0])
    records: list[ChartRow] = [
        (search["arm"], number, after, score, int(number == _chosen(search)))
        for search in searches
        for number, scores in stage_scores(search).items()
        for after, score in scores.items()
    ]
    known = [float(score) for *_, score, _ in records if isinstance(score, float)]
    room = 0.06 * (max(known) - min(known)) or 0.5 if known else 0.5
    y = Axis(metric.axis_label, low=min(known, default=0.0) - room, high=max(known, default=1.0) + room)
    panels = [_stages_panel(searches, search, metric, y) for search in searches]
    columns = ("arm", "trial", "rounds", metric.name, "chosen")
    note = "Pale: trials that were not chosen; a point alone did not go on."
    return Chart("search_stages", STAGES_TITLE, write_stages(searches), columns, records, panels, note=note)


def _chosen(search: SearchRecord) -> int | None:
    return (search["choice"] or {}).get("trial")


def _stages_panel(searches: Sequence[SearchRecord], search: SearchRecord, metric: ComparedMetric, y: Axis) -> Panel:
    names, arm, chosen = [one["arm"] for one in searches], search["arm"], _chosen(search)
    look = replace(look_among(names, arm), dash="")
    marks: list[MarkKind] = []
    for number, scores in sorted(stage_scores(search).items(), key=lambda one: one[0] == chosen):
        known = [(float(after), score) for after, score in scores.items() if score is not None]
        own = look if number == chosen else Look("--ok", marker=look.marker, arm=arm)
        label, end = (f"trial {number}", metric.format(known[-1][1])) if number == chosen and known else ("", "")
        settings = format_settings(search["tried"][number]["settings"])
        if len(known) > 1:
            x, values = [after for after, _ in known], [score for _, score in known]
            marks.append(
                Line(label or f"trial {number}", x, values, own, labeled=bool(label), end=end, format=metric.format)
            )
        marks += [
            Dot(after, score, own, f"trial {number} with {settings}: {metric.format(score)} after "
                f"{pluralize(after, 'round')}", size=4.5 if number == chosen else 3.0, opacity=1.0)
            for after, score in known
        ]  # fmt: skip
    last = f", the chosen one to {metric.format(search['choice']['score'])}" if search["choice"] else ""
    alt = f"Scores of {pluralize(len(search['tried']), 'trial')} of {arm} by rounds{last}"
    x_axis = Axis("rounds of a trial", integer=True, low=0.0, high=search["rounds"] * 1.04)
    return Panel(alt, marks, x_axis, y, arm, width=NARROW, height=HEIGHT, arm=arm)


def draw_settings(searches: Sequence[SearchRecord]) -> Chart:
    """A panel per setting that was searched: the last score of every trial, hollow if it did not run all rounds."""
    metric = metric_of_search(searches[0])
    names = [search["arm"] for search in searches]
    keys = list(dict.fromkeys(key for search in searches for key in search["space"]))
    records: list[ChartRow] = [
        (search["arm"], record["trial"], short_key(key), format_setting(record[key]), record["rounds"],
         record["score"], int(record["chosen"]))
        for search in searches
        for record in trial_records(search)
        for key in search["space"]
    ]  # fmt: skip
    panels = [_settings_panel(searches, key, metric) for key in keys]
    legend = [Key(name, replace(look_among(names, name), dash=""), "point") for name in names]
    columns = ("arm", "trial", "setting", "value", "rounds", metric.name, "chosen")
    sentence = write_choices(searches)
    note = "Large: chosen. Hollow: stopped early, so scored after fewer rounds."
    return Chart("search_settings", SETTINGS_TITLE, sentence, columns, records, panels, legend, note)


def _settings_panel(searches: Sequence[SearchRecord], key: str, metric: ComparedMetric) -> Panel:
    names = [search["arm"] for search in searches]
    having = [search for search in searches if key in search["space"]]
    tried = [(search, record) for search in having for record in trial_records(search) if record["score"] is not None]
    values = [record[key] for _, record in tried]
    are_numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    kinds = [] if are_numbers else list(dict.fromkeys(map(format_setting, values)))
    marks: list[MarkKind] = []
    for search, record in tried:
        look = replace(look_among(names, search["arm"]), dash="")
        x = float(record[key]) if are_numbers else float(kinds.index(format_setting(record[key])))
        marks.append(Dot(
            x, record["score"], look, _describe_trial(search, record, metric), size=6.5 if record["chosen"] else 3.5,
            hollow=record["rounds"] < search["rounds"], opacity=1.0 if record["chosen"] else 0.75,
        ))  # fmt: skip
    log = are_numbers and all(search["space"][key].endswith(LOG) for search in having)
    x_axis = Axis(short_key(key) + (" (logarithmic)" if log else ""), names=shorten(kinds), log=log)
    chosen = [f"{search['arm']} {format_setting(record[key])}" for search, record in tried if record["chosen"]]
    alt = f"Scores of {pluralize(len(tried), 'trial')} by {short_key(key)}; chosen: {'; '.join(chosen) or 'nothing'}"
    return Panel(alt, marks, x_axis, Axis(metric.axis_label), short_key(key), width=NARROW, height=HEIGHT)


def _describe_trial(search: SearchRecord, record: dict[str, Any], metric: ComparedMetric) -> str:
    settings = format_settings({key: record[key] for key in search["space"]})
    score, rounds = metric.format(record["score"]), pluralize(record["rounds"], "round")
    return f"{search['arm']}, trial {record['trial']} with {settings}: {score} after {rounds}"
