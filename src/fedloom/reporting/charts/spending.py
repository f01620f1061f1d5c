"""What left the devices, and what the run cost the machine that simulated it."""

import statistics
from collections import Counter
from collections.abc import Callable

import numpy as np
from matplotlib.axes import Axes

from ..report_data import Group, ReportData
from . import drawing
from .drawing import MissingChart, Chart, Mark, Panel, ChartRow, label_width, pluralize, join_words, format_bytes

LEFT, TIME = "What left the devices", "Time and memory"
PARTS = ("training", "judging", "saving")


def build_uploads_chart(report: ReportData) -> Chart | MissingChart:
    """Bytes that devices sent, by what they are and whose; of the first run."""
    reader = report.first
    sent: Counter[tuple[int, str, str]] = Counter()
    for line in reader.participation:
        for bundle, count in line["bytes_up"].items():
            sent[line["round"], line["tier"], bundle] += count
    if not sent:
        return MissingChart(LEFT, "nothing did" if reader.participation else "the run does not say")
    records: list[ChartRow] = [(*index, count) for index, count in sorted(sent.items())]
    totals: Counter[tuple[str, str]] = Counter()
    for (_, tier, bundle), count in sent.items():
        totals[tier, bundle] += count
    tiers = [tier for tier in report.tiers if any(one == tier for one, _ in totals)]
    tiers += sorted({tier for tier, _ in totals} - set(tiers))
    by_bundle = Counter[str]()
    for (_, bundle), count in totals.items():
        by_bundle[bundle] += count
    legend = [Mark(tier, index, tier) for index, tier in enumerate(tiers)]
    panel = _bars(tiers, [bundle for bundle, _ in by_bundle.most_common()], totals)
    columns = ("round", "tier", "bundle", "bytes")
    return Chart("left", LEFT, _read_left(report, by_bundle), columns, records, [panel], legend, marks="areas")


def _bars(tiers: list[str], bundles: list[str], totals: Counter[tuple[str, str]]) -> Panel:
    def draw(axes: Axes) -> None:
        thick = 0.8 / len(tiers)
        for index, tier in enumerate(tiers):
            at = [row + (index - (len(tiers) - 1) / 2) * thick for row in range(len(bundles))]
            color = drawing.color(index)
            artists = axes.barh(at, [totals[tier, bundle] for bundle in bundles], height=0.9 * thick, color=color)
            drawing.tag_tier(list(artists), tier)
        axes.set_xscale("log")
        drawing.use_log_ticks(axes.xaxis)
        axes.set_yticks(range(len(bundles)), bundles)
        axes.invert_yaxis()
        drawing.set_labels(axes, "bytes sent by all devices of a tier (logarithmic)", "")

    parts = [f"{tier} {bundle} {format_bytes(totals[tier, bundle])}" for bundle in bundles for tier in tiers]
    return Panel(
        f"Bars of bytes sent: {'; '.join(parts)}",
        draw,
        size=(6.4, 0.8 + 0.26 * len(tiers) * len(bundles)),
        left=label_width(bundles),
    )


def _read_left(report: ReportData, by_bundle: Counter[str]) -> str:
    method = report.first.fleet["method"]
    said = f"With {method['name']}, devices upload {method.get('uploads') or 'what the method does not declare'}; "
    parts = [f"{format_bytes(count)} of {bundle}" for bundle, count in by_bundle.most_common()]
    features = method.get("shares_features")
    warning = f" Features of the {features} leave: inputs can be rebuilt from them." if features else ""
    spent = [row.value for row in report.first.rows if row.metric == "epsilon"]
    hidden = f" Differential privacy: epsilon {spent[-1]:.2f} so far." if spent else ""
    return f"{said}in all {join_words(parts)}.{warning}{hidden}"


def build_time_chart(report: ReportData) -> Chart | MissingChart:
    records = [record for group in report.groups for record in _spent(group)]
    if not records:
        return MissingChart(TIME, "the run does not say")
    panels = [_seconds_by_arm(report, records)] if report.has_several_arms else [_seconds(records)]
    panels.append(_memory(report, records))
    names = [group.name for group in report.groups] if report.has_several_arms else list(PARTS)
    legend = [Mark(name, index) for index, name in enumerate(names)]
    columns = (
        "arm",
        "seed",
        "round",
        "training_seconds",
        "evaluation_seconds",
        "saving_seconds",
        "peak_megabytes",
        "simulated_seconds",
    )
    return Chart(
        "time",
        TIME,
        _read_time(records, report),
        columns,
        records,
        panels,
        legend,
        marks="lines" if report.has_several_arms else "areas",
    )


def _spent(group: Group) -> list[ChartRow]:
    found: list[ChartRow] = []
    for reader in group.readers:
        clock = {row.round: row.value for row in reader.rows if row.metric == "simulated_seconds"}
        for line in reader.timings:
            judging, saving = line["evaluation_seconds"], line["saving_seconds"]
            memory = None if line["peak_memory"] is None else line["peak_memory"] / 1e6
            took = max(0.0, line["seconds"] - judging)
            found.append(
                (group.name, reader.seed, line["round"], took, judging, saving, memory, clock.get(line["round"]))
            )
    return found


def _seconds(records: list[ChartRow]) -> Panel:
    """Of one run; stacked, for they add up."""
    rounds = sorted({int(one[2] or 0) for one in records})
    sums = [[sum(_number(one[at]) for one in records if one[2] == number) for number in rounds] for at in (3, 4, 5)]

    def draw(axes: Axes) -> None:
        floor = np.zeros(len(rounds))
        for index, values in enumerate(sums):
            axes.bar(rounds, values, bottom=floor, color=drawing.color(index), width=0.8)
            floor = floor + np.array(values)
        drawing.start_at_zero(axes)
        drawing.set_labels(axes, "round", "seconds here")
        drawing.use_integer_ticks(axes.xaxis)

    total = [sum(values) for values in sums]
    alt = f"Seconds round by round: training {total[0]:.1f}, judging {total[1]:.1f}, saving {total[2]:.1f} in all"
    return Panel(alt, draw, "seconds", size=(5.0, 3.0))


def _by_arm(report: ReportData, records: list[ChartRow], column: int, told: str) -> Callable[[Axes], None]:
    """One line an arm, of the mean over its seeds."""

    def draw(axes: Axes) -> None:
        for index, group in enumerate(report.groups):
            by_round = _means(records, group.name, column)
            drawing.draw_line(axes, list(by_round), list(by_round.values()), index)
        drawing.start_at_zero(axes)
        drawing.set_labels(axes, "round", told)
        drawing.use_integer_ticks(axes.xaxis)

    return draw


def _seconds_by_arm(report: ReportData, records: list[ChartRow]) -> Panel:
    means = [f"{g.name} {statistics.fmean(_means(records, g.name, 3).values() or [0.0]):.2f}" for g in report.groups]
    alt = f"Seconds of training a round, mean over seeds: {'; '.join(means)}"
    return Panel(alt, _by_arm(report, records, 3, "seconds of training here"), "seconds", size=(5.0, 3.0))


def _memory(report: ReportData, records: list[ChartRow]) -> Panel:
    most = max((_number(one[6]) for one in records), default=0.0)
    alt = f"Peak memory of the main process round by round, {most:,.0f} MB at most"
    return Panel(alt, _by_arm(report, records, 6, "peak memory so far, MB"), "memory", size=(5.0, 3.0))


def _means(records: list[ChartRow], arm: str, column: int) -> dict[float, float]:
    by_round: dict[float, list[float]] = {}
    for one in records:
        if one[0] == arm:
            by_round.setdefault(_number(one[2]), []).append(_number(one[column]))
    return {number: statistics.fmean(values) for number, values in sorted(by_round.items())}


def _number(cell: object) -> float:
    return float(cell) if isinstance(cell, int | float) else 0.0


def _read_time(records: list[ChartRow], report: ReportData) -> str:
    parts = {name: sum(_number(one[3 + at]) for one in records) for at, name in enumerate(PARTS)}
    whole = sum(parts.values()) or 1.0
    shares = join_words([f"{100 * part / whole:.0f} % {name}" for name, part in parts.items()])
    most = max((_number(one[6]) for one in records), default=0.0)
    clock = [_number(one[7]) for one in records if one[7] is not None]
    devices = f" On the fleet's own devices the rounds would take {sum(clock):,.3g} s." if clock else ""
    took = f"{pluralize(len(records), 'round')} took {whole:,.1f} s on the machine that ran them: {shares}"
    if report.has_several_arms:
        took = f"Of the seconds, {shares}; arms ran side by side, so a round's seconds hold some of the others'"
    return f"{took}; the main process held {most:,.0f} MB at most.{devices}"
