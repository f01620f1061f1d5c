"""How good the models are against what was spent on them: rounds, or bytes."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes

from ...evaluation import Row
from ..report_data import Group, ReportData
from ..targets import bytes_to
from . import drawing
from .drawing import MissingChart, Chart, Mark, Panel, ChartRow, join_words, format_bytes


@dataclass(frozen=True)
class Series:
    """What the devices of a tier got from an arm, evaluation by evaluation."""

    arm: str
    tier: str
    index: int
    x: list[float]
    by_seed: list[list[float]]  # evaluation by evaluation, seed by seed

    @property
    def mean(self) -> list[float]:
        return [statistics.fmean(values) for values in self.by_seed]

    @property
    def spread(self) -> list[float]:
        return [statistics.stdev(values) if len(values) > 1 else 0.0 for values in self.by_seed]


Spent = Callable[[Sequence[Row], int], float]
"""What a run had spent at the end of a round."""


def series(report: ReportData, spent: Spent) -> list[Series]:
    """Arms that give a tier's devices a model they can carry; of a run alone, its tiers."""
    found = []
    for number, group in enumerate(report.groups):
        for index, tier in enumerate(report.tiers):
            if group.arm.serving[tier].can_run:
                found.append(_series(report, group, tier, number if report.has_several_arms else index, spent))
    return [one for one in found if one.x]


def _series(report: ReportData, group: Group, tier: str, index: int, spent: Spent) -> Series:
    curves = group.arm.curves(tier, report.test)
    common = sorted(set.intersection(*({row.round for row in curve} for curve in curves))) if curves else []
    values = [{row.round: row.value for row in curve} for curve in curves]
    x = [statistics.fmean(spent(rows, number) for rows in group.arm.runs) for number in common]
    return Series(group.name, tier, index, x, [[one[number] for one in values] for number in common])


def rounds_spent(rows: Sequence[Row], number: int) -> float:
    return number


def bytes_spent(rows: Sequence[Row], number: int) -> float:
    return bytes_to(number, rows) / 1e6


def build_rounds_chart(report: ReportData) -> Chart | MissingChart:
    title = f"{report.metric.name.capitalize()} against rounds"
    found = series(report, rounds_spent)
    if not found:
        return MissingChart(title, "nothing was judged yet")
    return _chart(report, found, "learning_rounds", title, "round", _read_rounds(report, found))


def build_bytes_chart(report: ReportData) -> Chart | MissingChart:
    title = f"{report.metric.name.capitalize()} against bytes moved"
    found = series(report, bytes_spent)
    if not any(one.x[-1] for one in found):
        return MissingChart(title, "no device moved a byte")
    return _chart(report, found, "learning_bytes", title, "megabytes", _read_bytes(report, found))


def _chart(report: ReportData, found: Sequence[Series], key: str, title: str, unit: str, sentence: str) -> Chart:
    columns = ("arm", "tier", unit, f"{report.metric.name}_mean", f"{report.metric.name}_std", "seeds")
    records: list[ChartRow] = [
        (one.arm, one.tier, x, mean, std, len(values))
        for one in found
        for x, mean, std, values in zip(one.x, one.mean, one.spread, one.by_seed, strict=True)
    ]
    label = "round" if unit == "round" else "MB moved by all devices, down and up"
    panels = _panels(report, found, title, label)
    marks = dict.fromkeys(Mark(one.arm if report.has_several_arms else one.tier, one.index) for one in found)
    tiers = {one.tier: one.index for one in found}
    legend = list(marks) if report.has_several_arms else [Mark(tier, index, tier) for tier, index in tiers.items()]
    return Chart(key, title, sentence, columns, records, panels, legend)


def _panels(report: ReportData, found: Sequence[Series], title: str, label: str) -> list[Panel]:
    """A panel for each tier with all arms; of a run alone, one with all tiers."""
    y = report.metric.axis_label
    tiers = [tier for tier in report.tiers if any(one.tier == tier for one in found)] if report.has_several_arms else [""]
    artists = []
    for tier in tiers:
        shown = [one for one in found if not tier or one.tier == tier]
        alt = f"{title}{f', tier {tier}' if tier else ''}: " + "; ".join(_ends(report, one) for one in shown)
        wide = (5.0, 3.0) if tier else (6.4, 3.4)
        artists.append(Panel(alt, _drawing(shown, label, y, bool(tier)), f"tier {tier}" if tier else "", tier, wide))
    return artists


def _ends(report: ReportData, one: Series) -> str:
    said = report.metric.format
    name = one.arm if report.has_several_arms else one.tier
    return f"{name} from {said(one.mean[0])} to {said(one.mean[-1])}"


def _drawing(shown: Sequence[Series], label: str, y: str, of_arms: bool) -> Callable[[Axes], None]:
    def draw(axes: Axes) -> None:
        for one in shown:
            tier = "" if of_arms else one.tier
            drawing.draw_line(axes, one.x, one.mean, one.index, tier)
            if any(one.spread):
                low = [mean - std for mean, std in zip(one.mean, one.spread, strict=True)]
                high = [mean + std for mean, std in zip(one.mean, one.spread, strict=True)]
                drawing.draw_band(axes, one.x, low, high, one.index, tier)
        drawing.set_labels(axes, label, y)
        if label == "round":
            drawing.use_integer_ticks(axes.xaxis)

    return draw


def _read_rounds(report: ReportData, found: Sequence[Series]) -> str:
    said, sign = report.metric.format, report.metric.sign
    last = max(one.x[-1] for one in found)
    best = max(found, key=lambda one: sign * one.mean[-1])
    worst = min(found, key=lambda one: sign * one.mean[-1])
    if best is worst:
        return f"After round {last:.0f} {_named(report, best)} is at {said(best.mean[-1])}."
    bands = " Bands are one standard deviation over seeds." if any(any(one.spread) for one in found) else ""
    return (
        f"After round {last:.0f} {_named(report, best)} is best with {said(best.mean[-1])} and "
        f"{_named(report, worst)} last with {said(worst.mean[-1])}.{bands}"
    )


def _read_bytes(report: ReportData, found: Sequence[Series]) -> str:
    totals = {one.arm: one.x[-1] for one in found}
    if len(totals) == 1:
        ends = join_words([f"{one.tier} to {report.metric.format(one.mean[-1])}" for one in found])
        return f"Moving {format_bytes(1e6 * found[0].x[-1])} in all brought {ends}."
    least, most = min(totals, key=totals.__getitem__), max(totals, key=totals.__getitem__)
    return (
        f"{least} moved least, {format_bytes(1e6 * totals[least])}; {most} most, {format_bytes(1e6 * totals[most])}. "
        "Where one curve lies left of another it gets as far with fewer bytes."
    )


def _named(report: ReportData, one: Series) -> str:
    return f"{one.arm} on tier {one.tier}" if report.has_several_arms else f"tier {one.tier}"
