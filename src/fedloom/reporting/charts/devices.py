"""Charts by device: final values, the worst tenth, devices worse off than alone, fine-tuning, and their data."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ...evaluation import Row
from ...wording import format_range, join_words, pluralize
from ..paired_stats import ACCURACY, PERPLEXITY, ComparedMetric, compared_metric
from ..report_data import Group, ReportData, RunReader
from .drawing import (
    INK,
    NARROW,
    WIDE,
    Axis,
    Bar,
    Cells,
    Chart,
    ChartRow,
    Dot,
    Key,
    Line,
    Look,
    MarkKind,
    MissingChart,
    Panel,
    ReferenceLine,
    row_height,
    shorten,
)
from .looks import arm_look, tier_look

PERSONALIZED_TITLE = "Initial against personalized accuracy"
PARTITION_TITLE, ALONE_TITLE = "Data by device", "Devices worse off than alone"
MAX_DEVICES = 60  # rows of a map; of more devices, every n-th is shown
MAX_BARS = 120  # devices that have a bar of their own
BIN_ROW = 54  # pixels of a row of bars


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
        for device in _device_values(metric.name, group, reader)
    ]
    if not devices:
        reason = "devices were not evaluated one by one (evaluation.per_device), or there is no local test"
        return MissingChart(title, reason)
    records: list[ChartRow] = [(one.arm, one.seed, one.device, one.tier, one.value) for one in devices]
    columns = ("arm", "seed", "device", "tier", metric.name)
    by_arm: dict[str, list[DeviceValue]] = {}
    for device in devices:
        by_arm.setdefault(device.arm, []).append(device)
    panel = _arms_panel(report, metric, by_arm) if len(by_arm) > 1 else _histogram(report, metric, devices)
    sentence = _devices_sentence(metric, by_arm)
    note = (
        "From the mean of the worst tenth of devices (hollow) to the mean of all (filled) that can run the model."
        if len(by_arm) > 1
        else ""
    )
    return Chart("devices", title, sentence, columns, records, [panel], note=note if metric.is_directed else "")


def _device_values(metric: str, group: Group, reader: RunReader) -> list[DeviceValue]:
    """The last value of every device that can run the arm's model."""
    rows = [row for row in reader.rows if row.device and row.metric == metric and row.test in ("local", "unseen")]
    last = max((row.round for row in rows), default=0)
    chosen = group.arm.candidate or next((row.candidate for row in rows), "")
    return [
        DeviceValue(group.name, reader.seed, row.device, row.tier, row.value)
        for row in rows
        if row.round == last and row.candidate == chosen and _is_own_tier(row, reader) and not math.isnan(row.value)
        and _can_run(group, reader.tier_of.get(row.device, row.tier))
    ]  # fmt: skip


def _can_run(group: Group, tier: str) -> bool:
    return tier not in group.arm.serving or group.arm.serving[tier].can_run


def _is_own_tier(row: Row, reader: RunReader) -> bool:
    """A server model is evaluated on every device at every tier; only the device's own tier counts."""
    trained = [tier for tier in reader.fleet["tiers"] if tier.get("trained", True)]
    return not reader.tier_of or reader.tier_of.get(row.device) == row.tier or len(trained) == 1


def _histogram(report: ReportData, metric: ComparedMetric, devices: Sequence[DeviceValue]) -> Panel:
    """A row of bars per tier, so that tiers never cover each other, and lines at the mean and at the worst tenth."""
    tiers = [tier for tier in report.tiers if any(device.tier == tier for device in devices)]
    values = [device.value for device in devices]
    low, width = (0.0, 5.0) if metric.unit == " %" else (min(values), (max(values) - min(values)) / 20 or 1.0)
    counts: dict[tuple[str, int], int] = {}
    for device in devices:
        key = device.tier, min(int((device.value - low) / width), 19)
        counts[key] = counts.get(key, 0) + 1
    highest = max(counts.values())
    marks: list[MarkKind] = []
    for (tier, at), count in sorted(counts.items()):
        row, start = tiers.index(tier), low + at * width
        tip = f"{pluralize(count, f'{tier} device')} from {metric.number(start)} to {metric.format(start + width)}"
        top = row + 0.45 - 0.85 * count / highest
        marks.append(Bar(start + 0.05 * width, start + 0.95 * width, top, row + 0.45, tier_look(report, tier), tip))
    if metric.is_directed:
        worst, mean = _worst_mean(metric, devices), _mean(devices)
        marks.append(ReferenceLine(worst, Look("--bad", "2 3"), f"worst tenth {metric.format(worst)}"))
        marks.append(ReferenceLine(mean, Look("--ink", "7 3"), f"mean {metric.format(mean)}"))
    by_tier = {tier: [device for device in devices if device.tier == tier] for tier in tiers}
    parts = [f"{tier} {_range(metric, of_tier)}" for tier, of_tier in by_tier.items()]
    alt = f"Histogram of {metric.name} per device: {'; '.join(parts)}"
    unit = f",{metric.unit}" if metric.unit else ""
    x = Axis(f"{metric.name} on a device's own test examples{unit}")
    return Panel(alt, marks, x, Axis(names=tiers), height=row_height(len(tiers), BIN_ROW) + 28)


def _arms_panel(report: ReportData, metric: ComparedMetric, by_arm: dict[str, list[DeviceValue]]) -> Panel:
    """A row per arm: the mean of all devices, and of the worst tenth."""
    marks: list[MarkKind] = []
    for row, (arm, devices) in enumerate(by_arm.items()):
        look, mean = arm_look(report, arm), _mean(devices)
        text = metric.format(mean)
        if metric.is_directed:
            worst = _worst_mean(metric, devices)
            marks.append(Bar(min(worst, mean), max(worst, mean), row - 0.06, row + 0.06, look))
            marks.append(Dot(worst, row, look, f"{arm}, worst tenth: {metric.format(worst)}", hollow=True, size=5))
            text = f"{metric.number(worst)} → {metric.format(mean)}"
        marks.append(Dot(mean, row, look, f"{arm}, all devices: {metric.format(mean)}", size=5.5, text=text))
    parts = [f"{arm} {_range(metric, devices)}" for arm, devices in by_arm.items()]
    alt = f"Mean {metric.name} of all devices and of the worst tenth by arm: {'; '.join(parts)}"
    unit = f",{metric.unit}" if metric.unit else ""
    x, y = Axis(f"{metric.name} on a device's own test examples{unit}"), Axis(names=list(by_arm))
    return Panel(alt, marks, x, y, height=row_height(len(by_arm)))


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
        ordered = sorted(by_arm, key=lambda arm: -metric.sign * _worst_mean(metric, by_arm[arm]))
        best, last = ordered[0], ordered[-1]
        return (
            f"The worst tenth of devices is best off with {best}, with a mean {metric.name} of {worst[best]} "
            f"(all devices {mean[best]}), and worst off with {last}, with {worst[last]} (all devices {mean[last]})."
        )
    ((arm, devices),) = by_arm.items()
    of_worst = f"{worst[arm]} for the worst tenth of devices"
    return f"Mean {metric.name} is {mean[arm]}, and {of_worst}; {_range(metric, devices)}."


def _worst_mean(metric: ComparedMetric, devices: Sequence[DeviceValue]) -> float:
    return worst_tenth([device.value for device in devices], metric.sign)


def _mean(devices: Sequence[DeviceValue]) -> float:
    return statistics.fmean(device.value for device in devices)


def build_alone_chart(report: ReportData) -> Chart | MissingChart:
    """Negative transfer: the devices for which training alone gives a better model, on their own test examples."""
    metric = report.metric
    if "standalone" not in [group.name for group in report.groups] or report.groups[0].name == "standalone":
        return MissingChart(ALONE_TITLE, "there is no arm in which devices train alone (control standalone)")
    if not metric.is_directed:
        return MissingChart(ALONE_TITLE, f"{metric.name} does not say whether higher is better")
    by_arm = {group.name: _values_by_device(metric, group) for group in report.groups}
    alone = by_arm.pop("standalone")
    gains = {
        arm: {key: metric.sign * (value - alone[key]) for key, value in values.items() if key in alone}
        for arm, values in by_arm.items()
    }
    gains = {arm: of_arm for arm, of_arm in gains.items() if of_arm}
    if report.groups[0].name not in gains:
        return MissingChart(ALONE_TITLE, "devices were not evaluated one by one (evaluation.per_device)")
    records: list[ChartRow] = [
        (arm, seed, device, gain, int(gain < 0))
        for arm, of_arm in gains.items()
        for (seed, device), gain in of_arm.items()
    ]
    columns = ("arm", "seed", "device", "gain", "worse_off")
    first = report.groups[0].name
    panels = [_gains_panel(report, first, sorted(gains[first].values())), _worse_off_panel(report, gains)]
    sentence = _alone_sentence(first, gains[first], metric)
    note = "Every device counts as it was measured; with few test examples per device, single bars are uncertain."
    return Chart("alone", ALONE_TITLE, sentence, columns, records, panels, note=note)


def _values_by_device(metric: ComparedMetric, group: Group) -> dict[tuple[int, str], float]:
    devices = [device for reader in group.readers for device in _device_values(metric.name, group, reader)]
    return {(device.seed, device.device): device.value for device in devices}


def _gains_panel(report: ReportData, arm: str, gains: Sequence[float]) -> Panel:
    """The gain of every device over training alone, from the lowest to the highest; of many, every n-th."""
    metric, step = report.metric, -(-len(gains) // MAX_BARS)
    unit = metric.difference_unit.strip() or metric.name
    marks: list[MarkKind] = [
        Bar(at - 0.4, at + 0.4, 0.0, gain, Look("--bad" if gain < 0 else "--good", arm=arm),
            f"{metric.number(gain, '+')}{metric.difference_unit}")
        for at, gain in enumerate(gains[::step])
    ]  # fmt: skip
    ends = f"from {metric.number(gains[0], '+')} to {metric.number(gains[-1], '+')}"
    alt = f"Gain of {arm} over training alone, device by device, {ends}"
    x = Axis("devices, sorted" + (f", one in {step}" if step > 1 else ""), low=-1, high=len(gains[::step]))
    return Panel(alt, [ReferenceLine(0.0, INK, across="y"), *marks], x, Axis(f"gain, {unit}"), arm, width=NARROW)


def _worse_off_panel(report: ReportData, gains: dict[str, dict[tuple[int, str], float]]) -> Panel:
    shares = {arm: 100 * sum(gain < 0 for gain in values.values()) / len(values) for arm, values in gains.items()}
    marks: list[MarkKind] = [
        Bar(0, share, row - 0.3, row + 0.3, arm_look(report, arm), f"{arm}: {share:.0f} %", f"{share:.0f} %")
        for row, (arm, share) in enumerate(shares.items())
    ]
    parts = "; ".join(f"{arm} {share:.0f} %" for arm, share in shares.items())
    x = Axis("devices worse off than alone, %", from_zero=True, high=max(5.0, 1.05 * max(shares.values())))
    alt = f"Share of devices that are worse off than alone: {parts}"
    return Panel(alt, marks, x, Axis(names=list(shares)), "all arms", width=NARROW, height=row_height(len(shares)))


def _alone_sentence(arm: str, gains: dict[tuple[int, str], float], metric: ComparedMetric) -> str:
    worse, mean = sum(gain < 0 for gain in gains.values()), statistics.fmean(gains.values())
    seeds = len({seed for seed, _ in gains})
    over = f" over {seeds} seeds" if seeds > 1 else ""
    size = f"{metric.number(abs(mean))}{metric.difference_unit}"
    change = f"gains {size}" if mean > 0 else f"loses {size}" if mean < 0 else "gains nothing"
    if not worse:
        return f"With {arm} no device of {len(gains)}{over} is worse off than alone; the mean device {change}."
    return (
        f"With {arm} {worse} of {pluralize(len(gains), 'device')}{over} ({100 * worse / len(gains):.0f} %) "
        f"{'is' if worse == 1 else 'are'} worse off than alone; the mean device {change}."
    )


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

    marks: list[MarkKind] = [Line("", ends, ends, Look("--soft"), step=False, labeled=False)]
    for (tier, device), pair in pairs.items():
        tip = f"device {device}, {tier}: {metric.format(pair['initial'])} → {metric.format(pair['personalized'])}"
        marks.append(Dot(pair["initial"], pair["personalized"], tier_look(report, tier), tip, size=3.5, opacity=0.8))
    unit = f",{metric.unit}" if metric.unit else ""
    x, y = Axis(f"initial {metric.name}{unit}"), Axis(f"personalized {metric.name}{unit}")
    parts = [_describe_tuning(tier, of_tier, metric) for tier, of_tier in by_tier.items() if of_tier]
    alt = f"Personalized against initial {metric.name}, a point per device and tier; " + "; ".join(parts)
    legend = [Key(tier, tier_look(report, tier), "point") for tier in tiers if by_tier[tier]]
    columns = ("tier", "device", "initial", "personalized")
    side = "above" if metric.sign > 0 else "below"
    sentence = f"Fine-tuning on a device's own data takes {join_words(parts)}; {side} the line it helps."
    panel = Panel(alt, marks, x, y, height=320)
    return Chart("personalized", title, sentence, columns, records, [panel], legend)


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
    shown, values = devices[::step], counts[::step]
    most = max(count for line in values for count in line) or 1
    shades = [[count / most for count in line] for line in values]
    texts = [[pluralize(count, "example") for count in line] for line in values]
    rows = [f"{device} {reader.tier_of.get(device, '')}".strip() for device in shown]
    extent = f"{pluralize(len(shown), 'device')} by {pluralize(len(classes), noun)}"
    alt = f"Map of {extent}, darker where a device holds more examples"
    columns = ("device", "tier", noun, "examples")
    height = row_height(len(shown), 14 if len(shown) > 12 else 20)
    panel = Panel(alt, [Cells(shades, texts, rows, shorten(classes))], Axis(noun), width=WIDE, height=min(height, 520))
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
