"""The transports of one request, opened: what happens to its messages between the server and the devices."""

from collections.abc import Collection, Iterable

from ..client import Task
from ..fleet import Exchange, Inboxes, Reply, Request
from ..tensors import Parcel

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
