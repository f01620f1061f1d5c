"""A question in JSON's words: what another process, on this machine or on a device, needs to find the task and the
device again. No code travels."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

from ..fleet import Device, Fleet
from ..training import Schedule, Task

Find = Callable[[tuple[str, ...]], Task]
"""A task by its address."""


def task_in_words(task: Task) -> dict[str, Any]:
    schedule = asdict(task.schedule) if task.schedule else None
    return {"address": task.address or (task.name,), "schedule": schedule}


def task_from_words(said: Mapping[str, Any], find: Find) -> Task:
    schedule = Schedule(**said["schedule"]) if said["schedule"] else None
    return replace(find(tuple(said["address"])), schedule=schedule)


def device_in_words(device: Device) -> dict[str, Any]:
    return {
        "name": device.name,
        "tier": device.tier,
        "size": device.model.settings,
        "gathers": device.gathers,
        "here": device.here,
    }


def device_from_words(said: Mapping[str, Any], fleet: Fleet) -> Device:
    """A device need not carry its tier's model: only the sizes of another part of the global one are told."""
    (tier,) = [tier for tier in fleet.tiers if tier.name == said["tier"]]
    model = replace(tier.model, settings=_tuples(said["size"]))
    return Device(said["name"], tier.name, model, tier.footprint, tuple(said["gathers"]), said["here"])


def _tuples(value: Any) -> Any:
    """Settings as they were before JSON made lists of them."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
