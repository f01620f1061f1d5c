"""Participation and replies: outcomes by device, coverage of the regions of the model, refusals and update norms."""

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
from matplotlib.axes import Axes

from ...wording import join_words, pluralize
from ..report_data import ReportData, RunReader
from . import drawing
from .devices import MAX_DEVICES
from .drawing import Chart, ChartRow, Mark, MissingChart, Panel

PARTICIPATION_TITLE, COVERAGE_TITLE = "Participation", "Coverage by region of the model"
REFUSALS_TITLE, NORMS_TITLE = "Lost and refused replies", "Norms of updates"
ADMITTED = "admitted"
LOST = {"SILENT": "silent", "DEAD": "dead", "LATE": "late", "NOT_NEEDED": "not needed", "missing": "missing"}
COLORS = {ADMITTED: 0, "silent": 4, "dead": 3, "late": 5, "not needed": 2, "missing": 6, "refused": 1}
CoverageRow = tuple[int, str, int, int]
"""Round, region, updates and rounds since it last had enough."""


def build_participation_chart(report: ReportData) -> Chart | MissingChart:
    reader = report.first
    if not reader.participation:
        reason = "no device has been sampled yet, or the run does not record participation"
        return MissingChart(PARTICIPATION_TITLE, reason)
    outcomes = [
        (line["round"], name, line["tier"], line["outcome"])
        for line in reader.participation
        for name in line["devices"]
    ]
    records: list[ChartRow] = sorted(outcomes)
    devices = reader.fleet["devices"] or sorted({name for _, name, *_ in outcomes})
    rounds = sorted({number for number, *_ in outcomes})
    step = -(-len(devices) // MAX_DEVICES)
    row = {name: at for at, name in enumerate(devices[::step])}
    column = {number: at for at, number in enumerate(rounds)}
    colors, opacities = np.zeros((len(row), len(rounds)), dtype=int), np.zeros((len(row), len(rounds)))
    for number, name, _, outcome in outcomes:
        if name in row:
            colors[row[name], column[number]] = COLORS[_kind(outcome)]
            opacities[row[name], column[number]] = 0.9

    def draw(axes: Axes) -> None:
        drawing.draw_heatmap(axes, opacities, colors, [str(number) for number in rounds], list(row))
        drawing.set_labels(axes, "round", "device")

    kinds = Counter(_kind(outcome) for *_, outcome in outcomes)
    counts = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    alt = f"Map of {pluralize(len(row), 'device')} by {pluralize(len(rounds), 'round')}; {counts}"
    legend = [Mark(kind, index) for kind, index in COLORS.items() if kinds[kind]]
    panel = Panel(alt, draw, size=(6.4, min(6.0, 1.2 + 0.14 * len(row))))
    columns = ("round", "device", "tier", "outcome")
    sentence = _participation_sentence(kinds, outcomes, devices, step)
    return Chart("participation", PARTICIPATION_TITLE, sentence, columns, records, [panel], legend, marks="areas")


def _kind(outcome: str) -> str:
    return outcome if outcome == ADMITTED else LOST.get(outcome, "refused")


def _participation_sentence(
    kinds: Counter[str], outcomes: Sequence[tuple[int, str, str, str]], devices: Sequence[str], step: int
) -> str:
    admitted = Counter(name for _, name, _, outcome in outcomes if outcome == ADMITTED)
    least = min(devices, key=lambda name: admitted[name])
    lost = [f"{count} {kind}" for kind, count in kinds.items() if kind != ADMITTED]
    others = f" ({join_words(lost)})" if lost else ""
    shown = f" One device in {step} is shown." if step > 1 else ""
    return (
        f"{kinds[ADMITTED]:,} of {kinds.total():,} requests led to an admitted reply{others}; fewest came from device "
        f"{least}: {admitted[least]:,}. Blank: not sampled.{shown}"
    )


def build_coverage_chart(report: ReportData) -> Chart | MissingChart:
    """Updates by region (the weights held by the same tiers), and for how many rounds there were too few."""
    reader = report.first
    if not any(line["bytes_up"] for line in reader.participation):
        return MissingChart(COVERAGE_TITLE, "devices upload nothing")
    coverage = list(_coverage(reader))
    records: list[ChartRow] = list(coverage)
    regions = list(dict.fromkeys(region for _, region, *_ in coverage))
    panels = [
        _coverage_panel(coverage, regions, 2, "updates"),
        _coverage_panel(coverage, regions, 3, "rounds with too few updates"),
    ]
    legend = [Mark(f"held by {region.replace('+', ', ')}", index) for index, region in enumerate(regions)]
    columns = ("round", "region", "updates", "age")
    sentence = _coverage_sentence(coverage, regions)
    return Chart("coverage", COVERAGE_TITLE, sentence, columns, records, panels, legend)


def _coverage(reader: RunReader) -> Iterator[CoverageRow]:
    enough, ages = reader.recipe.get("faults", {}).get("min_coverage", 1), Counter[str]()
    admitted: dict[int, Counter[str]] = {}
    for line in reader.participation:
        of_round = admitted.setdefault(line["round"], Counter())
        if line["outcome"] == ADMITTED and line["round"] not in reader.void_rounds:
            of_round[line["tier"]] += len(line["devices"])
    for number, by_tier in sorted(admitted.items()):
        for region in reader.fleet["regions"]:
            name, count = "+".join(region), sum(by_tier[tier] for tier in region)
            ages[name] = 0 if count >= enough else ages[name] + 1
            yield number, name, count, ages[name]


def _coverage_panel(coverage: Sequence[CoverageRow], regions: Sequence[str], column: int, label: str) -> Panel:
    def draw(axes: Axes) -> None:
        for index, region in enumerate(regions):
            of_region = [line for line in coverage if line[1] == region]
            x, y = [line[0] for line in of_region], [float(line[column]) for line in of_region]
            drawing.draw_line(axes, x, y, index)
        axes.set_ylim(0, 1.08 * max(1, *(int(line[column]) for line in coverage)))
        drawing.use_integer_ticks(axes.yaxis)
        drawing.set_labels(axes, "round", label)
        drawing.use_integer_ticks(axes.xaxis)

    ranges = [[line[column] for line in coverage if line[1] == region] for region in regions]
    parts = [f"{region} {min(values)} to {max(values)}" for region, values in zip(regions, ranges, strict=True)]
    return Panel(f"{label.capitalize()} by region: " + "; ".join(parts), draw, label, size=(5.0, 3.0))


def _coverage_sentence(coverage: Sequence[CoverageRow], regions: Sequence[str]) -> str:
    least, oldest = min(coverage, key=lambda line: line[2]), max(coverage, key=lambda line: line[3])
    where = f" for {_describe_region(least[1])}" if len(regions) > 1 else ""
    lowest = f"Lowest coverage: {pluralize(least[2], 'update')}{where}, in round {least[0]}."
    if not oldest[3]:
        return f"{lowest} Every region had enough updates in every round."
    region = _describe_region(oldest[1])
    return f"{lowest} {region[0].upper()}{region[1:]} had too few updates for {pluralize(oldest[3], 'round')} in a row."


def _describe_region(region: str) -> str:
    tiers = region.split("+")
    return f"weights held only by tier {tiers[0]}" if len(tiers) == 1 else f"weights held by tiers {join_words(tiers)}"


def build_refusals_chart(report: ReportData) -> Chart | MissingChart:
    """Replies that were refused by the gate or never arrived, by code."""
    reader = report.first
    counts = Counter((event["round"], event["code"]) for event in reader.events if event["device"])
    if not counts:
        return MissingChart(REFUSALS_TITLE, "every reply was admitted")
    codes = sorted({code for _, code in counts})
    numbers = range(1, reader.rounds + 1)
    records: list[ChartRow] = [(number, code, counts[number, code]) for number in numbers for code in codes]

    def draw(axes: Axes) -> None:
        floor = np.zeros(len(numbers))
        for index, code in enumerate(codes):
            heights = np.array([counts[number, code] for number in numbers], dtype=float)
            axes.bar(numbers, heights, bottom=floor, color=drawing.color(index), width=0.8)
            floor = floor + heights
        drawing.start_at_zero(axes)
        drawing.use_integer_ticks(axes.yaxis)
        drawing.set_labels(axes, "round", "replies lost or refused")
        drawing.use_integer_ticks(axes.xaxis)

    totals = Counter[str]()
    for (_, code), count in counts.items():
        totals[code] += count
    parts = join_words([f"{count} {code}" for code, count in totals.most_common()])
    legend = [Mark(code, index) for index, code in enumerate(codes)]
    sentence = f"Over {pluralize(reader.rounds, 'round')}: {parts}."
    panel = Panel(f"Bars of replies lost or refused by round: {parts}", draw)
    columns = ("round", "code", "replies")
    return Chart("refusals", REFUSALS_TITLE, sentence, columns, records, [panel], legend, marks="areas")


def build_norms_chart(report: ReportData) -> Chart | MissingChart:
    reader, tiers = report.first, list(report.tiers)
    norms = [(line["round"], line["tier"], *line["norms"]) for line in reader.participation if line.get("norms")]
    if not norms:
        private = reader.recipe.get("privacy", {}).get("clip") is not None
        reason = "norms are not recorded: they would void the DP guarantee" if private else "devices upload no weights"
        return MissingChart(NORMS_TITLE, reason)
    records: list[ChartRow] = [tuple(line) for line in norms]
    shown = [tier for tier in tiers if any(line[1] == tier for line in norms)] or sorted({line[1] for line in norms})

    def draw(axes: Axes) -> None:
        for index, tier in enumerate(shown):
            x, low, middle, high = zip(*([line[0], *line[2:]] for line in norms if line[1] == tier), strict=True)
            drawing.draw_line(axes, x, middle, index, tier)
            drawing.draw_band(axes, x, low, high, index, tier)
        drawing.start_at_zero(axes)
        drawing.set_labels(axes, "round", "norm of an update")
        drawing.use_integer_ticks(axes.xaxis)

    highest = max(norms, key=lambda line: line[4])
    medians = {tier: [line[3] for line in norms if line[1] == tier] for tier in shown}
    parts = join_words([f"{tier} from {values[0]:.3g} to {values[-1]:.3g}" for tier, values in medians.items()])
    sentence = (
        f"Median norm of updates by tier, first to last round: {parts}; the largest was {highest[4]:.3g}, of a "
        f"{highest[1]} device in round {highest[0]}. Bands run from the smallest to the largest."
    )
    columns = ("round", "tier", "least", "median", "most")
    panel = Panel(f"Median norm of updates by tier and round: {parts}", draw)
    legend = [Mark(tier, index, tier) for index, tier in enumerate(shown)]
    return Chart("norms", NORMS_TITLE, sentence, columns, records, [panel], legend)
