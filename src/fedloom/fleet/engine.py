"""The seam between a method and the devices: a request, the engine that carries it out, and the transports between.

An engine implements `ask`. Whatever happens to a message on its way (compression, faults, attacks, screening) is a
transport, and every engine applies the same list.
"""

import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from ..client import Task
from ..tensors import Parcel, payload_bytes
from .device import Device, Reply

Inboxes = Mapping[Device, Parcel]

Ask = Callable[[Task, Inboxes], Iterable[Reply]]
"""Have these devices carry out this task, outside of a method's round. Replies come in any order, maybe too few."""


@dataclass(frozen=True, eq=False)
class Request:
    """One task for some devices.

    `repeat` is the index of the request among those of the same stream in the round. `deadline` counts seconds from the
    start of the round; once `min_replies` have come, the others are not waited for. `transports` are listed from the
    server to the device.
    """

    task: Task
    inboxes: Inboxes
    round_number: int
    repeat: int = 0
    deadline: float = math.inf
    min_replies: int | None = None  # None: all
    transports: "tuple[Transport, ...]" = ()
    round_started: float = field(default_factory=time.monotonic)


class Exchange:
    """What one transport does to the messages of one request. By default they pass unchanged."""

    def encoded_task(self, task: Task) -> Task:
        """The task as it declares what travels beyond this transport."""
        return task

    def deliver(self, device: Device, inbox: Parcel) -> Parcel | None:
        """An inbox on its way down; None: the device is out of reach and does not run."""
        return inbox

    def upload(self, reply: Reply) -> Reply | None:
        """A reply on its way up; None: it is lost, and its device forgets what it did."""
        return reply

    def gather(self, replies: Iterable[Reply]) -> Iterable[Reply]:
        """All admitted replies of the request. What is changed here passes the gate again."""
        return replies


class Transport(Protocol):
    """Opened anew for every request.

    `end` says where it runs: at the server, at the device, or between them. A simulation applies all; with real devices
    the server applies its own, the device applies its own, and nothing simulates the network between.
    """

    @property
    def end(self) -> Literal["server", "network", "device"]: ...

    def open(self, request: Request) -> Exchange: ...


EVERYWHERE = frozenset({"server", "network", "device"})


class Channel:
    """Messages to devices pass the exchanges in order, replies in reverse. The server does not write to itself."""

    def __init__(self, request: Request, ends: Collection[str] = EVERYWHERE):
        travels = any(not device.is_server for device in request.inboxes)
        transports = [transport for transport in request.transports if transport.end in ends] if travels else []
        self.exchanges: list[Exchange] = [transport.open(request) for transport in transports]

    def encoded_task(self, task: Task) -> Task:
        """The task as it declares what travels beyond the last transport."""
        for exchange in self.exchanges:
            task = exchange.encoded_task(task)
        return task

    def deliver(self, inboxes: Inboxes) -> Inboxes:
        """The inboxes as they reach the devices, without those that are out of reach."""
        delivered = {}
        for device, inbox in inboxes.items():
            arrived: Parcel | None = inbox
            for exchange in () if device.is_server else self.exchanges:
                arrived = None if arrived is None else exchange.deliver(device, arrived)
            if arrived is not None:
                delivered[device] = arrived
        return delivered

    def upload(self, reply: Reply) -> Reply | None:
        """One reply as it reaches the server; None: it is lost."""
        arrived: Reply | None = reply
        for exchange in () if reply.device.is_server else reversed(self.exchanges):
            arrived = None if arrived is None else exchange.upload(arrived)
        return arrived

    def gather(self, replies: Iterable[Reply]) -> Iterable[Reply]:
        for exchange in reversed(self.exchanges):
            replies = exchange.gather(replies)
        return replies


class Engine(Protocol):
    """Carries tasks to devices and replies back."""

    def ask(self, request: Request) -> Iterable[Reply]:
        """Replies that the gate admits, in any order and maybe fewer than asked for. What the server itself computes
        (`device.is_server`) passes no transport."""

    def commit(self, round_number: int) -> None:
        """The round counts: the new states of its devices are kept."""

    def close(self) -> None:
        """End whatever was started for the run."""


def make_ask(engine: Engine, round_number: int) -> Ask:
    """Ask devices outside of a method's round, as evaluation does: no transports, and nothing is counted."""
    return lambda task, inboxes: engine.ask(Request(task, inboxes, round_number))


class ByteCounter(Protocol):
    """Bytes of parcels as they travel."""

    def bytes_down(self, inbox: Parcel) -> int: ...

    def bytes_up(self, task: Task, upload: Parcel) -> int: ...


class Uncompressed:
    def bytes_down(self, inbox: Parcel) -> int:
        return payload_bytes(inbox)

    def bytes_up(self, task: Task, upload: Parcel) -> int:
        return payload_bytes(upload)


UNCOMPRESSED: ByteCounter = Uncompressed()
