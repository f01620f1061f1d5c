"""The one gate between what devices send and what a method sees. Every engine passes every reply through it.

Cheapest check first; a refusal has a code and a reason, and is never an exception.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..fleet import Reply
from ..tensors import Parcel, Tensors, all_finite
from ..training import Layout, Task


@dataclass(frozen=True)
class Refusal:
    device: str
    code: str
    reason: str


def refuse(reply: Reply, task: Task, inbox: Parcel, kept: Parcel | None = None) -> Refusal | None:
    """Why a reply, and what its device would remember, is not admitted; None when it is."""
    code, reason = _fault(reply, task, inbox)
    if not code and kept and not all(all_finite(tensors.values()) for tensors in kept.values()):
        code, reason = "NONFINITE", "what the device would remember is not finite"
    return Refusal(reply.device.name, code, reason) if code else None


def _fault(reply: Reply, task: Task, inbox: Parcel) -> tuple[str, str]:
    if reply.examples < 1 and not reply.device.here:
        return "METRIC", f"a device that trained holds at least one example, not {reply.examples}"
    if reply.sent.keys() != task.sends.keys():
        return "KEYS", f"bundles {sorted(reply.sent)} where {sorted(task.sends)} were declared"
    for bundle, sent in task.sends.items():
        code, reason = _bundle_fault(reply.sent[bundle], sent(reply.device.model, inbox, reply.examples))
        if code:
            return code, f"{bundle}: {reason}"
    return "", ""


def _bundle_fault(tensors: Tensors, layout: Layout) -> tuple[str, str]:
    if tensors.keys() != layout.keys():
        odd = sorted(tensors.keys() ^ layout.keys())
        return "KEYS", f"{odd[0]} is missing or was not declared"
    for name, (shape, dtype) in layout.items():
        code, reason = _tensor_fault(tensors[name], shape, dtype)
        if code:
            return code, f"{name} {reason}"
    return "", ""


def _tensor_fault(tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[str, str]:
    if tuple(tensor.shape) != shape:
        return "SHAPE", f"has shape {tuple(tensor.shape)}, declared {shape}"
    if tensor.dtype != dtype:
        return "DTYPE", f"is {tensor.dtype}, declared {dtype}"
    if not all_finite([tensor]):
        return "NONFINITE", "holds a number that is not finite"
    return "", ""
