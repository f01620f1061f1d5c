"""The engine on Flower: a message to each device, replies through the admission gate, failures reported as events."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from flwr.app import Message

from ..engines.gate import Refusal
from ..engines.in_process import InProcess
from ..engines.protocol import Expected
from ..engines.task_ref import device_to_json, task_to_json
from ..fleet import Channel, Device, Reply, Request
from .client_state import StateVersions, Version
from .messages import MessageClient, PendingReply, RecordEncoder, decode_reply, read_error
from .nodes import NodeRegistry
from .versions import VERSION, VERSION_KEY

LINGER = 2.0  # times the time left: for so long a reply can still be fetched
LEAST_LINGER = 60.0  # seconds


@dataclass
class Flower:
    """Asks devices over Flower.

    Parameters
    ----------
    inner
        Runs what the server itself is asked.
    recipe
        As JSON; it is part of every message, because devices keep nothing of a run but their state.
    run
        Returns the run's name, which stays the same when the run is resumed.
    """

    inner: InProcess
    nodes: NodeRegistry
    recipe: Mapping[str, Any]
    run: Callable[[], str]
    default_timeout: float = math.inf  # seconds, for requests outside of a method's round
    on_close: Callable[[], None] = lambda: None
    client_states: StateVersions = field(default_factory=StateVersions)
    _last: Version = (0, -1)  # the last request: its round, and its index there

    @property
    def client(self) -> MessageClient:
        return self.nodes.client

    def ask(self, request: Request) -> Iterator[Reply]:
        local = {device: inbox for device, inbox in request.inboxes.items() if device.is_server or device.pooled_from}
        yield from self.inner.ask(replace(request, inboxes=local)) if local else ()
        number = request.round_number
        self._last = (number, self._last[1] + 1 if self._last[0] == number else 0)
        remote = {device: inbox for device, inbox in request.inboxes.items() if device not in local}
        if not remote:
            return
        request = replace(request, inboxes=remote)
        channel = Channel(request, {"server"})
        asking = _Asking(self, request, channel, self._last)
        for reply in self.inner.gate.receive(request, channel, asking.replies(), prechecked=True):
            if reply.device in asking.with_new_state:
                self.client_states.stage(reply.device.name, asking.version)
            yield reply

    def commit(self, round_number: int) -> None:
        self.inner.commit(round_number)
        self.client_states.commit()

    def close(self) -> None:
        self.on_close()
        self.inner.close()


class _Asking:
    """One request to many devices. A device that is asked for several things gets them one after the other."""

    def __init__(self, engine: Flower, request: Request, channel: Channel, version: Version):
        self.engine, self.version, self.with_new_state = engine, version, set[Device]()
        self.enough = request.min_replies or len(request.inboxes)
        limit = request.deadline + request.round_started
        self.until = time.monotonic() + engine.default_timeout if math.isinf(request.deadline) else limit
        task, most = channel.encoded_task(request.task), engine.inner.gate.max_examples
        self.is_compressed = task is not request.task
        self.delivered = channel.deliver(request.inboxes)
        self.expected = [
            Expected(engine.run(), request.round_number, request.repeat, task, device, request.inboxes[device], most)
            for device in self.delivered
        ]
        self.encoder = RecordEncoder()
        self._waiting: dict[str, deque[Expected]] = {}
        self._out: dict[str, Expected] = {}  # by message
        self._done: dict[str, Expected] = {}

    def replies(self) -> Iterator[Reply]:
        self._queue_requests()
        self.engine.client.has_restarted()
        received = 0
        while (self._waiting or self._out) and received < self.enough and self.until > time.monotonic():
            if self.engine.client.has_restarted():
                self._repeat_requests()
            self._send()
            for name, message in self.engine.client.fetch(self._out):
                reply = self._receive(name, message) if name in self._out or name in self._done else None
                if reply is not None:
                    received += 1
                    yield reply
            if self._out and received < self.enough:
                self.engine.client.pause()
        self._give_up(received)

    def report(self, refusal: Refusal) -> None:
        self.engine.inner.gate.report(self.version[0], refusal)

    def _time_to_live(self) -> float | None:
        """Seconds for which a message is kept: longer than the deadline, so that a late reply frees its device."""
        left = self.until - time.monotonic()
        return None if math.isinf(left) else max(LEAST_LINGER, LINGER * left)

    def _queue_requests(self) -> None:
        """Queue the requests to devices that are connected and free."""
        engine = self.engine
        for pending, message in engine.client.fetch_pending():
            self._report_late(pending, message)
        began = time.monotonic()
        for refusal in engine.nodes.update():
            self.report(refusal)
        self.until += time.monotonic() - began  # waiting for nodes does not count
        busy = engine.client.busy_devices()
        for expected in self.expected:
            name = expected.device.name
            if name in busy:
                self.report(Refusal(name, "BUSY", f"its reply of round {busy[name].round_number} is still pending"))
            elif name not in engine.nodes.node_ids:
                self.report(Refusal(name, "ABSENT", "the device is not connected"))
            else:
                self._waiting.setdefault(name, deque()).append(expected)

    def _report_late(self, pending: PendingReply, message: Message) -> None:
        late = ("STALE", f"a reply of round {pending.round_number}, which is over")
        self.report(Refusal(pending.device, *(read_error(message) or late)))

    def _send(self) -> None:
        asked = {expected.device.name for expected in self._out.values()}
        for name in [name for name in self._waiting if name not in asked]:
            expected = self._waiting[name].popleft()
            if not self._waiting[name]:
                del self._waiting[name]
            message = self._send_one(expected)
            if message is None:
                self.report(Refusal(name, "GONE", "the device left before the request was sent"))
            else:
                self._out[message] = expected

    def _send_one(self, expected: Expected) -> str | None:
        content = self.encoder.encode(self._header(expected), self.delivered[expected.device])
        node, group = self.engine.nodes.node_ids[expected.device.name], str(expected.round_number)
        return self.engine.client.send(content, node, "train", self._time_to_live(), group)

    def _repeat_requests(self) -> None:
        """Repeat requests without a reply. A device that got both replies twice; the second reply is ignored."""
        for expected in {id(expected): expected for expected in self._out.values()}.values():
            message = self._send_one(expected)
            self._out |= {} if message is None else {message: expected}

    def _header(self, expected: Expected) -> dict[str, Any]:
        states, name = self.engine.client_states, expected.device.name
        return {
            VERSION_KEY: VERSION,
            "run": expected.run,
            "round": expected.round_number,
            "repeat": expected.repeat,
            **task_to_json(expected.task),
            "device": device_to_json(expected.device),
            "state": {"use": states.newest(name), "write": self.version, "since": states.last_committed(name)},
            "precision": str(torch.get_default_dtype()).removeprefix("torch."),
            "compressed": self.is_compressed,
            "recipe": self.engine.recipe,
        }

    def _receive(self, name: str, message: Message) -> Reply | None:
        expected = replace(self._done[name], answered=True) if name in self._done else self._out[name]
        self._done[name] = expected
        self._out = {other: sent for other, sent in self._out.items() if sent is not expected}
        error = read_error(message)
        if error:
            self.report(Refusal(expected.device.name, *error))
            return None
        result, has_new_state = decode_reply(message.content, expected)
        if isinstance(result, Reply):
            self.with_new_state |= {result.device} if has_new_state else set()
            return result
        if result.code == "STATE_LOST":  # the device starts again without state
            self.engine.client_states.mark_lost(result.device)
        self.report(result)
        return None

    def _give_up(self, received: int) -> None:
        """Report what was not received; its devices stay busy until their replies arrive."""
        is_complete = received >= self.enough
        reason = ("NOT_NEEDED", f"{self.enough} others replied first") if is_complete else ("LATE", "no reply in time")
        for name, expected in self._out.items():
            self.engine.client.pending[name] = PendingReply(expected.device.name, expected.round_number)
        late = [*self._out.values(), *(expected for left in self._waiting.values() for expected in left)]
        for expected in late:
            self.report(Refusal(expected.device.name, *reason))
