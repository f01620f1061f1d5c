"""Simulated faults: devices that are out of reach, silent, slow or broken.

Nothing depends on when replies come. Faults are drawn before devices are asked, and seconds follow from what a device
receives, computes and sends, so a run gives the same bits with any number of workers.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from ..fleet import Device, Exchange, Reply, Request, Responses
from ..fleet.engine import ByteCounter
from ..tensors import Parcel
from .gate import Refusal, declared

Seconds = Callable[[Device, int, int], float]
"""(device, bytes that it has moved in this round, examples that it holds) -> seconds until its reply arrives."""

Corruption = Literal["nan", "inf", "huge", "shape"]
HUGE = 1e30


@dataclass(frozen=True)
class FaultPlan:
    """Faults planned for one round, by device.

    Parameters
    ----------
    outages : devices that receive nothing, with the reason.
    silent : devices that run, but their replies are lost.
    corrupt : devices whose replies are corrupted, and how.
    """

    outages: Mapping[str, str] = field(default_factory=dict)
    silent: frozenset[str] = frozenset()
    corrupt: Mapping[str, Corruption] = field(default_factory=dict)


@dataclass
class FaultInjector:
    """The faults of one round, as a transport. A device that is lost once is lost for the whole round.

    Parameters
    ----------
    plan : the faults.
    seconds : how long a device takes until its reply arrives; None: it is not known how fast the devices are.
    count_examples : the number of examples of a device.
    wire : how large parcels are as they travel.
    responses : records how long the server waited.
    report : called for every device that is lost.
    side : where the transport runs.
    """

    plan: FaultPlan
    seconds: Seconds | None
    count_examples: Callable[[Device], int]
    wire: ByteCounter
    responses: Responses
    report: Callable[[Refusal], None]
    side: Literal["network"] = "network"
    _lost: set[str] = field(default_factory=set)
    _moved: dict[str, int] = field(default_factory=dict)

    def open(self, request: Request) -> Exchange:
        arrivals = {device.name: self._arrival(request, device) for device in request.inboxes if not device.is_server}
        self._lose_some(request, arrivals)
        return _FaultyExchange(self.plan, self._lost)

    def _arrival(self, request: Request, device: Device) -> float:
        """Seconds from the start of the round until the reply is here; all work counts with the first request."""
        examples, inbox = self.count_examples(device), request.inboxes[device]
        upload = _meta_upload(request, device, examples)
        moved = self.wire.bytes_down(inbox) + self.wire.bytes_up(request.task, upload)
        self._moved[device.name] = self._moved.get(device.name, 0) + moved
        return self.seconds(device, self._moved[device.name], examples) if self.seconds else 0.0

    def _lose_some(self, request: Request, arrivals: Mapping[str, float]) -> None:
        """Out of reach or silent, then late, then those that come after enough others."""
        plan, deadline = self.plan, request.deadline
        enough = len(arrivals) if request.min_replies is None else request.min_replies
        replied, last = 0, 0.0
        for name in sorted(arrivals, key=lambda name: (arrivals[name], name)):
            seconds = arrivals[name]
            if name in self._lost:
                continue
            if name in plan.outages:
                self._lose(name, "DEAD", plan.outages[name])
            elif name in plan.silent:
                self._lose(name, "SILENT", "no reply came")
            elif seconds > deadline:
                self._lose(name, "LATE", f"done after {seconds:.4g} s, the deadline is {deadline:g} s")
            elif replied >= enough:
                self._lose(name, "NOT_NEEDED", f"done after {seconds:.4g} s, {enough} others were sooner")
            else:
                replied, last = replied + (name not in plan.corrupt), seconds
        complete = replied >= enough or all(name not in self._lost for name in arrivals)
        waited = last if complete or math.isinf(deadline) else deadline
        self.responses.waited = max(self.responses.waited, waited)

    def _lose(self, name: str, code: str, reason: str) -> None:
        self._lost.add(name)
        self.report(Refusal(name, code, reason))


@dataclass
class _FaultyExchange(Exchange):
    plan: FaultPlan
    lost: set[str]

    def deliver(self, device: Device, inbox: Parcel) -> Parcel | None:
        return None if device.name in self.plan.outages else inbox

    def upload(self, reply: Reply) -> Reply | None:
        name = reply.device.name
        if name in self.lost:
            return None
        return corrupt(reply, self.plan.corrupt[name]) if name in self.plan.corrupt else reply


def corrupt(reply: Reply, how: Corruption) -> Reply:
    """Break one value of a reply, or a shape where there is no value; an empty reply gets a tensor too many."""
    names = sorted((bundle, name) for bundle, tensors in reply.upload.items() for name in tensors)
    floats = [(b, n) for b, n in names if reply.upload[b][n].is_floating_point() and reply.upload[b][n].numel()]
    if not names:
        return replace(reply, upload={**reply.upload, "noise": {"x": torch.zeros(1)}})
    bundle, name = (floats or names)[0]
    tensor = reply.upload[bundle][name].clone()
    if how == "shape" or not floats:
        tensor = torch.stack([tensor, tensor])
    else:
        tensor.view(-1)[0] = {"nan": math.nan, "inf": math.inf, "huge": HUGE}[how]
    return replace(reply, upload={**reply.upload, bundle: {**reply.upload[bundle], name: tensor}})


def _meta_upload(request: Request, device: Device, examples: int) -> Parcel:
    """Tensors without content: enough to know their size."""
    layouts = declared(request.task, device, request.inboxes[device], examples)
    return {
        bundle: {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in layout.items()}
        for bundle, layout in layouts.items()
    }
