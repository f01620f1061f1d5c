"""Identify the devices of a real fleet by their keys; assign each the largest tier that fits, up to its `max_tier`."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..analysis.costs import tier_costs
from ..analysis.planning import DeviceSpec, plan_fleet
from ..engines import Refusal
from ..fleet import Fleet, count_parameters
from ..recipe.errors import RecipeIssue
from ..recipe.load import LoadedRecipe, load
from ..recipe.registries import Registries
from .registry import FleetRegistry
from .remote import device_by_index

DeviceReport = Mapping[str, Any]
"""What a device reports about itself, as `describe_device` returns it."""

HARDWARE = ("speed", "memory", "bandwidth")
MAX_EXAMPLES = 1 << 40  # a device that reports as many or more is not believed


def identify_by_key(enrolled: FleetRegistry, fleet: Fleet) -> Callable[[int, dict[str, Any]], str | Refusal | None]:
    """Resolve a node to the device that has its key; refuse a node that reports another index.

    Returns the device's name or a Refusal. An insecure fleet trusts the reported index; None if that is not valid.
    """

    def identify(node: int, report: DeviceReport) -> str | Refusal | None:
        reported = device_by_index(fleet, node, report)
        if not enrolled.secure:
            return reported
        index = enrolled.index_of_node(node)
        if index is None:
            return Refusal("", "UNREGISTERED", f"node {node}: the key is not registered in this fleet")
        if reported != fleet.name(index):
            message = f"node {node} reports device {reported}, but its key belongs to {enrolled.devices[index].name}"
            return Refusal(fleet.name(index), "OTHER_DEVICE", message)
        return reported

    return identify


def assign_tiers(
    loaded: LoadedRecipe,
    registries: Registries,
    data: Path,
    fleet: Fleet,
    enrolled: FleetRegistry,
    reports: Mapping[str, DeviceReport],
) -> LoadedRecipe:
    """Return the recipe with every device's tier in `fleet.device_tiers`, so that a resumed run has the same tiers.

    If they are already set, only check that none exceeds the device's `max_tier`. `reports` are by device name; devices
    without a report get their `max_tier`, or the largest tier.
    """
    tiers = sorted(fleet.active_tiers, key=lambda tier: -count_parameters(tier.model.shapes()))
    names = [tier.name for tier in tiers]
    for device in enrolled.devices:
        if device.max_tier is not None and device.max_tier not in names:
            message = f"{device.name} is enrolled with tier {device.max_tier!r}, which the recipe does not have"
            raise loaded.error(RecipeIssue(("tiers",), "TIER_NAME", message))
    if loaded.recipe.fleet.device_tiers:
        _check_max_tiers(loaded, enrolled, names)
        return loaded
    deadline = loaded.recipe.faults.deadline
    specs = [
        parse_device_spec(device.name, reports.get(fleet.name(index), {}), deadline)
        for index, device in enumerate(enrolled.devices)
    ]
    plans = plan_fleet(loaded, registries, data, specs, tier_costs(loaded, registries, data, memory=True)).devices
    fits = [None if plan.demand is None else plan.demand.tier for plan in plans]
    document = loaded.recipe.document()
    max_tiers = [device.max_tier for device in enrolled.devices]
    document["fleet"]["device_tiers"] = list(choose_tiers(max_tiers, fits, names))
    return load(json.loads(json.dumps(document)), registries)


def choose_tiers(max_tiers: Sequence[str | None], fits: Sequence[str | None], tiers: Sequence[str]) -> tuple[str, ...]:
    """For each device the smaller of its `max_tier` and the largest tier that fits it.

    `tiers` are all tiers, the largest first. Devices that no tier fits get the smallest.
    """
    pairs = zip(max_tiers, fits, strict=True)
    return tuple(max(max_tier or tiers[0], fit or tiers[-1], key=tiers.index) for max_tier, fit in pairs)


def parse_device_spec(name: str, report: DeviceReport, deadline: float | None) -> DeviceSpec:
    """The hardware that a device reported. Missing or invalid values count as unlimited."""
    hardware = report.get("machine")
    hardware = hardware if isinstance(hardware, dict) else {}
    speed, memory, bandwidth = (_positive_or_inf(hardware.get(key)) for key in HARDWARE)
    examples = report.get("examples")
    count = examples if type(examples) is int and 0 < examples < MAX_EXAMPLES else None
    return DeviceSpec(name, speed, memory, bandwidth, deadline or math.inf, examples=count)


def _check_max_tiers(loaded: LoadedRecipe, enrolled: FleetRegistry, tiers: Sequence[str]) -> None:
    for device, tier in zip(enrolled.devices, loaded.recipe.fleet.device_tiers, strict=True):
        if device.max_tier and tiers.index(tier) < tiers.index(device.max_tier):
            message = f"{device.name} is assigned {tier}, but its enrollment allows at most {device.max_tier}"
            raise loaded.error(RecipeIssue(("fleet", "device_tiers"), "TIER_CAP", message))


def _positive_or_inf(value: Any) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) and value > 0 else math.inf
