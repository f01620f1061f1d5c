"""Participation and replies: outcomes by device, coverage of the regions of the model, refusals and update norms."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...wording import join_words, pluralize
from ..report_data import ReportData, RunReader
from .devices import MAX_DEVICES
from .drawing import (
    NARROW,
    Axis,
    Bar,
    Cells,
    Chart,
    ChartRow,
    Key,
    Line,
    Look,
    MissingChart,
    Panel,
    row_height,
)
from .looks import TIER_DASHES, shade_of, tier_look

PARTICIPATION_TITLE, COVERAGE_TITLE = "Participation", "Coverage by region of the model"
REFUSALS_TITLE, NORMS_TITLE = "Lost and refused replies", "Norms of updates"
ADMITTED = "admitted"
LOST = {"SILENT": "silent", "DEAD": "dead", "LATE": "late", "NOT_NEEDED": "not needed", "missing": "missing"}
COLORS = {
    ADMITTED: "--ok", "silent": "--lost", "dead": "--ink", "late": "--late", "not needed": "--spare",
    "missing": "--soft", "refused": "--refused",
}  # fmt: skip
CODE_COLORS = ("--refused", "--lost", "--late", "--soft", "--ink", "--amount")
MAX_ROUNDS = 100  # columns of a map
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
    kinds = Counter(_kind(outcome) for *_, outcome in outcomes)
    legend = [Key(kind, Look(color)) for kind, color in COLORS.items() if kinds[kind]]
    panels = [_outcomes_panel(outcomes, kinds), _participation_map(outcomes, devices[::step], rounds)]
    columns = ("round", "device", "tier", "outcome")
    sentence = _participation_sentence(kinds, outcomes, devices, rounds)
    notes = ["Blank: not sampled."] if len(outcomes) < len(devices) * len(rounds) else []
    notes += [f"One device in {step} is shown."] if step > 1 else []
    return Chart("participation", PARTICIPATION_TITLE, sentence, columns, records, panels, legend, " ".join(notes))


Outcome = tuple[int, str, str, str]
"""Round, device, tier and what became of the request."""


def _outcomes_panel(outcomes: Sequence[Outcome], kinds: Counter[str]) -> Panel:
    """Requests by round, stacked by outcome."""
    counts = Counter((number, _kind(outcome)) for number, _, _, outcome in outcomes)
    looks = {kind: Look(color) for kind, color in COLORS.items()}
    marks = _stack(counts, looks)
    parts = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    x, y = Axis("round", integer=True), Axis("requests", integer=True, from_zero=True)
    return Panel(f"Requests to devices by round and outcome: {parts}", marks, x, y, "requests by round", width=NARROW)


def _stack(counts: Mapping[tuple[int, str], int], looks: Mapping[str, Look]) -> list[Bar]:
    """A column per round, with a part for each kind."""
    bars = []
    for number in sorted({number for number, _ in counts}):
        floor = 0
        for kind, look in looks.items():
            if count := counts.get((number, kind), 0):
                tip = f"round {number}: {count} {kind}"
                bars.append(Bar(number - 0.4, number + 0.4, floor, floor + count, look, tip))
                floor += count
    return bars


def _participation_map(outcomes: Sequence[Outcome], devices: Sequence[str], rounds: Sequence[int]) -> Panel:
    """A cell per device and round; of many rounds, every n-th."""
    shown = rounds[:: -(-len(rounds) // MAX_ROUNDS)]
    row, column = ({name: at for at, name in enumerate(names)} for names in (devices, shown))
    shades = [[0.0] * len(shown) for _ in devices]
    values, colors = ([[""] * len(shown) for _ in devices] for _ in range(2))
    for number, name, _, outcome in outcomes:
        if name in row and number in column:
            at, of = row[name], column[number]
            shades[at][of], values[at][of], colors[at][of] = 1.0, _kind(outcome), COLORS[_kind(outcome)]
    extent = f"{pluralize(len(devices), 'device')} by {pluralize(len(shown), 'round')}"
    alt = f"Map of {extent}, a cell where a device was asked"
    cells = Cells(shades, values, list(devices), [str(number) for number in shown], colors)
    height = min(420, row_height(len(devices), 10 if len(devices) > 16 else 16))
    return Panel(alt, [cells], Axis("round"), Axis("device"), "by device", width=NARROW, height=height)


def _kind(outcome: str) -> str:
    return outcome if outcome == ADMITTED else LOST.get(outcome, "refused")


def _participation_sentence(
    kinds: Counter[str], outcomes: Sequence[Outcome], devices: Sequence[str], rounds: Sequence[int]
) -> str:
    admitted = Counter(name for _, name, _, outcome in outcomes if outcome == ADMITTED)
    if kinds[ADMITTED] == kinds.total() == len(devices) * len(rounds):
        return f"All {pluralize(len(devices), 'device')} replied in all {pluralize(len(rounds), 'round')}."
    least = min(devices, key=lambda name: admitted[name])
    lost = [f"{count} {kind}" for kind, count in kinds.items() if kind != ADMITTED]
    others = f" ({join_words(lost)})" if lost else ""
    return (
        f"{kinds[ADMITTED]:,} of {kinds.total():,} requests led to an admitted reply{others}; fewest came from device "
        f"{least}: {admitted[least]:,}."
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
    columns = ("round", "region", "updates", "age")
    sentence = _coverage_sentence(coverage, regions)
    note = "A region is the part of the model that the same tiers hold; a round averages it over their updates."
    return Chart("coverage", COVERAGE_TITLE, sentence, columns, records, panels, note=note)


def enough_updates(recipe: Mapping[str, Any]) -> int:
    """How many updates of a weight the recipe asks for: its quorum, and what its robust rule needs."""
    aggregation = recipe.get("aggregation", {})
    of_rule: int = aggregation.get("min_contributors", 1) if aggregation.get("rule", "none") != "none" else 1
    quorum: int = recipe.get("faults", {}).get("min_coverage", 1)
    return max(quorum, of_rule)


def _coverage(reader: RunReader) -> Iterator[CoverageRow]:
    enough, ages = enough_updates(reader.recipe), Counter[str]()
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
    marks = []
    for index, region in enumerate(regions):
        of_region = [line for line in coverage if line[1] == region]
        x, y = [line[0] for line in of_region], [float(line[column]) for line in of_region]
        look = Look(f"--n{index % 2}", TIER_DASHES[index % len(TIER_DASHES)], index)
        marks.append(Line(region.replace("+", ", "), x, y, look, format="{:g}".format))
    ranges = [[line[column] for line in coverage if line[1] == region] for region in regions]
    parts = [f"{region} {min(values)} to {max(values)}" for region, values in zip(regions, ranges, strict=True)]
    alt = f"{label.capitalize()} by region: " + "; ".join(parts)
    x_axis, y_axis = Axis("round", integer=True, is_round=True), Axis(label, integer=True, from_zero=True)
    return Panel(alt, marks, x_axis, y_axis, label, width=NARROW)


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

    looks = {code: Look(CODE_COLORS[at % len(CODE_COLORS)]) for at, code in enumerate(codes)}
    marks = _stack(counts, looks)
    totals = Counter[str]()
    for (_, code), count in counts.items():
        totals[code] += count
    parts = join_words([f"{count} {code}" for code, count in totals.most_common()])
    legend = [Key(code, look) for code, look in looks.items()]
    sentence = f"Over {pluralize(reader.rounds, 'round')}: {parts}."
    x, y = Axis("round", integer=True), Axis("replies lost or refused", integer=True, from_zero=True)
    panel = Panel(f"Bars of replies lost or refused by round: {parts}", marks, x, y)
    return Chart("refusals", REFUSALS_TITLE, sentence, ("round", "code", "replies"), records, [panel], legend)


def build_norms_chart(report: ReportData) -> Chart | MissingChart:
    reader, tiers = report.first, list(report.tiers)
    norms = [(line["round"], line["tier"], *line["norms"]) for line in reader.participation if line.get("norms")]
    if not norms:
        private = reader.recipe.get("privacy", {}).get("clip") is not None
        reason = "norms are not recorded: they would void the DP guarantee" if private else "devices upload no weights"
        return MissingChart(NORMS_TITLE, reason)
    records: list[ChartRow] = [tuple(line) for line in norms]
    shown = [tier for tier in tiers if any(line[1] == tier for line in norms)] or sorted({line[1] for line in norms})

    marks = []
    for index, tier in enumerate(shown):
        x, low, middle, high = zip(*([line[0], *line[2:]] for line in norms if line[1] == tier), strict=True)
        look = tier_look(report, tier) if tier in tiers else shade_of(index, tier)
        marks.append(Line(tier, x, middle, look, low, high, format="{:.3g}".format))
    highest = max(norms, key=lambda line: line[4])
    medians = {tier: [line[3] for line in norms if line[1] == tier] for tier in shown}
    parts = join_words([f"{tier} from {values[0]:.3g} to {values[-1]:.3g}" for tier, values in medians.items()])
    sentence = (
        f"Median norm of updates by tier, first to last round: {parts}; the largest was {highest[4]:.3g}, of a "
        f"{highest[1]} device in round {highest[0]}."
    )
    columns = ("round", "tier", "least", "median", "most")
    x_axis, y_axis = Axis("round", integer=True, is_round=True), Axis("norm of an update", from_zero=True)
    panel = Panel(f"Median norm of updates by tier and round: {parts}", marks, x_axis, y_axis)
    note = "Bands: from the smallest to the largest."
    return Chart("norms", NORMS_TITLE, sentence, columns, records, [panel], note=note)
