"""How long real devices are waited for, and who was heard in a round: seconds are those of the clock on the wall."""

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from ..fleet import Device, Reply
from ..tensors import Parcel
from ..training import Task
from .codecs import Codec
from .memory import Memories

LINGER = 2.0  # times the deadline: for so long an answer can still be fetched, and with it that its device is free
LEAST_LINGER = 60.0  # seconds


@dataclass
class Hearing:
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
    def memory(self) -> Memories: ...

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
class Patient:
    """An engine for one turn of a method with real devices: its questions together have until the deadline, and once
    enough of those asked have answered, the others are not waited for."""

    inner: Remote
    deadline: float = math.inf  # seconds
    needed: float = 1.0  # the share of those asked whose answers are enough: the first ones
    codec: Codec | None = None
    hearing: Hearing = field(default_factory=Hearing)
    _began: float = field(default_factory=lambda: time.monotonic())

    def ask(self, task: Task, inboxes: Mapping[Device, Parcel], round_number: int, repeat: int = 0) -> Iterable[Reply]:
        if all(device.here for device in inboxes):  # the server does not wait for itself
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
