"""Costs of a run: bytes that devices uploaded, and time and memory of the machine that simulated it."""

import statistics
from collections import Counter

from ...wording import format_bytes, join_words, pluralize
from ..report_data import Group, ReportData
from .drawing import NARROW, Axis, Bar, Chart, ChartRow, Key, Line, Look, MarkKind, MissingChart, Panel, row_height
from .looks import arm_look, shade_of, tier_look

UPLOADS_TITLE, TIME_TITLE = "Uploaded data", "Time and memory"
PHASES = {"training": "--amount", "evaluation": "--ok", "saving": "--late"}  # and their colors
TIME_COLUMNS = (
    "arm", "seed", "round", "training_seconds", "evaluation_seconds", "saving_seconds", "peak_megabytes",
    "simulated_seconds",
)  # fmt: skip


def build_uploads_chart(report: ReportData) -> Chart | MissingChart:
    """Bytes that devices uploaded, by tier and kind of data."""
    reader = report.first
    sent: Counter[tuple[int, str, str]] = Counter()
    for line in reader.participation:
        for bundle, count in line["bytes_up"].items():
            sent[line["round"], line["tier"], bundle] += count
    if not sent:
        reason = "devices upload nothing" if reader.participation else "the run does not record uploads"
        return MissingChart(UPLOADS_TITLE, reason)
    records: list[ChartRow] = [(*key, count) for key, count in sorted(sent.items())]
    totals, by_bundle = Counter[tuple[str, str]](), Counter[str]()
    for (_, tier, bundle), count in sent.items():
        totals[tier, bundle] += count
        by_bundle[bundle] += count
    tiers = [tier for tier in report.tiers if any(name == tier for name, _ in totals)]
    tiers += sorted({tier for tier, _ in totals} - set(tiers))
    looks = [tier_look(report, tier) if tier in report.tiers else shade_of(at, tier) for at, tier in enumerate(tiers)]
    legend = [Key(tier, look) for tier, look in zip(tiers, looks, strict=True)]
    panel = _uploads_panel(tiers, looks, [bundle for bundle, _ in by_bundle.most_common()], totals)
    columns, sentence = ("round", "tier", "bundle", "bytes"), _uploads_sentence(report, by_bundle)
    return Chart("uploads", UPLOADS_TITLE, sentence, columns, records, [panel], legend)


def _uploads_panel(tiers: list[str], looks: list[Look], bundles: list[str], totals: Counter[tuple[str, str]]) -> Panel:
    marks: list[MarkKind] = []
    least = min((count for count in totals.values() if count), default=1)
    high = 0.8 / len(tiers)
    for row, bundle in enumerate(bundles):
        for index, (tier, look) in enumerate(zip(tiers, looks, strict=True)):
            count = totals[tier, bundle]
            if count:
                start, text = row - 0.4 + index * high, format_bytes(count)
                tip = f"{bundle} of {tier} devices: {text}"
                marks.append(Bar(least / 2, count, start, start + 0.85 * high, look, tip, text))
    parts = [f"{tier} {bundle} {format_bytes(totals[tier, bundle])}" for bundle in bundles for tier in tiers]
    height = row_height(len(bundles), 18 * len(tiers) + 8)
    x = Axis("bytes uploaded by all devices of a tier (logarithmic)", log=True, low=least / 2)
    return Panel(f"Bars of bytes uploaded: {'; '.join(parts)}", marks, x, Axis(names=bundles), height=height)


def _uploads_sentence(report: ReportData, by_bundle: Counter[str]) -> str:
    method = report.first.fleet["method"]
    uploads = f"With {method['name']}, devices upload {method.get('uploads') or 'data that it does not describe'}: "
    parts = [f"{format_bytes(count)} of {bundle}" for bundle, count in by_bundle.most_common()]
    features = method.get("shares_features")
    warning = f" This includes features of the {features}, from which inputs can be reconstructed." if features else ""
    epsilons = [row.value for row in report.first.rows if row.metric == "epsilon"]
    privacy = f" Differential privacy: epsilon {epsilons[-1]:.2f} so far." if epsilons else ""
    return f"{uploads}{join_words(parts)} in total.{warning}{privacy}"


def build_time_chart(report: ReportData) -> Chart | MissingChart:
    records = [record for group in report.groups for record in _time_rows(group)]
    if not records:
        return MissingChart(TIME_TITLE, "the run does not record them")
    several = report.has_several_arms
    panels = [_training_seconds_panel(report, records) if several else _seconds_panel(records)]
    panels.append(_memory_panel(report, records))
    legend = [] if several else [Key(phase, Look(color)) for phase, color in PHASES.items()]
    return Chart("time", TIME_TITLE, _time_sentence(records, report), TIME_COLUMNS, records, panels, legend)


def _time_rows(group: Group) -> list[ChartRow]:
    records: list[ChartRow] = []
    for reader in group.readers:
        simulated = {row.round: row.value for row in reader.rows if row.metric == "simulated_seconds"}
        for line in reader.timings:
            number, evaluation, saving = line["round"], line["evaluation_seconds"], line["saving_seconds"]
            memory = None if line["peak_memory"] is None else line["peak_memory"] / 1e6
            training = max(0.0, line["seconds"] - evaluation)
            seconds = (training, evaluation, saving)
            records.append((group.name, reader.seed, number, *seconds, memory, simulated.get(number)))
    return records


def _seconds_panel(records: list[ChartRow]) -> Panel:
    """Seconds of a single run, stacked by phase."""
    rounds = sorted({int(record[2] or 0) for record in records})
    sums = [
        [sum(_number(record[column]) for record in records if record[2] == number) for number in rounds]
        for column in (3, 4, 5)
    ]

    marks: list[MarkKind] = []
    for at, number in enumerate(rounds):
        floor = 0.0
        for (phase, color), values in zip(PHASES.items(), sums, strict=True):
            tip = f"round {number}: {values[at]:.2f} s {phase}"
            marks.append(Bar(number - 0.4, number + 0.4, floor, floor + values[at], Look(color), tip))
            floor += values[at]
    totals = join_words([f"{phase} {sum(values):.1f}" for phase, values in zip(PHASES, sums, strict=True)])
    x, y = Axis("round", integer=True), Axis("seconds", from_zero=True)
    return Panel(f"Seconds by round, in total: {totals}", marks, x, y, "seconds", width=NARROW)


def _by_arm(report: ReportData, records: list[ChartRow], column: int, unit: str) -> list[Line]:
    """One line per arm, of the mean over its seeds."""
    lines = []
    for group in report.groups:
        by_round, name = _round_means(records, group.name, column), group.name if report.has_several_arms else ""
        if by_round:
            look = arm_look(report, group.name)
            values = list(by_round.values())
            lines.append(Line(name, list(by_round), values, look, format=lambda value: f"{value:,.3g} {unit}"))
    return lines


ROUNDS = Axis("round", integer=True, is_round=True)


def _training_seconds_panel(report: ReportData, records: list[ChartRow]) -> Panel:
    names = [group.name for group in report.groups]
    means = [f"{name} {statistics.fmean(_round_means(records, name, 3).values() or [0.0]):.2f}" for name in names]
    alt = f"Seconds of training per round, mean over seeds: {'; '.join(means)}"
    y = Axis("seconds of training", from_zero=True)
    return Panel(alt, _by_arm(report, records, 3, "s"), ROUNDS, y, "seconds", width=NARROW)


def _memory_panel(report: ReportData, records: list[ChartRow]) -> Panel:
    peak = max((_number(record[6]) for record in records), default=0.0)
    alt = f"Peak memory of the main process by round, {peak:,.0f} MB at most"
    y = Axis("peak memory so far, MB", from_zero=True)
    return Panel(alt, _by_arm(report, records, 6, "MB"), ROUNDS, y, "memory", width=NARROW)


def _round_means(records: list[ChartRow], arm: str, column: int) -> dict[float, float]:
    by_round: dict[float, list[float]] = {}
    for record in records:
        if record[0] == arm:
            by_round.setdefault(_number(record[2]), []).append(_number(record[column]))
    return {number: statistics.fmean(values) for number, values in sorted(by_round.items())}


def _number(cell: object) -> float:
    return float(cell) if isinstance(cell, int | float) else 0.0


def _time_sentence(records: list[ChartRow], report: ReportData) -> str:
    by_phase = {phase: sum(_number(record[3 + at]) for record in records) for at, phase in enumerate(PHASES)}
    total = sum(by_phase.values()) or 1.0
    shares = join_words([f"{100 * seconds / total:.0f} % {phase}" for phase, seconds in by_phase.items()])
    peak = max((_number(record[6]) for record in records), default=0.0)
    simulated = [_number(record[7]) for record in records if record[7] is not None]
    devices = f" On the fleet's devices the rounds would take {sum(simulated):,.3g} s." if simulated else ""
    spent = f"{pluralize(len(records), 'round')} took {total:,.1f} s on this machine: {shares}"
    if report.has_several_arms:
        spent = f"Shares of the time: {shares}; arms run side by side, so their seconds overlap"
    return f"{spent}; peak memory of the main process was {peak:,.0f} MB.{devices}"
