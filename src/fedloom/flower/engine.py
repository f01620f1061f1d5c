"""`ask` over Flower: a message to each device, answers through the one gate, whatever goes wrong told as an event."""

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
from .client_state import Stamp, StateVersions
from .messages import MessageClient, PendingReply, RecordEncoder, error_of, opened
from .nodes import NodeRegistry


@dataclass
class Flower:
    """`inner` computes what the server itself is asked for. `recipe`, in JSON's words, goes with every message: a
    device keeps nothing of a run but what it remembers. `run` says the run's name, the same when it is resumed."""

    inner: InProcess
    roster: NodeRegistry
    recipe: Mapping[str, Any]
    run: Callable[[], str]
    patience: float = math.inf  # seconds, for questions outside of a method's turn
    hang_up: Callable[[], None] = lambda: None  # when the run is over
    memory: StateVersions = field(default_factory=StateVersions)
    _serial: tuple[int, int] = (0, -1)  # of the last question: its round, and its number there

    @property
    def post(self) -> MessageClient:
        return self.roster.post

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
        self._serial = (round_number, self._serial[1] + 1 if self._serial[0] == round_number else 0)
        questions = [
            Question(self.run(), round_number, repeat, task, device, inbox, self.inner.max_examples)
            for device, inbox in inboxes.items()
            if device not in here
        ]
        if not questions:
            return
        asking = _Asking(self, questions, self._serial, wait or Wait(time.monotonic() + self.patience), codec)
        for reply in self._of_usual_length(asking, inboxes):
            if reply.device in asking.remembering:
                self.memory.remember(reply.device.name, asking.serial)
            yield reply

    def _of_usual_length(self, asking: "_Asking", inboxes: Mapping[Device, Parcel]) -> Iterator[Reply]:
        """Once all are here, where a recipe minds how far devices go."""
        norms, one = self.inner.norms, asking.questions[0]
        if norms is None:
            yield from asking.answers()
            return
        replies = sorted(asking.answers(), key=lambda reply: reply.device.name)
        refusals = norms.refusals(one.task, one.repeat, replies, inboxes)
        for refusal in refusals.values():
            asking.tell(refusal)
        yield from (reply for reply in replies if reply.device not in refusals)

    def commit(self, round_number: int) -> None:
        self.inner.commit(round_number)
        self.memory.commit()

    def close(self) -> None:
        self.hang_up()
        self.inner.close()


@dataclass
class _Asking:
    """One question to many devices. A device that is asked for several things gets them one after the other."""

    engine: Flower
    questions: list[Question]
    serial: Stamp
    wait: Wait
    codec: Codec | None = None
    remembering: set[Device] = field(default_factory=set)
    _waiting: dict[str, deque[Question]] = field(default_factory=dict)
    _out: dict[str, Question] = field(default_factory=dict)  # by message
    _done: dict[str, Question] = field(default_factory=dict)

    @cached_property
    def press(self) -> RecordEncoder:
        return RecordEncoder(self.codec.encode_down) if self.codec else RecordEncoder()

    def answers(self) -> Iterator[Reply]:
        self._line_up()
        self.engine.post.broken()
        heard, enough = 0, self.wait.enough or len(self.questions)
        while (self._waiting or self._out) and heard < enough and self.wait.left() > 0:
            if self.engine.post.broken():
                self._ask_again()
            self._send()
            for name, message in self.engine.post.fetch(self._out):
                reply = self._opened(name, message) if name in self._out or name in self._done else None
                if reply is not None:
                    heard += 1
                    yield reply
            if self._out and heard < enough:
                self.engine.post.rest()
        self._give_up(heard, enough)

    def tell(self, refusal: Refusal) -> None:
        self.engine.inner.on_refusal(self.serial[0], refusal)

    def _line_up(self) -> None:
        """All who are there and free."""
        engine = self.engine
        for debt, message in engine.post.settle():
            self._too_late(debt, message)
        began = time.monotonic()
        for refusal in engine.roster.call():
            self.tell(refusal)
        self.wait = replace(self.wait, until=self.wait.until + time.monotonic() - began)  # no round waits for a fleet
        busy = engine.post.busy()
        for question in self.questions:
            name = question.device.name
            if name in busy:
                said = f"it still owes its answer of round {busy[name].round_number}"
                self.tell(Refusal(name, "BUSY", said))
            elif name not in engine.roster.nodes:
                self.tell(Refusal(name, "ABSENT", "no such device is connected"))
            else:
                self._waiting.setdefault(name, deque()).append(question)

    def _too_late(self, debt: PendingReply, message: Message) -> None:
        fault = error_of(message)
        said = f"an answer to round {debt.round_number}, which is over" if fault is None else fault[1]
        self.tell(Refusal(debt.device, "STALE" if fault is None else fault[0], said))

    def _send(self) -> None:
        asked = {question.device.name for question in self._out.values()}
        for name in [name for name in self._waiting if name not in asked]:
            question = self._waiting[name].popleft()
            if not self._waiting[name]:
                del self._waiting[name]
            message = self._posted(question)
            if message is None:
                self.tell(Refusal(name, "GONE", "it left before it could be asked"))
            else:
                self._out[message] = question

    def _posted(self, question: Question) -> str | None:
        content = self.press.records(self._words(question), question.inbox)
        node, group = self.engine.roster.nodes[question.device.name], str(question.round_number)
        return self.engine.post.send(content, node, "train", self.wait.ttl(), group)

    def _ask_again(self) -> None:
        """All who have not answered. Whoever got the first question too gives the same answer twice, and the second is
        not looked for."""
        for question in {id(one): one for one in self._out.values()}.values():
            message = self._posted(question)
            self._out |= {} if message is None else {message: question}

    def _words(self, question: Question) -> dict[str, Any]:
        memory, name = self.engine.memory, question.device.name
        return {
            "run": question.run,
            "round": question.round_number,
            "repeat": question.repeat,
            **task_in_words(question.task),
            "device": device_in_words(question.device),
            "memory": {"use": memory.newest(name), "write": self.serial, "since": memory.counting(name)},
            "precision": str(torch.get_default_dtype()).removeprefix("torch."),
            "coded": self.codec is not None,
            "recipe": self.engine.recipe,
        }

    def _opened(self, name: str, message: Message) -> Reply | None:
        question = replace(self._done[name], answered=True) if name in self._done else self._out[name]
        self._done[name] = question
        self._out = {other: one for other, one in self._out.items() if one is not question}
        fault = error_of(message)
        if fault:
            self.tell(Refusal(question.device.name, *fault))
            return None
        found, remembers = self._read(message.content, question)
        if isinstance(found, Reply):
            self.remembering |= {found.device} if remembers else set()
            return found
        if found.code == "MEMORY_LOST":  # it begins anew, and that is known
            self.engine.memory.lost(found.device)
        self.tell(found)
        return None

    def _read(self, content: RecordDict, question: Question) -> tuple[Reply | Refusal, bool]:
        if self.codec is None:
            return opened(content, question)
        task, inbox, most = question.task, question.inbox, question.max_examples
        found, remembers = opened(content, replace(question, task=self.codec.asked(task)))
        if isinstance(found, Reply):
            found = self.codec.decode_up(found, task, inbox, most)
        if isinstance(found, Reply):
            found = refuse(found, task, inbox, max_examples=most) or found
        return found, remembers

    def _give_up(self, heard: int, enough: int) -> None:
        """What is still out is owed."""
        code, said = (
            ("NOT_NEEDED", f"{enough} others were sooner") if heard >= enough else ("LATE", "no answer in time")
        )
        for name, question in self._out.items():
            self.engine.post.owing[name] = PendingReply(question.device.name, question.round_number)
        late = [*self._out.values(), *(question for left in self._waiting.values() for question in left)]
        for question in late:
            self.tell(Refusal(question.device.name, code, said))
