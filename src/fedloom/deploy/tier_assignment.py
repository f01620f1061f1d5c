"""Identify the devices of a real fleet by their keys and assign each the largest tier that fits and that its enrollment
allows."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..analysis.costs import tier_costs
from ..analysis.planning import DeviceSpec, plan_fleet
from ..engines import Refusal
from ..fleet import Fleet, count_parameters
from ..recipe.errors import RecipeIssue
from ..recipe.load import LoadedRecipe, load
from ..recipe.registry import Registry
from ..runs.state import RunState
from .registry import FleetRegistry
from .remote import device_by_index

DeviceInfo = Mapping[str, Any]
"""What a device reports about itself, as `describe_device` returns it."""

MEASURED = ("speed", "memory", "bandwidth")
LOG_POSITION = "proxy_log"  # in the run's state: how much of the proxy's log was read


def identify_by_key(enrolled: FleetRegistry, fleet: Fleet) -> Callable[[int, dict[str, Any]], str | Refusal | None]:
    """Resolve a node to the device that has its key; refuse a node that reports to be another device."""

    def identify(node: int, info: DeviceInfo) -> str | Refusal | None:
        reported = device_by_index(fleet, node, info)
        if not enrolled.secure:
            return reported
        index = enrolled.index_of_node(node)
        if index is None:
            return Refusal("", "UNREGISTERED", f"node {node}: the key is not registered in this fleet")
        if reported != fleet.name(index):
            message = f"its key belongs to {enrolled.devices[index].name}"
            return Refusal(fleet.name(index), "OTHER_DEVICE", message)
        return reported

    return identify


def assign_tiers(
    loaded: LoadedRecipe,
    registry: Registry,
    data: Path,
    fleet: Fleet,
    enrolled: FleetRegistry,
    reports: Mapping[str, DeviceInfo],
) -> LoadedRecipe:
    """Write the tier of every device into the recipe, so that a resumed run has the same tiers.

    Parameters
    ----------
    reports
        What devices reported about themselves, by name. Devices without a report get the largest tier they may train.
    """
    tiers = sorted(fleet.active_tiers, key=lambda tier: -count_parameters(tier.model.shapes()))
    names = [tier.name for tier in tiers]
    for device in enrolled.devices:
        if device.max_tier is not None and device.max_tier not in names:
            message = f"{device.name} is limited to tier {device.max_tier!r}, which the recipe does not have"
            raise loaded.error(RecipeIssue(("tiers",), "TIER_NAME", message))
    if loaded.recipe.fleet.device_tiers:
        _check_limits(loaded, enrolled, names)
        return loaded
    deadline = loaded.recipe.faults.deadline
    machines = [
        parse_machine(device.name, reports.get(fleet.name(index), {}), deadline)
        for index, device in enumerate(enrolled.devices)
    ]
    plans = plan_fleet(loaded, registry, data, machines, tier_costs(loaded, registry, data, memory=True)).devices
    fitting = [None if plan.demand is None else plan.demand.tier for plan in plans]
    document = loaded.recipe.document()
    limits = [device.max_tier for device in enrolled.devices]
    document["fleet"]["device_tiers"] = list(choose_tiers(limits, fitting, names))
    return load(json.loads(json.dumps(document)), registry)


def choose_tiers(limits: Sequence[str | None], fitting: Sequence[str | None], tiers: Sequence[str]) -> tuple[str, ...]:
    """For each device the smaller of its limit and the largest tier that fits.

    `tiers` are all tiers, the largest first. Devices that fit no tier get the smallest.
    """
    chosen = []
    for limit, fit in zip(limits, fitting, strict=True):
        allowed = tiers.index(limit) if limit else 0
        feasible = tiers.index(fit) if fit else len(tiers) - 1
        chosen.append(tiers[max(allowed, feasible)])
    return tuple(chosen)


def parse_machine(name: str, info: DeviceInfo, deadline: float | None) -> DeviceSpec:
    """The hardware a device reported. Missing or invalid measurements do not limit it."""
    measured = info.get("machine")
    measured = measured if isinstance(measured, dict) else {}
    speed, memory, bandwidth = (_to_amount(measured.get(key)) for key in MEASURED)
    examples = info.get("examples")
    count = examples if type(examples) is int and 0 < examples < 1 << 40 else None
    return DeviceSpec(name, speed, memory, bandwidth, deadline or math.inf, examples=count)


def read_rejected_connections(log: Path, state: RunState) -> Iterator[Refusal]:
    """Connections that the proxy rejected since the last call; the position in its log is part of the run's state."""
    if not log.exists():
        return
    with log.open("rb") as file:
        file.seek(state.proxy_log_offset)
        for line in file:
            if not line.endswith(b"\n"):
                break
            state.proxy_log_offset += len(line)
            rejection: dict[str, Any] = json.loads(line)
            yield Refusal("", rejection["code"], rejection["reason"])


def _check_limits(loaded: LoadedRecipe, enrolled: FleetRegistry, tiers: Sequence[str]) -> None:
    for device, tier in zip(enrolled.devices, loaded.recipe.fleet.device_tiers, strict=True):
        if device.max_tier and tiers.index(tier) < tiers.index(device.max_tier):
            message = f"{device.name} is assigned {tier}, its enrollment allows {device.max_tier} at most"
            raise loaded.error(RecipeIssue(("fleet", "device_tiers"), "TIER_CAP", message))


def _to_amount(value: Any) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) and value > 0 else math.inf
