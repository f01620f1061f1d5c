"""Learning curves against rounds and against transferred bytes, and rounds until targets are reached."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ...evaluation import Row
from ...evaluation.metrics import UndeclaredDirection
from ...wording import format_bytes, join_words, plural
from ..paired_stats import PERPLEXITY, ComparedMetric, compared_metric, on_test, other_test
from ..report_data import Group, ReportData
from ..targets import Amount, CostToTarget, bytes_to, cost_to_target, gain_of, median_amount, spell_gain, tier_targets
from .drawing import (
    NARROW,
    WIDE,
    Axis,
    Bar,
    Chart,
    ChartRow,
    Dot,
    Key,
    Line,
    MarkKind,
    MissingChart,
    Panel,
    row_height,
    shorten,
)
from .looks import arm_look, series_look, tier_look

TARGETS_TITLE = "Rounds to target"
TARGET_COLUMNS = ("arm", "tier", "target", "reached", "rounds", "megabytes", "simulated_seconds", "gain")
MAX_TARGETS = 8  # of a single run


@dataclass(frozen=True)
class Series:
    """Values of one arm on one tier, by evaluation."""

    arm: str
    tier: str
    x: list[float]
    by_seed: list[list[float]]  # by evaluation, then seed

    @property
    def mean(self) -> list[float]:
        return [statistics.fmean(values) for values in self.by_seed]

    @property
    def std(self) -> list[float]:
        return [statistics.stdev(values) if len(values) > 1 else 0.0 for values in self.by_seed]


RoundCost = Callable[[Sequence[Row], int], float]
"""What a run had spent by the end of a round."""


def build_metric_charts(report: ReportData) -> list[Chart | MissingChart]:
    """A chart for every other metric that the recipe asks for: against rounds, or by entry if it has several."""
    return [_metric_chart(report, name) for name in report.other_metrics]


def _metric_chart(report: ReportData, name: str) -> Chart | MissingChart:
    rows = [row.metric for row in report.first.rows if row.metric.startswith(f"{name}[") and not row.device]
    metric = compared_metric(name, report.first.metrics)
    shown = _with_metric(report, metric)
    if rows:
        return _entries_chart(shown, list(dict.fromkeys(rows)))
    series = _build_series(shown, lambda rows, number: number)
    title = f"{metric.title} by round"
    if not series:
        return MissingChart(title, f"{name} has no value on the {report.test} test")
    sentence = f"{_rounds_sentence(shown, series)} {_sentence_case(metric.direction)}."
    return _learning_chart(shown, series, f"learning_{name}", title, "round", sentence)


def _with_metric(report: ReportData, metric: ComparedMetric) -> ReportData:
    return replace(report, groups=[replace(group, arm=replace(group.arm, metric=metric)) for group in report.groups])


def _sentence_case(text: str) -> str:
    return text[:1].upper() + text[1:]


def _entries_chart(report: ReportData, rows: Sequence[str]) -> Chart | MissingChart:
    """The final values of a metric with several, such as one per class."""
    metric, title = report.metric, f"{report.metric.title} by entry"
    entries = [row.removeprefix(f"{metric.name}[").removesuffix("]") for row in rows]
    series = []
    for group in report.groups:
        for tier in report.tiers:
            arms = [replace(group.arm, metric=replace(metric, name=row)) for row in rows]
            finals = [arm.final_values(tier, report.test) for arm in arms]
            known = [at for at, values in enumerate(finals) if values and not any(map(math.isnan, values))]
            if group.arm.serving[tier].can_run and known:
                series.append(Series(group.name, tier, [float(at) for at in known], [finals[at] for at in known]))
    if not series:
        return MissingChart(title, f"{metric.name} has no value on the {report.test} test")
    records: list[ChartRow] = [
        (one.arm, one.tier, entries[int(at)], mean, std, len(values))
        for one in series
        for at, mean, std, values in zip(one.x, one.mean, one.std, one.by_seed, strict=True)
    ]
    columns = ("arm", "tier", "entry", f"{metric.name}_mean", f"{metric.name}_std", "seeds")
    several = report.has_several_arms
    looks = {one.arm if several else one.tier: series_look(report, one.arm, one.tier) for one in series}
    legend = [Key(name, replace(look, tier="" if several else look.tier), "point") for name, look in looks.items()]
    class_names = report.first.fleet.get("class_names", ())
    entries = class_names if len(class_names) == len(entries) else entries  # the CSV file keeps numbers, as rows do
    tiers = [tier for tier in report.tiers if any(one.tier == tier for one in series)] if several else [""]
    panels = [
        _entries_panel(report, [one for one in series if not tier or one.tier == tier], entries, tier) for tier in tiers
    ]
    parts = [f"{_series_name(report, one)} {_lowest_entry(metric, entries, one)}" for one in series]
    sentence = f"Lowest and highest final value: {'; '.join(parts)}. {_sentence_case(metric.direction)}."
    return Chart(f"entries_{metric.name}", title, sentence, columns, records, panels, legend)


def _entries_panel(report: ReportData, shown: Sequence[Series], entries: Sequence[str], tier: str) -> Panel:
    metric, several = report.metric, report.has_several_arms
    marks = [
        Dot(
            x,
            y,
            series_look(report, one.arm, one.tier),
            f"{_series_name(report, one)}, {entries[int(x)]}: {metric.format(y)}",
        )
        for one in shown
        for x, y in zip(one.x, one.mean, strict=True)
    ]
    parts = [f"{one.arm if several else one.tier} {_lowest_entry(metric, entries, one)}" for one in shown]
    alt = f"Final {metric.name} by entry{f', tier {tier}' if tier else ''}: {'; '.join(parts)}"
    width = NARROW if tier else WIDE
    return Panel(alt, marks, Axis("entry", shorten(entries)), Axis(metric.axis_label), _panel_title(tier), tier, width)


def _panel_title(tier: str) -> str:
    return f"{tier} devices" if tier else ""


def _lowest_entry(metric: ComparedMetric, entries: Sequence[str], series: Series) -> str:
    low, high = (pick(zip(series.mean, series.x, strict=True)) for pick in (min, max))
    return (
        f"from {metric.format(low[0])} ({entries[int(low[1])]}) to {metric.format(high[0])} ({entries[int(high[1])]})"
    )


def _build_series(report: ReportData, cost: RoundCost) -> list[Series]:
    """A series for each arm and tier whose devices can run the model."""
    series = []
    for group in report.groups:
        for tier in report.tiers:
            if group.arm.serving[tier].can_run:
                series.append(_group_series(report, group, tier, cost))
    return [one for one in series if one.x]


def _group_series(report: ReportData, group: Group, tier: str, cost: RoundCost) -> Series:
    curves = group.arm.curves(tier, report.test)
    common = sorted(set.intersection(*({row.round for row in curve} for curve in curves))) if curves else []
    values = [{row.round: row.value for row in curve} for curve in curves]
    x = [statistics.fmean(cost(rows, number) for rows in group.arm.runs) for number in common]
    return Series(group.name, tier, x, [[by_round[number] for by_round in values] for number in common])


def build_other_test_chart(report: ReportData) -> Chart | MissingChart:
    """The learning curves on the test that comes second."""
    other = other_test(report.test)
    shown = replace(report, terms=replace(report.terms, test=other))
    title = f"{report.metric.title} {on_test(other)}, by round"
    series = _build_series(shown, lambda rows, number: number)
    if not series:
        return MissingChart(title, f"there is no {other} test")
    if report.tests_agree:
        return MissingChart(title, f"its values are those of the {report.test} test")
    sentence = _rounds_sentence(shown, series)
    return _learning_chart(shown, series, f"learning_rounds_{other}", title, "round", sentence)


def build_rounds_chart(report: ReportData) -> Chart | MissingChart:
    title = f"{report.metric.title} {on_test(report.test)}, by round"
    series = _build_series(report, lambda rows, number: number)
    if not series:
        return MissingChart(title, "nothing has been evaluated yet")
    return _learning_chart(report, series, "learning_rounds", title, "round", _rounds_sentence(report, series))


def build_bytes_chart(report: ReportData) -> Chart | MissingChart:
    title = f"{report.metric.title} against transferred bytes"
    series = _build_series(report, lambda rows, number: bytes_to(number, rows) / 1e6)
    if not any(one.x[-1] for one in series):
        return MissingChart(title, "no bytes were transferred")
    return _learning_chart(report, series, "learning_bytes", title, "megabytes", _bytes_sentence(report, series))


def _learning_chart(
    report: ReportData, series: Sequence[Series], key: str, title: str, unit: str, sentence: str
) -> Chart:
    columns = ("arm", "tier", unit, f"{report.metric.name}_mean", f"{report.metric.name}_std", "seeds")
    records: list[ChartRow] = [
        (one.arm, one.tier, x, mean, std, len(values))
        for one in series
        for x, mean, std, values in zip(one.x, one.mean, one.std, one.by_seed, strict=True)
    ]
    panels = _learning_panels(report, series, title, unit == "round")
    note = "Bands: one standard deviation over seeds." if any(any(one.std) for one in series) else ""
    return Chart(key, title, sentence, columns, records, panels, note=note)


def _learning_panels(report: ReportData, series: Sequence[Series], title: str, by_round: bool) -> list[Panel]:
    """A panel per tier with all arms; for a single run, one panel with all tiers."""
    evaluated = [tier for tier in report.tiers if any(one.tier == tier for one in series)]
    panels = []
    x = Axis("round", integer=True, is_round=True) if by_round else Axis("MB transferred by all devices, down and up")
    for tier in evaluated if report.has_several_arms else [""]:
        shown = [one for one in series if not tier or one.tier == tier]
        alt = f"{title}{f', tier {tier}' if tier else ''}: " + "; ".join(_first_and_last(report, one) for one in shown)
        marks = [_curve(report, one) for one in shown]
        width = NARROW if tier else WIDE
        panels.append(Panel(alt, marks, x, Axis(report.metric.axis_label), _panel_title(tier), tier, width))
    return panels


def _curve(report: ReportData, series: Series) -> Line:
    low, high = (
        [mean + sign * std for mean, std in zip(series.mean, series.std, strict=True)] if any(series.std) else []
        for sign in (-1, 1)
    )
    alone = "" if len(report.tiers) == 1 else series.tier
    label = series.arm if report.has_several_arms else alone
    look = series_look(report, series.arm, series.tier)
    end = "" if report.has_several_arms else report.metric.format(series.mean[-1])
    return Line(label, series.x, series.mean, look, low, high, end=end, format=report.metric.format)


def _first_and_last(report: ReportData, series: Series) -> str:
    value, name = report.metric.format, series.arm if report.has_several_arms else series.tier
    return f"{name} from {value(series.mean[0])} to {value(series.mean[-1])}"


def _rounds_sentence(report: ReportData, series: Sequence[Series]) -> str:
    value, last = report.metric.format, max(one.x[-1] for one in series)
    if not report.metric.is_directed:
        parts = [f"{_series_name(report, one)} is at {value(one.mean[-1])}" for one in series]
        return f"After round {last:.0f}, {join_words(parts)}."
    sign = report.metric.sign
    best = max(series, key=lambda one: sign * one.mean[-1])
    worst = min(series, key=lambda one: sign * one.mean[-1])
    if best is worst:
        return f"After round {last:.0f}, {_series_name(report, best)} is at {value(best.mean[-1])}."
    high, low = ("highest", "lowest") if sign > 0 else ("lowest", "highest")
    return (
        f"After round {last:.0f}, {_series_name(report, best)} is {high} with {value(best.mean[-1])} and "
        f"{_series_name(report, worst)} {low} with {value(worst.mean[-1])}."
    )


def _bytes_sentence(report: ReportData, series: Sequence[Series]) -> str:
    totals = {one.arm: one.x[-1] for one in series}
    if len(totals) == 1:
        names = [one.tier if len(series) > 1 else report.metric.name for one in series]
        finals = zip(names, (report.metric.format(one.mean[-1]) for one in series), strict=True)
        values = join_words([f"{name} to {final}" for name, final in finals])
        return f"Transferring {format_bytes(1e6 * series[0].x[-1])} brought {values}."
    least, most = min(totals, key=totals.__getitem__), max(totals, key=totals.__getitem__)
    return (
        f"{least} transferred least, {format_bytes(1e6 * totals[least])}; {most} most, "
        f"{format_bytes(1e6 * totals[most])}. A curve further left reaches the same value with fewer bytes."
    )


def _series_name(report: ReportData, series: Series) -> str:
    """The arm and tier of a curve, as far as there are several; else what it shows."""
    if len(report.tiers) == 1:
        return series.arm if report.has_several_arms else report.metric.name.replace("_", " ")
    return f"{series.arm} on tier {series.tier}" if report.has_several_arms else f"tier {series.tier}"


def build_targets_chart(report: ReportData) -> Chart | MissingChart:
    if not report.is_evaluated:
        return MissingChart(TARGETS_TITLE, "nothing has been evaluated yet")
    if not report.metric.is_directed:
        return MissingChart(TARGETS_TITLE, str(UndeclaredDirection(report.metric.name)))
    return _arm_targets_chart(report) if report.has_several_arms else _tier_targets_chart(report)


def _arm_targets_chart(report: ReportData) -> Chart | MissingChart:
    """Rounds of every arm until it reaches the baseline's final value, less the margin."""
    arms, baseline = [group.arm for group in report.groups], report.baseline
    assert baseline is not None
    targets = tier_targets(arms, report.tiers, report.test, baseline, report.terms.margin)
    by_tier = {
        tier: [cost_to_target(arm, tier, report.test, target) for arm in arms if arm.serving[tier].can_run]
        for tier, target in targets.items()
    }
    records = [(*_target_row(cost), gain_of(cost, costs)) for costs in by_tier.values() for cost in costs]
    panels = [_target_bars(report, costs) for costs in by_tier.values() if costs]
    if not panels:
        return MissingChart(TARGETS_TITLE, f"{baseline}, which sets the targets, did not finish")
    sentence = _arm_targets_sentence(report, by_tier, baseline)
    return Chart("targets", TARGETS_TITLE, sentence, TARGET_COLUMNS, records, panels)


def _target_row(cost: CostToTarget) -> ChartRow:
    rounds, moved = median_amount(cost.rounds), median_amount(cost.bytes)
    seconds = median_amount(cost.seconds).value if cost.seconds else None
    return (cost.arm, cost.tier, cost.target, int(rounds.exact), rounds.value, moved.value / 1e6, seconds)


def _target_bars(report: ReportData, costs: Sequence[CostToTarget]) -> Panel:
    tier, target = costs[0].tier, costs[0].metric.format(costs[0].target)
    names, rounds = [cost.arm for cost in costs], [median_amount(cost.rounds) for cost in costs]
    marks: list[MarkKind] = []
    for row, (name, amount) in enumerate(zip(names, rounds, strict=True)):
        tip = f"{name}: {amount.format()} {plural('round', amount.value)} to {target}"
        look, opacity = arm_look(report, name, tier), 1.0 if amount.exact else 0.3
        marks.append(Bar(0, amount.value, row - 0.3, row + 0.3, look, tip, amount.format(), opacity))
    parts = [f"{name} {amount.format()}" for name, amount in zip(names, rounds, strict=True)]
    alt = f"Rounds to {target} for tier {tier}: {'; '.join(parts)}"
    x, y = Axis(f"rounds to {target}", integer=True, from_zero=True), Axis(names=names)
    return Panel(alt, marks, x, y, f"{tier} devices: {target}", tier, NARROW, row_height(len(names)))


def _arm_targets_sentence(report: ReportData, by_tier: dict[str, list[CostToTarget]], baseline: str) -> str:
    gains = [(tier, costs[0].arm, gain_of(costs[0], costs)) for tier, costs in by_tier.items() if costs]
    parts = [
        f"on tier {tier} the fastest other arm takes {spell_gain(gain)} the rounds of {arm}"
        for tier, arm, gain in gains
        if gain
    ]
    gained = f"{join_words(parts)[0].upper()}{join_words(parts)[1:]}. " if parts else ""
    margin = report.terms.margin
    points = f" {plural('point', margin)}" if report.metric.unit == " %" else report.metric.unit
    less = f"{'less' if report.metric.sign > 0 else 'plus'} {margin:g}{points}"
    missed = any(not median_amount(cost.rounds).exact for costs in by_tier.values() for cost in costs)
    pale = "; pale bars did not reach it" if missed else ""
    return f"{gained}The target is the final value of {baseline}, median over seeds, {less}{pale}."


def _tier_targets_chart(report: ReportData) -> Chart | MissingChart:
    """Rounds of every tier of a single run to a ladder of targets."""
    arm = report.groups[0].arm
    if arm.metric.unit != " %" or arm.metric.sign < 0:
        name = "a perplexity" if arm.metric == PERPLEXITY else arm.metric.name
        return MissingChart(TARGETS_TITLE, f"{name} has targets only in a comparison, where a baseline sets them")
    curves = {tier: arm.curves(tier, report.test) for tier in report.tiers}
    values = [row.value for by_seed in curves.values() for curve in by_seed for row in curve]
    targets = _round_targets(min(values, default=math.nan), max(values, default=math.nan))
    if not targets:
        return MissingChart(TARGETS_TITLE, f"{arm.metric.name} has hardly changed yet")
    evaluated = [tier for tier in report.tiers if any(curves[tier])]
    by_tier = [[cost_to_target(arm, tier, report.test, target) for target in targets] for tier in evaluated]
    records = [_target_row(cost) for costs in by_tier for cost in costs]
    sentence, panel = _tier_targets_sentence(by_tier), _target_lines(report, by_tier)
    return Chart("targets", TARGETS_TITLE, sentence, TARGET_COLUMNS[:-1], records, [panel])


def _round_targets(low: float, high: float) -> list[float]:
    """Round numbers between the lowest and the highest value."""
    if not high > low:
        return []
    step = next(size for size in (1, 2, 5, 10, 20) if (high - low) / size <= MAX_TARGETS or size == 20)
    return [float(target) for target in range(math.ceil(low / step) * step, math.floor(high) + 1, step) if target > 0]


def _target_lines(report: ReportData, by_tier: Sequence[Sequence[CostToTarget]]) -> Panel:
    marks = []
    for costs in by_tier:
        reached = [(cost.target, rounds.value) for cost in costs if (rounds := median_amount(cost.rounds)).exact]
        x, y = [target for target, _ in reached], [number for _, number in reached]
        look = tier_look(report, costs[0].tier)
        label = costs[0].tier if len(by_tier) > 1 else ""
        marks.append(Line(label, x, y, look, format=lambda rounds: f"{rounds:g} {plural('round', rounds)}"))
    alt = "Rounds that each tier needed to reach targets: " + "; ".join(_highest_target(costs) for costs in by_tier)
    x_axis = Axis(f"target: {by_tier[0][0].metric.axis_label}")
    return Panel(alt, marks, x_axis, Axis("rounds needed", integer=True, from_zero=True))


def _highest_target(costs: Sequence[CostToTarget]) -> str:
    reached = [cost for cost in costs if median_amount(cost.rounds).exact]
    if not reached:
        return f"{costs[0].tier} reached none of them"
    return f"{costs[0].tier} reached {reached[-1].target:.0f} % in {_count_rounds(median_amount(reached[-1].rounds))}"


def _count_rounds(amount: Amount) -> str:
    return f"{amount.format()} {plural('round', amount.value)}"


def _tier_targets_sentence(by_tier: Sequence[Sequence[CostToTarget]]) -> str:
    if len(by_tier) == 1:
        reached = [cost for cost in by_tier[0] if median_amount(cost.rounds).exact]
        if not reached:
            return "None of the targets was reached."
        return f"{reached[-1].target:.0f} % was reached in {_count_rounds(median_amount(reached[-1].rounds))}."
    medians = ([median_amount(cost.rounds) for cost in costs] for costs in by_tier)
    common = sum(all(amount.exact for amount in amounts) for amounts in zip(*medians, strict=True))
    sentence = f"{join_words([_highest_target(costs) for costs in by_tier])}."
    if common:
        return f"All tiers reach {by_tier[0][common - 1].target:.0f} %; {sentence}"
    return sentence[0].upper() + sentence[1:]
