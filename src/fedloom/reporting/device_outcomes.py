"""What a comparison means for single devices: who is worse off than alone, how the worst tenth fares, and by how much.

Negative transfer: a device would do better by training alone, with the arm `standalone` as the measure.
Values are those of a device's own test examples after the last round, with the model that its tier ends up with.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..wording import pluralize
from .paired_stats import LOCAL_TEST, Arm, Difference, compute_difference, mean_and_std, paired_difference

ALONE = "standalone"
WORST_SHARE = 0.1

DeviceValues = dict[str, float]  # by device


@dataclass(frozen=True)
class DeviceOutcomes:
    """One arm, a number per seed in each list; devices that cannot run their model do not count."""

    arm: str
    devices: int
    worst_tenth: list[float]  # mean over the worst tenth of the devices
    worse_off: list[float]  # negative-transfer rate: percent of the devices that do better alone; empty: unknown
    burden: list[float]  # what these lose, as a mean over all devices; empty: unknown

    def record(self) -> dict[str, Any]:
        """For JSON."""
        known = {"negative_transfer_percent": self.worse_off, "negative_transfer_burden": self.burden}
        return {
            "arm": self.arm, "devices": self.devices, "worst_tenth": mean_and_std(self.worst_tenth),
            **{name: mean_and_std(values) if values else None for name, values in known.items()},
        }  # fmt: skip


def device_values(arm: Arm, tier_of: Mapping[str, str]) -> list[DeviceValues]:
    """By seed, the final value of every device that can run its model; `tier_of`: the tier of each device."""
    served = {device: arm.serving[tier].tier for device, tier in tier_of.items() if arm.serving[tier].can_run}
    found = []
    for rows in arm.runs:
        own = [
            row for row in rows
            if row.device and row.test == LOCAL_TEST and row.metric == arm.metric.name
            and served.get(row.device) == row.tier
        ]  # fmt: skip
        candidate = arm.candidate or next((row.candidate for row in own), "")
        found.append({row.device: row.value for row in own if row.candidate == candidate})  # the last one counts
    return found


def summarize_devices(arms: Sequence[Arm], tier_of: Mapping[str, str]) -> list[DeviceOutcomes]:
    """One record per arm that has values of single devices in every seed; none if tiers are redrawn every round."""
    values = {arm.name: device_values(arm, tier_of) for arm in arms if not arm.failed}
    alone = values.get(ALONE, [])
    known = [arm for arm in arms if values.get(arm.name) and all(values[arm.name])]
    return [_summarize(arm, values[arm.name], [] if arm.name == ALONE else alone) for arm in known]


def _summarize(arm: Arm, values: Sequence[DeviceValues], alone: Sequence[DeviceValues]) -> DeviceOutcomes:
    sign = arm.metric.sign
    worst, worse_off, burden = [], [], []
    for of_seed in values:
        ordered = sorted(of_seed.values(), key=lambda value: sign * value)
        worst.append(statistics.fmean(ordered[: math.ceil(WORST_SHARE * len(ordered))]))
    for of_seed, without in zip(values, alone, strict=False):
        losses = [max(0.0, sign * (without[one] - value)) for one, value in of_seed.items() if one in without]
        if losses:
            worse_off.append(100 * sum(loss > 0 for loss in losses) / len(losses))
            burden.append(statistics.fmean(losses))
    complete = len(worse_off) == len(values)
    return DeviceOutcomes(
        arm.name, len(values[0]), worst, worse_off if complete else [], burden if complete else []
    )  # fmt: skip


def compare_pairs(arms: Sequence[Arm], tiers: Sequence[str], test: str, examples: int) -> list[Difference]:
    """The first arm against every other one at every tier whose devices can run both models."""
    first, *others = arms
    pairs = [
        compute_difference(first, other, tier, test, examples)
        for other in others
        for tier in tiers
        if first.serving[tier].can_run and other.serving[tier].can_run
    ]
    return [pair for pair in pairs if not math.isnan(pair.mean)]


def compare_worst_tenth(arms: Sequence[Arm], outcomes: Sequence[DeviceOutcomes]) -> list[Difference]:
    """The first arm against every other one that serves as many devices, on the worst tenth of them.

    Which devices are worst is not known beforehand, so only the seeds say how certain a difference is.
    """
    by_name = {one.arm: one for one in outcomes}
    first = by_name.get(arms[0].name)
    if first is None:
        return []
    found = []
    for other in arms[1:]:
        theirs = by_name.get(other.name)
        if theirs and theirs.devices == first.devices:
            gap = paired_difference("", arms[0], other, first.worst_tenth, theirs.worst_tenth, math.inf)
            found.append(replace(gap, where="on the worst tenth of devices"))
    return found


def device_sentences(arms: Sequence[Arm], outcomes: Sequence[DeviceOutcomes]) -> list[str]:
    """How many devices the first arm leaves worse off than alone, and how its worst tenth fares against each arm."""
    lines = []
    first = next((one for one in outcomes if one.arm == arms[0].name), None)
    if first and first.worse_off:
        metric = arms[0].metric
        rate, burden = statistics.fmean(first.worse_off), statistics.fmean(first.burden)
        lost = f"the average device loses {metric.number(burden)}{metric.difference_unit} by it"
        lines.append(
            f"{first.arm} leaves {rate:.0f} % of {pluralize(first.devices, 'device')} worse off than {ALONE}; {lost}"
            if rate
            else f"{first.arm} leaves none of {pluralize(first.devices, 'device')} worse off than {ALONE}"
        )
    return [*lines, *(str(gap) for gap in compare_worst_tenth(arms, outcomes))]
