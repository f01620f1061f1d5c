"""How soon targets are reached, and how many times sooner than by the next best arm."""

import math
import statistics
from collections.abc import Sequence

from matplotlib.axes import Axes

from ..report_data import ReportData
from ..targets import Amount, CostToTarget, compute_gain, median_amount, cost_to_target, tier_targets
from . import drawing
from .drawing import MissingChart, Chart, Mark, Panel, ChartRow, label_width, join_words

TITLE = "Rounds to target"
COLUMNS = ("arm", "tier", "target", "reached", "rounds", "megabytes", "simulated_seconds", "gain")
STEPS = 8  # targets of a run alone


def build_targets_chart(report: ReportData) -> Chart | MissingChart:
    if not report.is_evaluated:
        return MissingChart(TITLE, "nothing was judged yet")
    return _of_arms(report) if report.has_several_arms else _of_tiers(report)


def _of_arms(report: ReportData) -> Chart | MissingChart:
    """To what the baseline ends with, less the margin; >: not within the rounds there were."""
    arms, baseline = [group.arm for group in report.groups], report.baseline
    assert baseline is not None
    aims = tier_targets(arms, report.tiers, report.test, baseline, report.terms.margin)
    found = {
        tier: [cost_to_target(arm, tier, report.test, target) for arm in arms if arm.serving[tier].can_run]
        for tier, target in aims.items()
    }
    records = [_record(one, tried, report.has_several_arms) for tried in found.values() for one in tried]
    panels = [_bars(tried) for tried in found.values() if tried]
    return Chart("targets", TITLE, _read_arms(report, found, baseline), COLUMNS, records, panels)


def _record(one: CostToTarget, tried: Sequence[CostToTarget], compared: bool) -> ChartRow:
    others = [median_amount(other.rounds) for other in tried if other is not one]
    rounds, moved = median_amount(one.rounds), median_amount(one.bytes)
    clock = median_amount(one.seconds).value if one.seconds else None
    ratio = compute_gain(rounds, others) if compared and others else None
    return (one.arm, one.tier, one.target, int(rounds.exact), rounds.value, moved.value / 1e6, clock, ratio)


def _bars(tried: Sequence[CostToTarget]) -> Panel:
    tier, aim = tried[0].tier, tried[0].metric.format(tried[0].target)
    said = [(one.arm, median_amount(one.rounds)) for one in tried]

    def draw(axes: Axes) -> None:
        for index, (_, amount) in enumerate(said):
            color = drawing.color(index)
            axes.barh(index, amount.value, color=color, alpha=1.0 if amount.exact else 0.35)
            axes.annotate(amount.format(), (amount.value, index), xytext=(4, -3), textcoords="offset points")
        axes.set_yticks(range(len(said)), [name for name, _ in said])
        axes.invert_yaxis()
        drawing.set_labels(axes, f"rounds to {aim}", "")
        drawing.use_integer_ticks(axes.xaxis)

    alt = f"Rounds to {aim} for tier {tier}: " + "; ".join(f"{name} {one.format()}" for name, one in said)
    return Panel(
        alt,
        draw,
        f"tier {tier}: {aim}",
        tier,
        (5.0, 0.7 + 0.4 * len(said)),
        label_width([name for name, _ in said]),
    )


def _read_arms(report: ReportData, found: dict[str, list[CostToTarget]], baseline: str) -> str:
    parts = []
    for tier, (this, *others) in found.items():
        best = compute_gain(median_amount(this.rounds), [median_amount(other.rounds) for other in others]) if others else None
        if best is not None:
            parts.append(f"on tier {tier} the soonest other arm takes {best} times the rounds of {this.arm}")
    told = f"{join_words(parts)[0].upper()}{join_words(parts)[1:]}. " if parts else ""
    return (
        f"{told}The target is what {baseline} ends with, in the median over seeds, {_short_of(report)}; pale bars did "
        "not get there."
    )


def _short_of(report: ReportData) -> str:
    margin = report.terms.margin
    if not report.metric.difference_unit:
        return f"and {margin:g} more"
    return f"less {margin:g} point{'' if margin == 1 else 's'}"


def _of_tiers(report: ReportData) -> Chart | MissingChart:
    """A ladder of targets up to the best that any tier reached."""
    arm = report.groups[0].arm
    if not arm.metric.unit:
        return MissingChart(TITLE, "round numbers are no targets for a perplexity; of several runs one has its end as target")
    curves = {tier: arm.curves(tier, report.test) for tier in report.tiers}
    values = [row.value for by_seed in curves.values() for curve in by_seed for row in curve]
    aims = _ladder(min(values, default=math.nan), max(values, default=math.nan))
    if not aims:
        return MissingChart(TITLE, "accuracy has hardly changed yet")
    found = [[cost_to_target(arm, tier, report.test, aim) for aim in aims] for tier in report.tiers if any(curves[tier])]
    records = [_record(one, [], False) for tried in found for one in tried]
    legend = [Mark(tried[0].tier, index, tried[0].tier) for index, tried in enumerate(found)]
    return Chart(
        "targets", TITLE, _read_tiers(found), COLUMNS[:-1], [one[:-1] for one in records], [_steps(found)], legend
    )


def _ladder(low: float, high: float) -> list[float]:
    """Round numbers between what there was first and best."""
    if not high > low:
        return []
    step = next(one for one in (1, 2, 5, 10, 20) if (high - low) / one <= STEPS or one == 20)
    return [float(aim) for aim in range(math.ceil(low / step) * step, math.floor(high) + 1, step) if aim > 0]


def _steps(found: Sequence[Sequence[CostToTarget]]) -> Panel:
    def draw(axes: Axes) -> None:
        for index, tried in enumerate(found):
            reached = [(one.target, median_amount(one.rounds).value) for one in tried if median_amount(one.rounds).exact]
            drawing.draw_line(axes, [aim for aim, _ in reached], [number for _, number in reached], index, tried[0].tier)
        drawing.use_integer_ticks(axes.yaxis)
        drawing.set_labels(axes, "target: accuracy, %", "rounds needed")

    alt = "Rounds that each tier needed to reach targets: " + "; ".join(_highest(tried) for tried in found)
    return Panel(alt, draw)


def _highest(tried: Sequence[CostToTarget]) -> str:
    reached = [one for one in tried if median_amount(one.rounds).exact]
    if not reached:
        return f"{tried[0].tier} reached none of them"
    return f"{tried[0].tier} reached {reached[-1].target:.0f} % in {_count(median_amount(reached[-1].rounds))}"


def _count(amount: Amount) -> str:
    return f"{amount.format()} round{'' if amount.value == 1 else 's'}"


def _read_tiers(found: Sequence[Sequence[CostToTarget]]) -> str:
    common = [
        statistics.fmean(one.value for one in tried_at)
        for tried_at in zip(*([median_amount(one.rounds) for one in tried] for tried in found), strict=True)
        if all(amount.exact for amount in tried_at)
    ]
    said = f"{join_words([_highest(tried) for tried in found])}."
    if len(found) > 1 and common:
        last = found[0][len(common) - 1].target
        return f"All tiers get to {last:.0f} %; {said}"
    return said[0].upper() + said[1:]
