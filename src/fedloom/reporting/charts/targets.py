"""How soon targets are reached, and how many times sooner than by the next best arm."""

import math
import statistics
from collections.abc import Sequence

from matplotlib.axes import Axes

from ..report_data import ReportData
from ..targets import Amount, Reach, gain, median, reach, targets
from . import drawing
from .drawing import Absent, Chart, Mark, Panel, Record, beside, listed

TITLE = "Rounds to target"
COLUMNS = ("arm", "tier", "target", "reached", "rounds", "megabytes", "simulated_seconds", "gain")
STEPS = 8  # targets of a run alone


def rounds_to_target(subject: ReportData) -> Chart | Absent:
    if not subject.judged:
        return Absent(TITLE, "nothing was judged yet")
    return _of_arms(subject) if subject.several else _of_tiers(subject)


def _of_arms(subject: ReportData) -> Chart | Absent:
    """To what the baseline ends with, less the margin; >: not within the rounds there were."""
    arms, baseline = [group.arm for group in subject.groups], subject.baseline
    assert baseline is not None
    aims = targets(arms, subject.tiers, subject.test, baseline, subject.terms.margin)
    found = {
        tier: [reach(arm, tier, subject.test, target) for arm in arms if arm.serving[tier].can_carry]
        for tier, target in aims.items()
    }
    records = [_record(one, tried, subject.several) for tried in found.values() for one in tried]
    panels = [_bars(tried) for tried in found.values() if tried]
    return Chart("targets", TITLE, _read_arms(subject, found, baseline), COLUMNS, records, panels)


def _record(one: Reach, tried: Sequence[Reach], compared: bool) -> Record:
    others = [median(other.rounds) for other in tried if other is not one]
    rounds, moved = median(one.rounds), median(one.bytes)
    clock = median(one.seconds).value if one.seconds else None
    ratio = gain(rounds, others) if compared and others else None
    return (one.arm, one.tier, one.target, int(rounds.exact), rounds.value, moved.value / 1e6, clock, ratio)


def _bars(tried: Sequence[Reach]) -> Panel:
    tier, aim = tried[0].tier, tried[0].metric.said(tried[0].target)
    said = [(one.arm, median(one.rounds)) for one in tried]

    def draw(axes: Axes) -> None:
        for place, (_, amount) in enumerate(said):
            colour = drawing.colour(place)
            axes.barh(place, amount.value, color=colour, alpha=1.0 if amount.exact else 0.35)
            axes.annotate(amount.said(), (amount.value, place), xytext=(4, -3), textcoords="offset points")
        axes.set_yticks(range(len(said)), [name for name, _ in said])
        axes.invert_yaxis()
        drawing.told(axes, f"rounds to {aim}", "")
        drawing.whole(axes.xaxis)

    alt = f"Rounds to {aim} for tier {tier}: " + "; ".join(f"{name} {one.said()}" for name, one in said)
    return Panel(
        alt,
        draw,
        f"tier {tier}: {aim}",
        tier,
        (5.0, 0.7 + 0.4 * len(said)),
        beside([name for name, _ in said]),
    )


def _read_arms(subject: ReportData, found: dict[str, list[Reach]], baseline: str) -> str:
    parts = []
    for tier, (this, *others) in found.items():
        best = gain(median(this.rounds), [median(other.rounds) for other in others]) if others else None
        if best is not None:
            parts.append(f"on tier {tier} the soonest other arm takes {best} times the rounds of {this.arm}")
    told = f"{listed(parts)[0].upper()}{listed(parts)[1:]}. " if parts else ""
    return (
        f"{told}The target is what {baseline} ends with, in the median over seeds, {_short_of(subject)}; pale bars did "
        "not get there."
    )


def _short_of(subject: ReportData) -> str:
    margin = subject.terms.margin
    if not subject.metric.steps:
        return f"and {margin:g} more"
    return f"less {margin:g} point{'' if margin == 1 else 's'}"


def _of_tiers(subject: ReportData) -> Chart | Absent:
    """A ladder of targets up to the best that any tier reached."""
    arm = subject.groups[0].arm
    if not arm.metric.unit:
        return Absent(TITLE, "round numbers are no targets for a perplexity; of several runs one has its end as target")
    curves = {tier: arm.curves(tier, subject.test) for tier in subject.tiers}
    values = [row.value for by_seed in curves.values() for curve in by_seed for row in curve]
    aims = _ladder(min(values, default=math.nan), max(values, default=math.nan))
    if not aims:
        return Absent(TITLE, "accuracy has hardly changed yet")
    found = [[reach(arm, tier, subject.test, aim) for aim in aims] for tier in subject.tiers if any(curves[tier])]
    records = [_record(one, [], False) for tried in found for one in tried]
    legend = [Mark(tried[0].tier, place, tried[0].tier) for place, tried in enumerate(found)]
    return Chart(
        "targets", TITLE, _read_tiers(found), COLUMNS[:-1], [one[:-1] for one in records], [_steps(found)], legend
    )


def _ladder(low: float, high: float) -> list[float]:
    """Round numbers between what there was first and best."""
    if not high > low:
        return []
    step = next(one for one in (1, 2, 5, 10, 20) if (high - low) / one <= STEPS or one == 20)
    return [float(aim) for aim in range(math.ceil(low / step) * step, math.floor(high) + 1, step) if aim > 0]


def _steps(found: Sequence[Sequence[Reach]]) -> Panel:
    def draw(axes: Axes) -> None:
        for place, tried in enumerate(found):
            reached = [(one.target, median(one.rounds).value) for one in tried if median(one.rounds).exact]
            drawing.line(axes, [aim for aim, _ in reached], [number for _, number in reached], place, tried[0].tier)
        drawing.whole(axes.yaxis)
        drawing.told(axes, "target: accuracy, %", "rounds needed")

    alt = "Rounds that each tier needed to reach targets: " + "; ".join(_highest(tried) for tried in found)
    return Panel(alt, draw)


def _highest(tried: Sequence[Reach]) -> str:
    reached = [one for one in tried if median(one.rounds).exact]
    if not reached:
        return f"{tried[0].tier} reached none of them"
    return f"{tried[0].tier} reached {reached[-1].target:.0f} % in {_count(median(reached[-1].rounds))}"


def _count(amount: Amount) -> str:
    return f"{amount.said()} round{'' if amount.value == 1 else 's'}"


def _read_tiers(found: Sequence[Sequence[Reach]]) -> str:
    common = [
        statistics.fmean(one.value for one in tried_at)
        for tried_at in zip(*([median(one.rounds) for one in tried] for tried in found), strict=True)
        if all(amount.exact for amount in tried_at)
    ]
    said = f"{listed([_highest(tried) for tried in found])}."
    if len(found) > 1 and common:
        last = found[0][len(common) - 1].target
        return f"All tiers get to {last:.0f} %; {said}"
    return said[0].upper() + said[1:]
