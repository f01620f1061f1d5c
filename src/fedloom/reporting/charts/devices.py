"""Charts by device: the final value, the effect of fine-tuning on its own data, and the classes it holds."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes

from ...evaluation import Row
from ...wording import format_range, join_words, pluralize
from ..paired_stats import ACCURACY, PERPLEXITY, ComparedMetric, compared_metric
from ..report_data import ReportData, RunReader
from . import drawing
from .drawing import Chart, ChartRow, Mark, MissingChart, Panel

PERSONALIZED_TITLE = "Initial against personalized accuracy"
PARTITION_TITLE = "Data by device"
MAX_DEVICES = 240  # rows of a heat map; of more devices, every n-th is shown


@dataclass(frozen=True)
class DeviceValue:
    arm: str
    seed: int
    device: str
    tier: str
    value: float


def build_devices_chart(report: ReportData) -> Chart | MissingChart:
    """The value of the model that a device ends up with, on its own test examples: accuracy, unless the report is about
    another metric that was chosen."""
    metric = ACCURACY if report.metric == PERPLEXITY and not report.terms.metric else report.metric
    title = f"{metric.title} per device"
    devices = [
        device
        for group in report.groups
        for reader in group.readers
        for device in _device_values(metric.name, group.name, reader, group.arm.candidate)
    ]
    if not devices:
        reason = "devices were not evaluated one by one (evaluation.per_device), or there is no local test"
        return MissingChart(title, reason)
    records: list[ChartRow] = [(one.arm, one.seed, one.device, one.tier, one.value) for one in devices]
    columns = ("arm", "seed", "device", "tier", metric.name)
    tiers = [tier for tier in report.tiers if any(device.tier == tier for device in devices)]
    by_arm: dict[str, list[DeviceValue]] = {}
    for device in devices:
        by_arm.setdefault(device.arm, []).append(device)
    several = report.has_several_arms
    panels = [_histogram(metric, of_arm, tiers, arm if several else "") for arm, of_arm in by_arm.items()]
    legend = [Mark(tier, index, tier) for index, tier in enumerate(tiers)]
    sentence = _devices_sentence(metric, by_arm)
    return Chart("devices", title, sentence, columns, records, panels, legend, marks="areas")


def _device_values(metric: str, arm: str, reader: RunReader, candidate: str) -> list[DeviceValue]:
    rows = [row for row in reader.rows if row.device and row.metric == metric and row.test in ("local", "unseen")]
    last = max((row.round for row in rows), default=0)
    chosen = candidate or next((row.candidate for row in rows), "")
    return [
        DeviceValue(arm, reader.seed, row.device, row.tier, row.value)
        for row in rows
        if row.round == last and row.candidate == chosen and _is_own_tier(row, reader) and not math.isnan(row.value)
    ]


def _is_own_tier(row: Row, reader: RunReader) -> bool:
    """A server model is evaluated on every device at every tier; only the device's own tier counts."""
    trained = [tier for tier in reader.fleet["tiers"] if tier.get("trained", True)]
    return not reader.tier_of or reader.tier_of.get(row.device) == row.tier or len(trained) == 1


def _histogram(metric: ComparedMetric, devices: Sequence[DeviceValue], tiers: Sequence[str], title: str) -> Panel:
    """Values by tier, with a dotted line at the mean of the worst tenth."""

    def draw(axes: Axes) -> None:
        edges: list[float] | int = [5.0 * step for step in range(21)] if metric.unit == " %" else 20
        for index, tier in enumerate(tiers):
            values = [device.value for device in devices if device.tier == tier]
            if not values:
                continue
            _, _, artists = axes.hist(
                values, bins=edges, histtype="stepfilled", alpha=0.45, linewidth=1.4, color=drawing.color(index),
                linestyle=drawing.dash(index), edgecolor=drawing.color(index),
            )  # fmt: skip
            drawing.tag_tier(artists, tier)
        if metric.is_directed:
            axes.axvline(_worst_mean(metric, devices), color=drawing.INK, linewidth=1, linestyle=":")
        unit = f",{metric.unit}" if metric.unit else ""
        drawing.set_labels(axes, f"{metric.name} on a device's own test examples{unit}", "devices")
        drawing.use_integer_ticks(axes.yaxis)

    by_tier = {tier: [device for device in devices if device.tier == tier] for tier in tiers}
    parts = [f"{tier} {_range(metric, of_tier)}" for tier, of_tier in by_tier.items() if of_tier]
    alt = f"Histogram of {metric.name} per device{f', {title}' if title else ''}: {'; '.join(parts)}"
    return Panel(alt, draw, title, "", (5.0, 2.6) if title else (6.4, 3.4))


def _range(metric: ComparedMetric, devices: Sequence[DeviceValue]) -> str:
    values = [device.value for device in devices]
    if metric.unit == " %":
        return f"{pluralize(len(values), 'device')} from {min(values):.0f} to {max(values):.0f} %"
    return f"{pluralize(len(values), 'device')} from {metric.number(min(values))} to {metric.format(max(values))}"


def worst_tenth(values: Sequence[float], sign: int = 1) -> float:
    """The mean of the worst tenth, at least one value; `sign` is -1 if lower values are better."""
    return statistics.fmean(sorted(values, key=lambda value: sign * value)[: max(1, round(len(values) / 10))])


def _devices_sentence(metric: ComparedMetric, by_arm: dict[str, list[DeviceValue]]) -> str:
    mean = {arm: metric.format(_mean(devices)) for arm, devices in by_arm.items()}
    if not metric.is_directed:
        parts = [f"{arm} {mean[arm]}, {_range(metric, some)}" for arm, some in by_arm.items()]
        return f"Mean {metric.name} over devices: {'; '.join(parts)}."
    worst = {arm: metric.format(_worst_mean(metric, devices)) for arm, devices in by_arm.items()}
    if len(by_arm) > 1:
        parts = [f"{arm} {worst[arm]} (all devices {mean[arm]})" for arm in by_arm]
        return f"Mean {metric.name} of the worst tenth of devices (dotted): {join_words(parts)}."
    ((arm, devices),) = by_arm.items()
    return (
        f"Mean {metric.name} is {mean[arm]}, and {worst[arm]} for the worst tenth of devices "
        f"(dotted); {_range(metric, devices)}."
    )


def _worst_mean(metric: ComparedMetric, devices: Sequence[DeviceValue]) -> float:
    return worst_tenth([device.value for device in devices], metric.sign)


def _mean(devices: Sequence[DeviceValue]) -> float:
    return statistics.fmean(device.value for device in devices)


def build_personalized_chart(report: ReportData) -> Chart | MissingChart:
    """Accuracy, or the task's headline, before and after a device fine-tunes a tier's model on its own data."""
    reader, tiers = report.first, list(report.tiers)
    headline = next((name for name, info in reader.metrics.items() if info.headline), ACCURACY.name)
    metric = compared_metric(headline, reader.metrics)
    title = PERSONALIZED_TITLE.replace(ACCURACY.name, metric.name)
    values: dict[tuple[str, str], dict[str, float]] = {}
    for row in reader.rows:
        if row.device and row.metric in ("initial", "personalized"):
            values.setdefault((row.tier, row.device), {})[row.metric] = row.value
    pairs = {key: pair for key, pair in values.items() if len(pair) == 2}
    if not pairs:
        return MissingChart(title, "the recipe has no evaluation.fine_tune")
    by_tier = {tier: [pair for (name, _), pair in pairs.items() if name == tier] for tier in tiers}
    records: list[ChartRow] = [
        (tier, device, pair["initial"], pair["personalized"]) for (tier, device), pair in pairs.items()
    ]

    every = [value for pair in pairs.values() for value in pair.values()]
    ends = [0.0, 100.0] if metric.unit == " %" else [min(every), max(every)]

    def draw(axes: Axes) -> None:
        axes.plot(ends, ends, color=drawing.INK, linewidth=0.7, alpha=0.6)
        for index, (tier, of_tier) in enumerate(by_tier.items()):
            artists = axes.plot(
                [pair["initial"] for pair in of_tier], [pair["personalized"] for pair in of_tier], linestyle="",
                marker=drawing.marker(index), markersize=4, alpha=0.7, color=drawing.color(index),
            )  # fmt: skip
            drawing.tag_tier(list(artists), tier)
        unit = f",{metric.unit}" if metric.unit else ""
        drawing.set_labels(axes, f"initial {metric.name}{unit}", f"personalized {metric.name}{unit}")

    parts = [_describe_tuning(tier, of_tier, metric) for tier, of_tier in by_tier.items() if of_tier]
    alt = f"Personalized against initial {metric.name}, a point per device and tier; " + "; ".join(parts)
    legend = [Mark(tier, index, tier) for index, tier in enumerate(tiers)]
    columns = ("tier", "device", "initial", "personalized")
    side = "above" if metric.sign > 0 else "below"
    sentence = f"Fine-tuning on a device's own data takes {join_words(parts)}; {side} the line it helps."
    panel = Panel(alt, draw, size=(6.4, 4.2))
    return Chart("personalized", title, sentence, columns, records, [panel], legend, "points")


def _describe_tuning(tier: str, pairs: Sequence[dict[str, float]], metric: ComparedMetric) -> str:
    before, after = (statistics.fmean(pair[name] for pair in pairs) for name in ("initial", "personalized"))
    better = sum(metric.sign * (pair["personalized"] - pair["initial"]) > 0 for pair in pairs)
    gained = f"{better} of {pluralize(len(pairs), 'device')} gained"
    return f"tier {tier} from {metric.format(before)} to {metric.format(after)} ({gained})"


def build_partition_chart(report: ReportData) -> Chart | MissingChart:
    reader = report.first
    held = reader.fleet.get("holdings")
    if not held or not reader.fleet["devices"]:
        return MissingChart(PARTITION_TITLE, "the run does not record which data its devices hold")
    if not any(map(any, held["counts"])):
        return MissingChart(PARTITION_TITLE, "the data of real devices is known only to them")
    devices, classes, counts = reader.fleet["devices"], held["classes"], held["counts"]
    noun = held.get("noun", "class")
    records: list[ChartRow] = [
        (device, reader.tier_of.get(device, ""), name, count)
        for device, line in zip(devices, counts, strict=True)
        for name, count in zip(classes, line, strict=True)
    ]
    step = -(-len(devices) // MAX_DEVICES)
    shown, values, labels = devices[::step], np.array(counts[::step], dtype=float), drawing.shorten(classes)

    def draw(axes: Axes) -> None:
        drawing.draw_heatmap(axes, values / (values.max() or 1.0), np.zeros(values.shape), labels, shown, slant=True)
        drawing.set_labels(axes, noun, "device")

    extent = f"{pluralize(len(shown), 'device')} by {pluralize(len(classes), noun)}"
    alt = f"Map of {extent}, darker where a device holds more examples"
    columns = ("device", "tier", noun, "examples")
    size = (6.0, min(6.0, 1.2 + 0.14 * len(shown)))
    panel = Panel(alt, draw, size=size, labels=drawing.heatmap_labels_height(labels))
    sentence = _partition_sentence(counts, step, noun, held.get("examples") or [sum(line) for line in counts])
    return Chart("partition", PARTITION_TITLE, sentence, columns, records, [panel])


def _partition_sentence(counts: Sequence[Sequence[int]], step: int, noun: str, totals: Sequence[int]) -> str:
    classes = [sum(count > 0 for count in line) for line in counts]
    share = statistics.fmean(max(line) / total for line, total in zip(counts, totals, strict=True) if total)
    shown = f" One device in {step} is shown." if step > 1 else ""
    return (
        f"A device holds {format_range(min(totals), max(totals), 'example')} of "
        f"{format_range(min(classes), max(classes), noun)}; its "
        f"most frequent {noun} makes up {100 * share:.0f} % of them on average.{shown}"
    )
