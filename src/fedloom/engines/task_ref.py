"""References to tasks and devices in JSON, for other processes and real devices. No code travels.

A task is referred to by a path of names: the first may name a group of tasks (of the evaluator, say), the rest is
resolved by that group; without a group, by the method.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..client import Schedule, Task
from ..fleet import Device, Fleet
from ..registry import freeze

Ref = tuple[str, ...]
FindTask = Callable[[Ref], Task]


@dataclass(frozen=True)
class TaskRegistry:
    """Finds the tasks of a run by their references: those of the method, and groups that have a name of their own.

    Parameters
    ----------
    method : finds a task of the method.
    groups : for each group, what finds a task of it.
    """

    method: Callable[..., Task]
    groups: Mapping[str, Callable[..., Task]]

    def __call__(self, ref: Ref) -> Task:
        group = self.groups.get(ref[0])
        return group(*ref[1:]) if group else self.method(*ref)


def task_to_json(task: Task) -> dict[str, Any]:
    schedule = asdict(task.schedule) if task.schedule else None
    return {"ref": task.ref or (task.name,), "schedule": schedule}


def task_from_json(document: Mapping[str, Any], find_task: FindTask) -> Task:
    schedule = Schedule(**document["schedule"]) if document["schedule"] else None
    return replace(find_task(tuple(document["ref"])), schedule=schedule)


def device_to_json(device: Device) -> dict[str, Any]:
    return {
        "name": device.name,
        "tier": device.tier,
        "size": device.model.settings,
        "pooled_from": device.pooled_from,
        "is_server": device.is_server,
        "part": device.part,
    }


def device_from_json(document: Mapping[str, Any], fleet: Fleet) -> Device:
    """A device need not run its tier's model: the settings of the model travel with it."""
    (tier,) = [tier for tier in fleet.tiers if tier.name == document["tier"]]
    model = replace(tier.model, settings=freeze(document["size"]))  # JSON turns tuples into lists
    pooled_from, part = tuple(document["pooled_from"]), tuple(document["part"])
    return Device(document["name"], tier.name, model, tier.footprint, pooled_from, document["is_server"], part)
