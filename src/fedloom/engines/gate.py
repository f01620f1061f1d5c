"""The one gate between what devices send and what a method sees. Every engine passes every reply through it.

Cheapest check first; a refusal has a code and a reason, and is never an exception. How many examples a device says it
holds comes before all else, for what it is to send depends on that.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..client import Layout, Task
from ..fleet import Device, Reply
from ..tensors import Parcel, all_finite

LARGEST = 1e18  # beyond it, sums of squares are no numbers any more in single precision
MAX_EXAMPLES = 10**9  # that a device may say it holds, unless a recipe says otherwise

CODES = frozenset({
    "STALE", "TIER_MISMATCH", "DUPLICATE", "TOO_BIG", "BAD_FORMAT", "KEYS", "SHAPE", "DTYPE", "NONFINITE", "HUGE",
    "VALUE", "NORM",
})  # fmt: skip
"""Of all that is refused for what it is. What never came has codes of its own."""

Fault = tuple[str, str]
"""A code and a reason."""


@dataclass(frozen=True)
class Refusal:
    device: str
    code: str
    reason: str


def refuse(
    reply: Reply, task: Task, inbox: Parcel, kept: Parcel | None = None, max_examples: int = MAX_EXAMPLES
) -> Refusal | None:
    """Why a reply, and what its device would remember, is not admitted; None when it is."""
    fault = count_fault(reply.device, reply.examples, max_examples) or _parcel_fault(reply, task, inbox)
    if not fault and kept and not all(all_finite(tensors.values()) for tensors in kept.values()):
        fault = "NONFINITE", "what the device would remember is not finite"
    return Refusal(reply.device.name, *fault) if fault else None


def count_fault(device: Device, examples: object, most: int) -> Fault | None:
    """A count that cannot be is not mended: whoever sends one is not believed the rest either. Only the server has no
    examples."""
    if isinstance(examples, bool) or not isinstance(examples, int):
        return "VALUE", f"a number of examples is a whole one, not {excerpt(examples)}"
    if not (0 if device.is_server else 1) <= examples <= most:
        return "VALUE", f"a device that trained holds from 1 to {most} examples, not {excerpt(examples)}"
    return None


def declared(task: Task, device: Device, inbox: Parcel, examples: int) -> dict[str, Layout]:
    """What a device is to send, bundle by bundle."""
    return {bundle: sent(device.model, inbox, examples) for bundle, sent in task.sends.items()}


def excerpt(said: object) -> str:
    """What a device wrote, fit to be shown: no more than a glance, and nothing that a terminal would obey."""
    plain = ascii(said)
    return plain if len(plain) <= 80 else f"{plain[:77]}..."


def _parcel_fault(reply: Reply, task: Task, inbox: Parcel) -> Fault | None:
    if reply.upload.keys() != task.sends.keys():
        return "KEYS", f"bundles {excerpt(sorted(reply.upload))} where {sorted(task.sends)} were declared"
    layouts = declared(task, reply.device, inbox, reply.examples)
    for bundle, layout in layouts.items():
        odd = sorted(reply.upload[bundle].keys() ^ layout.keys())
        if odd:
            return "KEYS", f"{bundle}: {excerpt(odd[0])} is missing or was not declared"
    return next(_tensor_faults(reply.upload, layouts), None)


def _tensor_faults(sent: Parcel, layouts: dict[str, Layout]) -> Iterator[Fault]:
    """Outlines of all before the numbers of any."""
    named = [(f"{b}: {name}", sent[b][name], one) for b, layout in layouts.items() for name, one in layout.items()]
    for name, tensor, (shape, _) in named:
        if tuple(tensor.shape) != shape:
            yield "SHAPE", f"{name} has shape {tuple(tensor.shape)}, declared {shape}"
    for name, tensor, (_, dtype) in named:
        if tensor.dtype != dtype:
            yield "DTYPE", f"{name} is {tensor.dtype}, declared {dtype}"
    for name, tensor, outline in named:
        if not all_finite([tensor]):
            yield "NONFINITE", f"{name} holds a number that is not finite"
        if tensor.is_floating_point() and tensor.numel() and float(tensor.abs().max()) > LARGEST:
            yield "HUGE", f"{name} holds a number beyond {LARGEST:g}"
        if tensor.dtype == torch.bool and _beyond(tensor.view(torch.uint8), 2):
            yield "VALUE", f"{name} holds something that is neither true nor false"
        below = getattr(outline, "below", None)
        if below is not None and _beyond(tensor, below):
            yield "VALUE", f"{name} holds a number that is not from 0 to {below - 1}"


def _beyond(numbers: Tensor, below: int) -> bool:
    return bool(numbers.numel()) and bool((numbers < 0).any() or (numbers >= below).any())
