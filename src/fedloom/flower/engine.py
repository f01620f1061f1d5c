"""The engine on Flower: a message to each device, replies through the admission gate, failures reported as events."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from flwr.app import Message, RecordDict

from ..client import Task
from ..engines.compression import Codec
from ..engines.faults import Wait
from ..engines.gate import Refusal, refuse
from ..engines.in_process import InProcess
from ..engines.protocol import Question
from ..engines.serialization import device_in_words, task_in_words
from ..fleet import Device, Reply
from ..tensors import Parcel
from .client_state import StateVersions, Version
from .messages import MessageClient, PendingReply, RecordEncoder, decode_reply, read_error
from .nodes import NodeRegistry


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
    memory: StateVersions = field(default_factory=StateVersions)
    _last: Version = (0, -1)  # the last request: its round, and its index there

    @property
    def client(self) -> MessageClient:
        return self.nodes.client

    def ask(
        self,
        task: Task,
        inboxes: Mapping[Device, Parcel],
        round_number: int,
        repeat: int = 0,
        wait: Wait | None = None,
        codec: Codec | None = None,
    ) -> Iterator[Reply]:
        here = {device: inbox for device, inbox in inboxes.items() if device.is_server or device.pooled_from}
        yield from self.inner.ask(task, here, round_number, repeat) if here else ()
        self._last = (round_number, self._last[1] + 1 if self._last[0] == round_number else 0)
        questions = [
            Question(self.run(), round_number, repeat, task, device, inbox, self.inner.max_examples)
            for device, inbox in inboxes.items()
            if device not in here
        ]
        if not questions:
            return
        asking = _Asking(self, questions, self._last, wait or Wait(time.monotonic() + self.default_timeout), codec)
        for reply in self._screen_norms(asking, inboxes):
            if reply.device in asking.with_new_state:
                self.memory.stage(reply.device.name, asking.version)
            yield reply

    def _screen_norms(self, asking: "_Asking", inboxes: Mapping[Device, Parcel]) -> Iterator[Reply]:
        """All replies; with norm screening only once all of them are there, without those it refuses."""
        norms, first = self.inner.norms, asking.questions[0]
        if norms is None:
            yield from asking.answers()
            return
        replies = sorted(asking.answers(), key=lambda reply: reply.device.name)
        refusals = norms.refusals(first.task, first.repeat, replies, inboxes)
        for refusal in refusals.values():
            asking.report(refusal)
        yield from (reply for reply in replies if reply.device not in refusals)

    def commit(self, round_number: int) -> None:
        self.inner.commit(round_number)
        self.memory.commit()

    def close(self) -> None:
        self.on_close()
        self.inner.close()


@dataclass
class _Asking:
    """One request to many devices. A device that is asked for several things gets them one after the other."""

    engine: Flower
    questions: list[Question]
    version: Version
    wait: Wait
    codec: Codec | None = None
    with_new_state: set[Device] = field(default_factory=set)
    _waiting: dict[str, deque[Question]] = field(default_factory=dict)
    _out: dict[str, Question] = field(default_factory=dict)  # by message
    _done: dict[str, Question] = field(default_factory=dict)

    @cached_property
    def encoder(self) -> RecordEncoder:
        return RecordEncoder(self.codec.encode_down) if self.codec else RecordEncoder()

    def answers(self) -> Iterator[Reply]:
        self._queue_requests()
        self.engine.client.has_restarted()
        received, enough = 0, self.wait.enough or len(self.questions)
        while (self._waiting or self._out) and received < enough and self.wait.left() > 0:
            if self.engine.client.has_restarted():
                self._repeat_requests()
            self._send()
            for name, message in self.engine.client.fetch(self._out):
                reply = self._receive(name, message) if name in self._out or name in self._done else None
                if reply is not None:
                    received += 1
                    yield reply
            if self._out and received < enough:
                self.engine.client.pause()
        self._give_up(received, enough)

    def report(self, refusal: Refusal) -> None:
        self.engine.inner.on_refusal(self.version[0], refusal)

    def _queue_requests(self) -> None:
        """Queue the requests to devices that are connected and free."""
        engine = self.engine
        for pending, message in engine.client.fetch_pending():
            self._report_late(pending, message)
        began = time.monotonic()
        for refusal in engine.nodes.update():
            self.report(refusal)
        self.wait = replace(
            self.wait, until=self.wait.until + time.monotonic() - began
        )  # waiting for nodes does not count
        busy = engine.client.busy_devices()
        for question in self.questions:
            name = question.device.name
            if name in busy:
                self.report(Refusal(name, "BUSY", f"its reply of round {busy[name].round_number} is still pending"))
            elif name not in engine.nodes.node_ids:
                self.report(Refusal(name, "ABSENT", "the device is not connected"))
            else:
                self._waiting.setdefault(name, deque()).append(question)

    def _report_late(self, pending: PendingReply, message: Message) -> None:
        late = ("STALE", f"a reply of round {pending.round_number}, which is over")
        self.report(Refusal(pending.device, *(read_error(message) or late)))

    def _send(self) -> None:
        asked = {question.device.name for question in self._out.values()}
        for name in [name for name in self._waiting if name not in asked]:
            question = self._waiting[name].popleft()
            if not self._waiting[name]:
                del self._waiting[name]
            message = self._send_one(question)
            if message is None:
                self.report(Refusal(name, "GONE", "the device left before the request was sent"))
            else:
                self._out[message] = question

    def _send_one(self, question: Question) -> str | None:
        content = self.encoder.encode(self._header(question), question.inbox)
        node, group = self.engine.nodes.node_ids[question.device.name], str(question.round_number)
        return self.engine.client.send(content, node, "train", self.wait.ttl(), group)

    def _repeat_requests(self) -> None:
        """Repeat requests without a reply. A device that got both replies twice; the second reply is ignored."""
        for question in {id(question): question for question in self._out.values()}.values():
            message = self._send_one(question)
            self._out |= {} if message is None else {message: question}

    def _header(self, question: Question) -> dict[str, Any]:
        memory, name = self.engine.memory, question.device.name
        return {
            "run": question.run,
            "round": question.round_number,
            "repeat": question.repeat,
            **task_in_words(question.task),
            "device": device_in_words(question.device),
            "memory": {"use": memory.newest(name), "write": self.version, "since": memory.last_committed(name)},
            "precision": str(torch.get_default_dtype()).removeprefix("torch."),
            "coded": self.codec is not None,
            "recipe": self.engine.recipe,
        }

    def _receive(self, name: str, message: Message) -> Reply | None:
        question = replace(self._done[name], answered=True) if name in self._done else self._out[name]
        self._done[name] = question
        self._out = {other: sent for other, sent in self._out.items() if sent is not question}
        error = read_error(message)
        if error:
            self.report(Refusal(question.device.name, *error))
            return None
        result, has_new_state = self._decode(message.content, question)
        if isinstance(result, Reply):
            self.with_new_state |= {result.device} if has_new_state else set()
            return result
        if result.code == "MEMORY_LOST":  # the device starts again without state
            self.engine.memory.mark_lost(result.device)
        self.report(result)
        return None

    def _decode(self, content: RecordDict, question: Question) -> tuple[Reply | Refusal, bool]:
        if self.codec is None:
            return decode_reply(content, question)
        task, inbox, most = question.task, question.inbox, question.max_examples
        result, has_new_state = decode_reply(content, replace(question, task=self.codec.asked(task)))
        if isinstance(result, Reply):
            result = self.codec.decode_up(result, task, inbox, most)
        if isinstance(result, Reply):
            result = refuse(result, task, inbox, max_examples=most) or result
        return result, has_new_state

    def _give_up(self, received: int, enough: int) -> None:
        """Report what was not received; its devices stay busy until their replies arrive."""
        is_complete = received >= enough
        reason = ("NOT_NEEDED", f"{enough} others replied first") if is_complete else ("LATE", "no reply in time")
        for name, question in self._out.items():
            self.engine.client.pending[name] = PendingReply(question.device.name, question.round_number)
        late = [*self._out.values(), *(question for left in self._waiting.values() for question in left)]
        for question in late:
            self.report(Refusal(question.device.name, *reason))
