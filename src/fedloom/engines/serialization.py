"""Parcels as bytes: safetensors, which holds tensors and nothing that could be run.

A question in JSON's words: what another process, on this machine or on a device, needs to find the task and the
device again. No code travels.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

from safetensors.torch import load, save
from torch import Tensor

from ..client import Schedule, Task
from ..fleet import Device, Fleet
from ..tensors import Parcel


def pack(parcel: Parcel) -> bytes:
    """A parcel of a block; what all its devices share is written once."""
    flat: dict[str, Tensor] = {}
    for bundle, tensors in parcel.items():
        for name, tensor in tensors.items():
            shared = tensor.dim() > 0 and tensor.stride(0) == 0 and len(tensor) > 1
            kind = f"x{len(tensor)}" if shared else "="
            flat[f"{kind}/{bundle}/{name}"] = (tensor[:1] if shared else tensor).contiguous()
    return save(_apart(flat))


def unpack(data: bytes, bundles: list[str]) -> dict[str, dict[str, Tensor]]:
    """`bundles` names them all: an empty one leaves no trace among tensors."""
    parcel: dict[str, dict[str, Tensor]] = {bundle: {} for bundle in bundles}
    for key, tensor in load(data).items():
        kind, bundle, name = key.split("/", 2)
        parcel[bundle][name] = tensor if kind == "=" else tensor.expand(int(kind[1:]), *tensor.shape[1:])
    return parcel


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """safetensors refuses tensors that share memory."""
    seen: set[int] = set()
    made = {}
    for name, tensor in tensors.items():
        made[name] = tensor.clone() if tensor.data_ptr() in seen else tensor
        seen.add(tensor.data_ptr())
    return made


Find = Callable[[tuple[str, ...]], Task]
"""A task by its address."""


def task_in_words(task: Task) -> dict[str, Any]:
    schedule = asdict(task.schedule) if task.schedule else None
    return {"address": task.ref or (task.name,), "schedule": schedule}


def task_from_words(said: Mapping[str, Any], find: Find) -> Task:
    schedule = Schedule(**said["schedule"]) if said["schedule"] else None
    return replace(find(tuple(said["address"])), schedule=schedule)


def device_in_words(device: Device) -> dict[str, Any]:
    return {
        "name": device.name,
        "tier": device.tier,
        "size": device.model.settings,
        "gathers": device.pooled_from,
        "here": device.is_server,
    }


def device_from_words(said: Mapping[str, Any], fleet: Fleet) -> Device:
    """A device need not carry its tier's model: only the sizes of another part of the global one are told."""
    (tier,) = [tier for tier in fleet.tiers if tier.name == said["tier"]]
    model = replace(tier.model, settings=_tuples(said["size"]))
    return Device(said["name"], tier.name, model, tier.footprint, tuple(said["gathers"]), said["here"])


def _tuples(value: Any) -> Any:
    """Settings as they were before JSON made lists of them."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
