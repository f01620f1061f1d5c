"""Devices as they are: silent, dead, slow or broken. An engine for one turn of a method; whoever judges asks another.

Nothing that goes wrong depends on when replies come: a fate is drawn before its device is asked, and seconds follow
from what it is told, has to do and will send. So a run gives the same bits with any number of workers.

How long real devices are waited for, and who was heard in a round: seconds are those of the clock on the wall.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

import torch

from ..client import Task
from ..fleet import PLAIN, Device, Reply
from ..tensors import Parcel
from .client_state import ClientStates
from .compression import Codec, Coded
from .gate import Refusal
from .in_process import InProcess

LINGER = 2.0  # times the deadline: for so long an answer can still be fetched, and with it that its device is free
LEAST_LINGER = 60.0  # seconds


@dataclass
class Responses:
    """What became of the devices of a turn; known when it is over."""

    asked: dict[str, Device] = field(default_factory=dict)
    unheard: set[str] = field(default_factory=set)  # for whatever reason: lost on the way, or refused
    waited: float = 0.0  # by the server, in seconds

    def note(self, inboxes: Iterable[Device], replies: Iterable[Reply]) -> None:
        named = {device.name: device for device in inboxes}
        self.asked |= named
        self.unheard |= named.keys() - {reply.device.name for reply in replies}

    def answered(self) -> list[Device]:
        """Those of whom everything was heard."""
        return [device for name, device in self.asked.items() if name not in self.unheard]


@dataclass(frozen=True)
class Wait:
    until: float = math.inf  # on the monotonic clock
    enough: int | None = None  # answers; None: all

    def left(self) -> float:
        return self.until - time.monotonic()

    def ttl(self) -> float | None:
        """For how long a message is worth keeping; None: for as long as may be."""
        return None if math.isinf(self.until) else max(LEAST_LINGER, LINGER * self.left())


class Remote(Protocol):
    """An engine whose devices are real, and that can be told how long to wait for them."""

    @property
    def memory(self) -> ClientStates: ...

    def ask(
        self,
        task: Task,
        inboxes: Mapping[Device, Parcel],
        round_number: int,
        repeat: int = 0,
        wait: Wait | None = None,
        codec: Codec | None = None,
    ) -> Iterable[Reply]: ...

    def commit(self, round_number: int) -> None: ...

    def close(self) -> None: ...


@dataclass
class DeadlineEngine:
    """An engine for one turn of a method with real devices: its questions together have until the deadline, and once
    enough of those asked have answered, the others are not waited for."""

    inner: Remote
    deadline: float = math.inf  # seconds
    needed: float = 1.0  # the share of those asked whose answers are enough: the first ones
    codec: Codec | None = None
    hearing: Responses = field(default_factory=Responses)
    _began: float = field(default_factory=lambda: time.monotonic())

    def ask(self, task: Task, inboxes: Mapping[Device, Parcel], round_number: int, repeat: int = 0) -> Iterable[Reply]:
        if all(device.is_server for device in inboxes):  # the server does not wait for itself
            return self.inner.ask(task, inboxes, round_number, repeat)
        enough = max(1, math.floor(self.needed * len(inboxes) + 1e-9))
        wait = Wait(self._began + self.deadline, enough)
        replies = list(self.inner.ask(task, inboxes, round_number, repeat, wait, self.codec))
        self.hearing.note(inboxes, replies)
        self.hearing.waited = time.monotonic() - self._began
        return replies

    def commit(self, round_number: int) -> None:
        self.inner.commit(round_number)

    def close(self) -> None:
        self.inner.close()


Seconds = Callable[[Device, int, int], float]
"""(device, bytes that it has moved in this round, examples that it holds) -> when it is done."""

Damage = Literal["nan", "inf", "huge", "shape"]
HUGE = 1e30


@dataclass(frozen=True)
class FaultPlan:
    """What befalls the devices of a round, by name; and how long the server waits for the others."""

    dead: Mapping[str, str] = field(default_factory=dict)  # with the reason: they get nothing and do nothing
    silent: frozenset[str] = frozenset()  # they do what they are told, but nothing of it is heard
    broken: Mapping[str, Damage] = field(default_factory=dict)
    deadline: float = math.inf  # seconds
    needed: float = 1.0  # the share of those asked whose replies are enough: the first ones


@dataclass
class FaultInjector:
    """What became of a turn's devices is known when it is over. Whoever is lost once is lost for the round."""

    inner: InProcess | Coded
    fates: FaultPlan
    seconds: Seconds | None  # None: nobody knows how fast the devices are
    tell: Callable[[Refusal], None]
    hearing: Responses = field(default_factory=Responses)
    _lost: set[str] = field(default_factory=set)
    _moved: dict[str, int] = field(default_factory=dict)

    def ask(self, task: Task, inboxes: Mapping[Device, Parcel], round_number: int, repeat: int = 0) -> Iterable[Reply]:
        if all(device.is_server for device in inboxes):  # the server does not lose itself
            return self.inner.ask(task, inboxes, round_number, repeat)
        took = {device.name: self._took(task, device, inbox) for device, inbox in inboxes.items()}
        self._lose_some(took)
        told = {device: inbox for device, inbox in inboxes.items() if device.name not in self.fates.dead}
        replies = list(self.inner.ask(task, told, round_number, repeat, self._on_its_way))
        self.hearing.note(inboxes, replies)
        return replies

    def commit(self, round_number: int) -> None:
        self.inner.commit(round_number)

    def close(self) -> None:
        self.inner.close()

    def _took(self, task: Task, device: Device, inbox: Parcel) -> float:
        """Until its reply is here, from the beginning of the round; all its work is counted from the first question."""
        examples = self.inner.client_data.count(device)
        sent = {bundle: _outline(declared(device.model, inbox, examples)) for bundle, declared in task.sends.items()}
        coding = self.inner.codec if isinstance(self.inner, Coded) else PLAIN
        moved = coding.down_bytes(inbox) + coding.up_bytes(task, sent)
        self._moved[device.name] = self._moved.get(device.name, 0) + moved
        return self.seconds(device, self._moved[device.name], examples) if self.seconds else 0.0

    def _lose_some(self, took: Mapping[str, float]) -> None:
        """The dead and the silent, then the late, then whoever comes after there is enough."""
        fates, enough = self.fates, max(1, math.floor(self.fates.needed * len(took) + 1e-9))
        heard, last = 0, 0.0
        for name in sorted(took, key=lambda name: (took[name], name)):
            if name in self._lost:
                continue
            if name in fates.dead:
                self._lose(name, "DEAD", fates.dead[name])
            elif name in fates.silent:
                self._lose(name, "SILENT", "no reply came")
            elif took[name] > fates.deadline:
                self._lose(name, "LATE", f"done after {took[name]:.4g} s, the deadline is {fates.deadline:g} s")
            elif heard >= enough:
                self._lose(name, "NOT_NEEDED", f"done after {took[name]:.4g} s, {enough} others were sooner")
            else:
                heard, last = heard + (name not in fates.broken), took[name]
        everybody = heard >= enough or all(name not in self._lost for name in took)
        waited = last if everybody or math.isinf(fates.deadline) else fates.deadline
        self.hearing.waited = max(self.hearing.waited, waited)

    def _lose(self, name: str, code: str, reason: str) -> None:
        self._lost.add(name)
        self.tell(Refusal(name, code, reason))

    def _on_its_way(self, reply: Reply) -> Reply | None:
        name = reply.device.name
        if name in self._lost:
            return None
        return damaged(reply, self.fates.broken[name]) if name in self.fates.broken else reply


def damaged(reply: Reply, how: Damage) -> Reply:
    """As it should not be: in one number, or in the shape of what has none. To a reply without tensors one is added."""
    places = sorted((bundle, name) for bundle, tensors in reply.upload.items() for name in tensors)
    numbers = [(b, n) for b, n in places if reply.upload[b][n].is_floating_point() and reply.upload[b][n].numel()]
    if not places:
        return replace(reply, upload={**reply.upload, "noise": {"x": torch.zeros(1)}})
    bundle, name = (numbers or places)[0]
    tensor = reply.upload[bundle][name].clone()
    if how == "shape" or not numbers:
        tensor = torch.stack([tensor, tensor])
    else:
        tensor.view(-1)[0] = {"nan": math.nan, "inf": math.inf, "huge": HUGE}[how]
    return replace(reply, upload={**reply.upload, bundle: {**reply.upload[bundle], name: tensor}})


def _outline(layout: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> dict[str, torch.Tensor]:
    """Tensors without content: what they weigh can be told without them."""
    return {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in layout.items()}
