"""Who took part: outcomes device by device, votes and age ring by ring, refusals, and how far updates went."""

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
from matplotlib.axes import Axes

from ..report_data import ReportData, RunReader
from . import drawing
from .devices import MOST_LINES
from .drawing import MissingChart, Chart, Mark, Panel, ChartRow, pluralize, join_words

ATTENDANCE, VOTES, REFUSALS, NORMS = "Who took part", "Votes and age of rings", "Refusals", "How far updates go"
ADMITTED = "admitted"
LOST = {"SILENT": "silent", "DEAD": "dead", "LATE": "late", "NOT_NEEDED": "spare", "missing": "missing"}
PLACES = {ADMITTED: 0, "silent": 4, "dead": 3, "late": 5, "spare": 2, "missing": 6, "refused": 1}


def build_participation_chart(report: ReportData) -> Chart | MissingChart:
    reader = report.first
    if not reader.participation:
        return MissingChart(ATTENDANCE, "nobody was asked yet, or the run does not say who was")
    met = [
        (line["round"], name, line["tier"], line["outcome"]) for line in reader.participation for name in line["devices"]
    ]
    records: list[ChartRow] = sorted(met)
    devices, rounds = reader.fleet["devices"] or sorted({one[1] for one in met}), sorted({one[0] for one in met})
    step = -(-len(devices) // MOST_LINES)
    shown = {name: at for at, name in enumerate(devices[::step])}
    column = {number: at for at, number in enumerate(rounds)}
    indices, shades = np.zeros((len(shown), len(rounds)), dtype=int), np.zeros((len(shown), len(rounds)))
    for number, name, _, outcome in met:
        if name in shown:
            indices[shown[name], column[number]] = PLACES[_kind(outcome)]
            shades[shown[name], column[number]] = 0.9

    def draw(axes: Axes) -> None:
        drawing.draw_heatmap(axes, shades, indices, [str(number) for number in rounds], list(shown))
        drawing.set_labels(axes, "round", "device")

    kinds = Counter(_kind(outcome) for *_, outcome in met)
    alt = f"Map of {len(shown)} devices by {len(rounds)} rounds; " + ", ".join(
        f"{n} {kind}" for kind, n in kinds.items()
    )
    legend = [Mark(kind, index) for kind, index in PLACES.items() if kinds[kind]]
    panel = Panel(alt, draw, size=(6.4, min(6.0, 1.2 + 0.14 * len(shown))))
    columns = ("round", "device", "tier", "outcome")
    return Chart(
        "participation",
        ATTENDANCE,
        _read_met(kinds, met, devices, step),
        columns,
        records,
        [panel],
        legend,
        marks="areas",
    )


def _kind(outcome: str) -> str:
    return outcome if outcome == ADMITTED else LOST.get(outcome, "refused")


def _read_met(kinds: Counter[str], met: Sequence[tuple[int, str, str, str]], devices: Sequence[str], step: int) -> str:
    heard = Counter(name for _, name, _, outcome in met if outcome == ADMITTED)
    least = min(devices, key=lambda name: heard[name])
    lost = [f"{count} {kind}" for kind, count in kinds.items() if kind != ADMITTED]
    others = f" ({join_words(lost)})" if lost else ""
    shown = f" One device in {step} is shown." if step > 1 else ""
    return (
        f"{kinds[ADMITTED]:,} of {kinds.total():,} questions were answered and admitted{others}; the least heard "
        f"device, {least}, {pluralize(heard[least], 'time')}. Blank: not asked.{shown}"
    )


def build_coverage_chart(report: ReportData) -> Chart | MissingChart:
    """A ring is what the same tiers hold; its age, how many rounds nobody has voted on it."""
    reader = report.first
    if not any(line["bytes_up"] for line in reader.participation):
        return MissingChart(VOTES, "nothing leaves the devices, so nobody votes on what others hold")
    found = list(_votes(reader))
    records: list[ChartRow] = [(number, region, count, age) for number, region, count, age in found]
    regions = list(dict.fromkeys(region for _, region, *_ in found))
    panels = [_lines(found, regions, 2, "votes"), _lines(found, regions, 3, "rounds without a vote")]
    legend = [Mark(f"held by {region.replace('+', ', ')}", index) for index, region in enumerate(regions)]
    return Chart(
        "regions", VOTES, _read_votes(found, regions), ("round", "ring", "votes", "age"), records, panels, legend
    )


def _votes(reader: RunReader) -> Iterator[tuple[int, str, int, int]]:
    enough, ages = reader.recipe.get("faults", {}).get("min_coverage", 1), Counter[str]()
    heard: dict[int, Counter[str]] = {}
    for line in reader.participation:
        of_round = heard.setdefault(line["round"], Counter())
        if line["outcome"] == ADMITTED and line["round"] not in reader.void_rounds:
            of_round[line["tier"]] += len(line["devices"])
    for number, by_tier in sorted(heard.items()):
        for region in reader.fleet["regions"]:
            name, count = "+".join(region), sum(by_tier[tier] for tier in region)
            ages[name] = 0 if count >= enough else ages[name] + 1
            yield number, name, count, ages[name]


def _lines(found: Sequence[tuple[int, str, int, int]], regions: Sequence[str], column: int, label: str) -> Panel:
    def draw(axes: Axes) -> None:
        for index, region in enumerate(regions):
            of_ring = [one for one in found if one[1] == region]
            drawing.draw_line(axes, [one[0] for one in of_ring], [float(one[column]) for one in of_ring], index)
        axes.set_ylim(0, 1.08 * max(1, *(int(one[column]) for one in found)))
        drawing.use_integer_ticks(axes.yaxis)
        drawing.set_labels(axes, "round", label)
        drawing.use_integer_ticks(axes.xaxis)

    ranges = [[one[column] for one in found if one[1] == region] for region in regions]
    parts = [f"{region} {min(some)} to {max(some)}" for region, some in zip(regions, ranges, strict=True)]
    return Panel(f"{label.capitalize()} ring by ring: " + "; ".join(parts), draw, label, size=(5.0, 3.0))


def _read_votes(found: Sequence[tuple[int, str, int, int]], regions: Sequence[str]) -> str:
    least = min(found, key=lambda one: one[2])
    oldest = max(found, key=lambda one: one[3])
    where = f"what {_holders(least[1])} hold" if len(regions) > 1 else "the model"
    thin = f"The thinnest vote was {least[2]} on {where}, in round {least[0]}."
    if not oldest[3]:
        return f"{thin} No ring went a round without one."
    return f"{thin} What {_holders(oldest[1])} hold went {pluralize(oldest[3], 'round')} without enough votes."


def _holders(region: str) -> str:
    tiers = region.split("+")
    return f"{tiers[0]} devices alone" if len(tiers) == 1 else f"{join_words(tiers)} devices"


def build_refusals_chart(report: ReportData) -> Chart | MissingChart:
    """What was refused for what it is, and what never came."""
    reader = report.first
    found = Counter((event["round"], event["code"]) for event in reader.events if event["device"])
    if not found:
        return MissingChart(REFUSALS, "every reply was admitted")
    codes = sorted({code for _, code in found})
    numbers = range(1, reader.rounds + 1)
    records: list[ChartRow] = [(number, code, found[number, code]) for number in numbers for code in codes]

    def draw(axes: Axes) -> None:
        floor = np.zeros(len(numbers))
        for index, code in enumerate(codes):
            counts = np.array([found[number, code] for number in numbers], dtype=float)
            axes.bar(numbers, counts, bottom=floor, color=drawing.color(index), width=0.8)
            floor = floor + counts
        drawing.start_at_zero(axes)
        drawing.use_integer_ticks(axes.yaxis)
        drawing.set_labels(axes, "round", "replies lost or refused")
        drawing.use_integer_ticks(axes.xaxis)

    totals = Counter[str]()
    for (_, code), count in found.items():
        totals[code] += count
    parts = [f"{count} {code}" for code, count in totals.most_common()]
    legend = [Mark(code, index) for index, code in enumerate(codes)]
    sentence = f"Over {pluralize(reader.rounds, 'round')}: {join_words(parts)}."
    panel = Panel(f"Bars of replies lost or refused, round by round: {join_words(parts)}", draw)
    return Chart("refusals", REFUSALS, sentence, ("round", "code", "replies"), records, [panel], legend, marks="areas")


def build_norms_chart(report: ReportData) -> Chart | MissingChart:
    reader, tiers = report.first, list(report.tiers)
    found = [(line["round"], line["tier"], *line["norms"]) for line in reader.participation if line.get("norms")]
    if not found:
        private = reader.recipe.get("privacy", {}).get("clip") is not None
        return MissingChart(NORMS, "norms would give away what noise hides" if private else "no device sends weights back")
    records: list[ChartRow] = [tuple(one) for one in found]
    shown = [tier for tier in tiers if any(one[1] == tier for one in found)] or sorted({one[1] for one in found})

    def draw(axes: Axes) -> None:
        for index, tier in enumerate(shown):
            x, low, middle, high = zip(*([one[0], *one[2:]] for one in found if one[1] == tier), strict=True)
            drawing.draw_line(axes, x, middle, index, tier)
            drawing.draw_band(axes, x, low, high, index, tier)
        drawing.start_at_zero(axes)
        drawing.set_labels(axes, "round", "length of an update")
        drawing.use_integer_ticks(axes.xaxis)

    highest = max(found, key=lambda one: one[4])
    ends = [_moved(tier, [one[3] for one in found if one[1] == tier]) for tier in shown]
    sentence = (
        f"The median update of {join_words(ends)}; the longest was {highest[4]:.3g}, of a {highest[1]} device in round "
        f"{highest[0]}. Bands run from the shortest to the longest."
    )
    columns = ("round", "tier", "least", "median", "most")
    panel = Panel(f"Median length of updates by tier and round: {join_words(ends)}", draw)
    legend = [Mark(tier, index, tier) for index, tier in enumerate(shown)]
    return Chart("norms", NORMS, sentence, columns, records, [panel], legend)


def _moved(tier: str, medians: Sequence[float]) -> str:
    return f"{tier} devices went from {medians[0]:.3g} to {medians[-1]:.3g}"
