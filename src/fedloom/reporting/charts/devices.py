"""Device by device: how well it is served, what tuning to its own data adds, and what data it holds."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes

from ...evaluation import Row
from ..report_data import ReportData, RunReader
from . import drawing
from .drawing import MissingChart, Chart, Mark, Panel, ChartRow, pluralize, join_words

ACCURACY, TUNED, HOLDINGS = "Accuracy per device", "Initial against personalized accuracy", "Who holds what data"
MOST_LINES = 240  # devices in a map; of more, every so many are shown


@dataclass(frozen=True)
class Served:
    arm: str
    seed: int
    device: str
    tier: str
    accuracy: float


def build_devices_chart(report: ReportData) -> Chart | MissingChart:
    """Of the model a device ends up with, on its own test examples, after the last round."""
    found = [
        one
        for group in report.groups
        for reader in group.readers
        for one in _served(group.name, reader, group.arm.candidate)
    ]
    if not found:
        return MissingChart(ACCURACY, "single devices were not judged: evaluation.per_device, or no local test")
    records: list[ChartRow] = [(one.arm, one.seed, one.device, one.tier, one.accuracy) for one in found]
    columns = ("arm", "seed", "device", "tier", "accuracy")
    tiers = [tier for tier in report.tiers if any(one.tier == tier for one in found)]
    by_arm = {arm: [one for one in found if one.arm == arm] for arm in dict.fromkeys(one.arm for one in found)}
    panels = [_histogram(some, tiers, arm if report.has_several_arms else "") for arm, some in by_arm.items()]
    legend = [Mark(tier, index, tier) for index, tier in enumerate(tiers)]
    return Chart("devices", ACCURACY, _read_served(by_arm), columns, records, panels, legend, marks="areas")


def _served(arm: str, reader: RunReader, candidate: str) -> list[Served]:
    rows = [row for row in reader.rows if row.device and row.metric == "accuracy" and row.test in ("local", "unseen")]
    last = max((row.round for row in rows), default=0)
    chosen = candidate or next((row.candidate for row in rows), "")
    return [
        Served(arm, reader.seed, row.device, row.tier, row.value)
        for row in rows
        if row.round == last and row.candidate == chosen and _own(row, reader) and not math.isnan(row.value)
    ]


def _own(row: Row, reader: RunReader) -> bool:
    """A server's model is judged by every device at every tier; a device has only its own tier's."""
    return not reader.tier_of or reader.tier_of.get(row.device) == row.tier or _one_tier(reader)


def _one_tier(reader: RunReader) -> bool:
    return len([tier for tier in reader.fleet["tiers"] if tier.get("trained", True)]) == 1


def _histogram(some: Sequence[Served], tiers: Sequence[str], title: str) -> Panel:
    """With a line where the worst tenth is."""

    def draw(axes: Axes) -> None:
        edges = [5.0 * step for step in range(21)]
        for index, tier in enumerate(tiers):
            values = [one.accuracy for one in some if one.tier == tier]
            if not values:
                continue
            _, _, artists = axes.hist(
                values, bins=edges, histtype="stepfilled", alpha=0.45, linewidth=1.4, color=drawing.color(index),
                linestyle=drawing.dash(index), edgecolor=drawing.color(index),
            )  # fmt: skip
            drawing.tag_tier(artists, tier)
        axes.axvline(worst_tenth([one.accuracy for one in some]), color=drawing.INK, linewidth=1, linestyle=":")
        drawing.set_labels(axes, "accuracy on a device's own test examples, %", "devices")
        drawing.use_integer_ticks(axes.yaxis)

    parts = [f"{tier} {_range(of_tier)}" for tier in tiers if (of_tier := [one for one in some if one.tier == tier])]
    size = (5.0, 2.6) if title else (6.4, 3.4)
    return Panel(
        f"Histogram of accuracy per device{f', {title}' if title else ''}: {'; '.join(parts)}", draw, title, "", size
    )


def _range(some: Sequence[Served]) -> str:
    values = [one.accuracy for one in some]
    return f"{pluralize(len(values), 'device')} from {min(values):.0f} to {max(values):.0f} %"


def worst_tenth(values: Sequence[float]) -> float:
    """The mean of the worst tenth, which is never empty."""
    return statistics.fmean(sorted(values)[: max(1, round(len(values) / 10))])


def _read_served(by_arm: dict[str, list[Served]]) -> str:
    if len(by_arm) > 1:
        parts = [f"{arm} {_worst(some):.1f} % (all devices {_mean(some):.1f} %)" for arm, some in by_arm.items()]
        return f"The worst tenth of devices, the dotted line, get on average {join_words(parts)}."
    (some,) = by_arm.values()
    return (
        f"Devices get {_mean(some):.1f} % on average, the worst tenth of them {_worst(some):.1f} % (dotted); "
        f"{_range(some)}."
    )


def _worst(some: Sequence[Served]) -> float:
    return worst_tenth([one.accuracy for one in some])


def _mean(some: Sequence[Served]) -> float:
    return statistics.fmean(one.accuracy for one in some)


def build_personalized_chart(report: ReportData) -> Chart | MissingChart:
    """FedSup's two figures: before and after a device tunes a tier's model to its own data."""
    reader, tiers = report.first, list(report.tiers)
    pairs: dict[tuple[str, str], dict[str, float]] = {}
    for row in reader.rows:
        if row.device and row.metric in ("initial", "personalized"):
            pairs.setdefault((row.tier, row.device), {})[row.metric] = row.value
    whole = {index: one for index, one in pairs.items() if len(one) == 2}
    if not whole:
        return MissingChart(TUNED, "the recipe has no evaluation.fine_tune")
    records: list[ChartRow] = [
        (tier, device, one["initial"], one["personalized"]) for (tier, device), one in whole.items()
    ]

    def draw(axes: Axes) -> None:
        axes.plot([0, 100], [0, 100], color=drawing.INK, linewidth=0.7, alpha=0.6)
        for index, tier in enumerate(tiers):
            of_tier = [one for (name, _), one in whole.items() if name == tier]
            artists = axes.plot(
                [one["initial"] for one in of_tier], [one["personalized"] for one in of_tier], linestyle="",
                marker=drawing.marker(index), markersize=4, alpha=0.7, color=drawing.color(index),
            )  # fmt: skip
            drawing.tag_tier(list(artists), tier)
        drawing.set_labels(axes, "initial accuracy, %", "personalized accuracy, %")

    said = [_tuned(tier, [one for (name, _), one in whole.items() if name == tier]) for tier in tiers]
    alt = "Personalized against initial accuracy, a point a device and tier; " + "; ".join(filter(None, said))
    legend = [Mark(tier, index, tier) for index, tier in enumerate(tiers)]
    columns = ("tier", "device", "initial", "personalized")
    sentence = f"Tuning to a device's own data takes {join_words([one for one in said if one])}; above the line it helps."
    return Chart(
        "personalized", TUNED, sentence, columns, records, [Panel(alt, draw, size=(6.4, 4.2))], legend, "points"
    )


def _tuned(tier: str, pairs: Sequence[dict[str, float]]) -> str:
    if not pairs:
        return ""
    before, after = (statistics.fmean(one[name] for one in pairs) for name in ("initial", "personalized"))
    better = sum(one["personalized"] > one["initial"] for one in pairs)
    return f"tier {tier} from {before:.1f} % to {after:.1f} % ({better} of {len(pairs)} devices gain)"


def build_partition_chart(report: ReportData) -> Chart | MissingChart:
    reader = report.first
    held = reader.fleet.get("holdings")
    if not held or not reader.fleet["devices"]:
        return MissingChart(HOLDINGS, "the run does not say what its devices hold")
    if not any(map(any, held["counts"])):
        return MissingChart(HOLDINGS, "devices have data of their own, and only they know it")
    devices, classes, counts = reader.fleet["devices"], held["classes"], held["counts"]
    records: list[ChartRow] = [
        (device, reader.tier_of.get(device, ""), name, count)
        for device, line in zip(devices, counts, strict=True)
        for name, count in zip(classes, line, strict=True)
    ]
    step = -(-len(devices) // MOST_LINES)
    some, lines = devices[::step], np.array(counts[::step], dtype=float)

    def draw(axes: Axes) -> None:
        most = lines.max() or 1.0
        drawing.draw_heatmap(axes, lines / most, np.zeros(lines.shape), classes, some)
        drawing.set_labels(axes, "class", "device")

    alt = f"Map of {len(some)} devices by {len(classes)} classes, darker where a device holds more examples"
    height = min(6.0, 1.2 + 0.14 * len(some))
    columns = ("device", "tier", "class", "examples")
    return Chart(
        "partition", HOLDINGS, _read_held(counts, step), columns, records, [Panel(alt, draw, size=(6.0, height))]
    )


def _read_held(counts: Sequence[Sequence[int]], step: int) -> str:
    totals, kinds = [sum(line) for line in counts], [sum(count > 0 for count in line) for line in counts]
    share = statistics.fmean(max(line) / sum(line) for line in counts if sum(line))
    shown = f" One device in {step} is shown." if step > 1 else ""
    return (
        f"A device holds {min(totals):,} to {max(totals):,} examples of {min(kinds)} to {max(kinds)} classes; its most "
        f"frequent class is on average {100 * share:.0f} % of them.{shown}"
    )
