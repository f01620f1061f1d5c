"""The one gate between what devices send and what a method sees. Every engine passes every reply through it.

The cheapest check comes first. A refusal has a code and a reason and is never an exception. The number of examples is
checked before everything else, because the expected layout may depend on it.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..client import Layout, Task
from ..fleet import Channel, Device, Reply, Request
from ..tensors import Parcel, all_finite

LARGEST = 1e18  # beyond it, sums of squares overflow in single precision
MAX_EXAMPLES = 10**9  # that a device may claim to hold, unless a recipe sets a limit

CODES = frozenset({
    "STALE", "TIER_MISMATCH", "DUPLICATE", "TOO_BIG", "BAD_FORMAT", "KEYS", "SHAPE", "DTYPE", "NONFINITE", "HUGE",
    "VALUE", "NORM",
})  # fmt: skip
"""Codes of replies that were refused for their content. Replies that never came have other codes."""

Fault = tuple[str, str]
"""A code and a reason."""


@dataclass(frozen=True)
class Refusal:
    """Why a reply of a device was not admitted, or did not come.

    Parameters
    ----------
    device : the name of the device.
    code : what is wrong, as one word.
    reason : what is wrong, as a sentence.
    """

    device: str
    code: str
    reason: str


Report = Callable[[int, Refusal], None]
"""(round, refusal): called for everything that is refused or lost."""


def ignore(round_number: int, refusal: Refusal) -> None:
    """Report nothing."""


@dataclass(frozen=True)
class Gate:
    """The gate that every reply passes.

    Parameters
    ----------
    report : called with the round and the refusal for every reply that is refused.
    max_examples : the largest number of examples that a device may claim to hold.
    """

    report: Report = ignore
    max_examples: int = MAX_EXAMPLES

    def admits(self, request: Request, reply: Reply) -> bool:
        """Check a reply; a refusal is reported.

        Parameters
        ----------
        request : the request that it answers.
        reply : the reply.
        """
        refusal = refuse(reply, request.task, request.inboxes[reply.device], self.max_examples)
        if refusal:
            self.report(request.round_number, refusal)
        return refusal is None

    def receive(
        self, request: Request, channel: Channel, replies: Iterable[Reply], prechecked: bool = False
    ) -> Iterator[Reply]:
        """Replies on their way up: through the transports, the gate, and the transports that look at all of them.

        Parameters
        ----------
        request : the request that they answer.
        channel : its opened transports.
        replies : the replies as the devices sent them.
        prechecked : whether replies have passed the same checks as messages, so that only changed ones are checked.
        """
        admitted: dict[int, Reply] = {}  # by identity: whatever a transport replaces is checked again

        def arrivals() -> Iterator[Reply]:
            for reply in replies:
                arrived = channel.upload(reply)
                if arrived is None or not ((prechecked and arrived is reply) or self.admits(request, arrived)):
                    continue
                admitted[id(arrived)] = arrived
                yield arrived

        for reply in channel.gather(arrivals()):
            if admitted.pop(id(reply), None) is reply or self.admits(request, reply):
                yield reply


def refuse(reply: Reply, task: Task, inbox: Parcel, max_examples: int = MAX_EXAMPLES) -> Refusal | None:
    """Why a reply, or the new state of its device, is not admitted; None when it is.

    Parameters
    ----------
    reply : the reply.
    task : the task, which declares the upload.
    inbox : what the server sent to the device.
    max_examples : the largest number of examples that a device may claim to hold.
    """
    fault = count_fault(reply.device, reply.examples, max_examples) or _parcel_fault(reply, task, inbox)
    if not fault and reply.state and not all(all_finite(tensors.values()) for tensors in reply.state.values()):
        fault = "NONFINITE", "the state that the device would keep is not finite"
    return Refusal(reply.device.name, *fault) if fault else None


def count_fault(device: Device, examples: object, most: int) -> Fault | None:
    """A device with an impossible example count is not trusted with anything else. Only the server has no examples."""
    if isinstance(examples, bool) or not isinstance(examples, int):
        return "VALUE", f"the number of examples must be an integer, not {excerpt(examples)}"
    if not (0 if device.is_server else 1) <= examples <= most:
        return "VALUE", f"a device that trained holds 1 to {most} examples, not {excerpt(examples)}"
    return None


def declared(task: Task, device: Device, inbox: Parcel, examples: int) -> dict[str, Layout]:
    """The layout that a task declares for its uploads, per bundle."""
    return {bundle: spec(device.model, inbox, examples) for bundle, spec in task.sends.items()}


def excerpt(value: object) -> str:
    """Something a device wrote, safe to show: short, and without control characters."""
    plain = ascii(value)
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


def _tensor_faults(upload: Parcel, layouts: dict[str, Layout]) -> Iterator[Fault]:
    """Shapes and dtypes of all tensors before the values of any."""
    named = [(f"{b}: {name}", upload[b][name], spec) for b, layout in layouts.items() for name, spec in layout.items()]
    for name, tensor, (shape, _) in named:
        if tuple(tensor.shape) != shape:
            yield "SHAPE", f"{name} has shape {tuple(tensor.shape)}, declared {shape}"
    for name, tensor, (_, dtype) in named:
        if tensor.dtype != dtype:
            yield "DTYPE", f"{name} is {tensor.dtype}, declared {dtype}"
    for name, tensor, spec in named:
        if tensor.is_floating_point() and tensor.numel():
            smallest, largest = map(float, tensor.aminmax())  # NaN if one of the values is
            if not (math.isfinite(smallest) and math.isfinite(largest)):
                yield "NONFINITE", f"{name} holds a value that is not finite"
            if max(largest, -smallest) > LARGEST:
                yield "HUGE", f"{name} holds a value beyond {LARGEST:g}"
        if tensor.dtype == torch.bool and _out_of_range(tensor.view(torch.uint8), 2):
            yield "VALUE", f"{name} holds a value that is neither true nor false"
        below = getattr(spec, "below", None)
        if below is not None and _out_of_range(tensor, below):
            yield "VALUE", f"{name} holds a value that is not from 0 to {below - 1}"


def _out_of_range(values: Tensor, below: int) -> bool:
    return bool(values.numel()) and bool((values < 0).any() or (values >= below).any())
