"""The interface between a method and the devices: requests, engines, and the transports that messages pass through.

An engine implements `ask`. Compression, faults, attacks and norm screening are transports (Flower calls such middleware
a mod), and every engine applies the same list.
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
"""Have these devices run this task, outside of a method's round. Replies come in any order; some may be missing."""


@dataclass(frozen=True, eq=False)
class Request:
    """One task for some devices.

    Parameters
    ----------
    task : what they do.
    inboxes : what each of them receives.
    round_number : the round.
    repeat : the number of earlier requests of the round with the task's random stream, so that no two draw the same
        batches.
    deadline : seconds from the start of the round.
    min_replies : after this many replies the server stops waiting; None: all.
    transports : what happens to messages, listed from the server to the device.
    round_started : the time at which the round started, by `time.monotonic`.
    """

    task: Task
    inboxes: Inboxes
    round_number: int
    repeat: int = 0
    deadline: float = math.inf
    min_replies: int | None = None
    transports: "tuple[Transport, ...]" = ()
    round_started: float = field(default_factory=time.monotonic)


class Exchange:
    """What one transport does to the messages of one request. By default they pass unchanged."""

    def encoded_task(self, task: Task) -> Task:
        """The task, its `sends` describing the upload in this transport's wire format (e.g. compressed).

        Parameters
        ----------
        task : the task as the server's side of this transport knows it.
        """
        return task

    def deliver(self, device: Device, inbox: Parcel) -> Parcel | None:
        """An inbox on its way down; None: the device is out of reach and does not run.

        Parameters
        ----------
        device : the receiver.
        inbox : what it receives.
        """
        return inbox

    def upload(self, reply: Reply) -> Reply | None:
        """A reply on its way up; None: it is lost, and the new state of its device is discarded.

        Parameters
        ----------
        reply : the reply.
        """
        return reply

    def gather(self, replies: Iterable[Reply]) -> Iterable[Reply]:
        """Called once with all replies that were admitted; replies that it replaces are checked again.

        Parameters
        ----------
        replies : the replies.
        """
        return replies


class Transport(Protocol):
    """Opened anew for every request.

    `side` says where it runs: on the server, on the device, or in a simulated network. A simulation applies all; with
    real devices the server and the devices apply their own, and network transports are skipped.
    """

    @property
    def side(self) -> Literal["server", "network", "device"]: ...

    def open(self, request: Request) -> Exchange: ...


ALL_SIDES = frozenset({"server", "network", "device"})


class Channel:
    """The opened transports of a request. Tasks that the server runs itself (`device.is_server`) bypass them.

    Parameters
    ----------
    request : the request.
    sides : where transports run that are applied here: on the "server", in the "network", on the "device".
    """

    def __init__(self, request: Request, sides: Collection[str] = ALL_SIDES):
        is_remote = any(not device.is_server for device in request.inboxes)
        transports = [transport for transport in request.transports if transport.side in sides] if is_remote else []
        self.exchanges: list[Exchange] = [transport.open(request) for transport in transports]

    def encoded_task(self, task: Task) -> Task:
        """The task as the far side of all transports knows it.

        Parameters
        ----------
        task : the task.
        """
        for exchange in self.exchanges:
            task = exchange.encoded_task(task)
        return task

    def deliver(self, inboxes: Inboxes) -> Inboxes:
        """The inboxes as they reach the devices, without those that are out of reach.

        Parameters
        ----------
        inboxes : what the server sends.
        """
        delivered = {}
        for device, inbox in inboxes.items():
            arrived: Parcel | None = inbox
            for exchange in () if device.is_server else self.exchanges:
                arrived = None if arrived is None else exchange.deliver(device, arrived)
            if arrived is not None:
                delivered[device] = arrived
        return delivered

    def upload(self, reply: Reply) -> Reply | None:
        """One reply as it reaches the server; None: it is lost.

        Parameters
        ----------
        reply : the reply as the device sends it.
        """
        arrived: Reply | None = reply
        for exchange in () if reply.device.is_server else reversed(self.exchanges):
            arrived = None if arrived is None else exchange.upload(arrived)
        return arrived

    def gather(self, replies: Iterable[Reply]) -> Iterable[Reply]:
        """All admitted replies, as the transports pass them on.

        Parameters
        ----------
        replies : the replies.
        """
        for exchange in reversed(self.exchanges):
            replies = exchange.gather(replies)
        return replies


class Engine(Protocol):
    """Carries tasks to devices and replies back."""

    def ask(self, request: Request) -> Iterable[Reply]:
        """Run the request and return the replies that pass the gate, in any order; some devices may not reply.

        Parameters
        ----------
        request : the task, and what each device receives.
        """

    def commit(self, round_number: int) -> None:
        """The round succeeded: keep the new states of its devices.

        Parameters
        ----------
        round_number : the round.
        """

    def close(self) -> None:
        """Stop worker processes and connections."""


def make_ask(engine: Engine, round_number: int) -> Ask:
    """Ask devices outside of a method's round, as evaluation does: without transports, and traffic is not recorded.

    Parameters
    ----------
    engine : the engine.
    round_number : the round after which they are asked.
    """
    return lambda task, inboxes: engine.ask(Request(task, inboxes, round_number))


class ByteCounter(Protocol):
    """Bytes of parcels as they travel."""

    def bytes_down(self, inbox: Parcel) -> int: ...

    def bytes_up(self, task: Task, upload: Parcel) -> int: ...


class Uncompressed:
    """Counts parcels as they are."""

    def bytes_down(self, inbox: Parcel) -> int:
        return payload_bytes(inbox)

    def bytes_up(self, task: Task, upload: Parcel) -> int:
        return payload_bytes(upload)


UNCOMPRESSED: ByteCounter = Uncompressed()
