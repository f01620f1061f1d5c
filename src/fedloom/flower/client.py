"""A device's side: carry out what a message asks, as the same device would in a simulation, and answer."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from flwr.app import RecordDict

from ..engines.blocks import Request, make_blocks, run_block
from ..engines.client_state import ClientStateStore
from ..engines.compression import Codec
from ..engines.in_process import InProcess
from ..engines.protocol import Question
from ..engines.serialization import Find, device_from_words, task_from_words
from ..fleet import Fleet
from ..tensors import Parcel, all_finite, split
from .client_state import Entry, Stamp, diary
from .messages import DTYPES, answer, excuse, read


@dataclass(frozen=True)
class ClientRuntime:
    """What a device has: its examples, with the recipe's way to train on them, and a folder for what it remembers."""

    name: str
    engine: InProcess
    fleet: Fleet
    find: Find
    folder: Path
    codec: Codec | None = None  # how parcels travel between it and the server


HomeOf = Callable[[Mapping[str, Any]], ClientRuntime]
"""From a run's recipe, in JSON's words, to the device's place in it."""


def carry(content: RecordDict, runtime_of: HomeOf) -> RecordDict:
    """What a message asks for, done. Whatever is raised is for the server to hear of."""
    said, inbox = read(content)
    with _precision(said["precision"]):
        home = runtime_of(said["recipe"])
        task, device = task_from_words(said, home.find), device_from_words(said["device"], home.fleet)
        codec = home.codec if said["coded"] else None
        told = codec.decode_down(inbox) if codec else inbox
        question = Question(said["run"], said["round"], said["repeat"], task, device, told)
        return _answer(question, home, codec, said["memory"])


def _answer(question: Question, home: ClientRuntime, codec: Codec | None, about: Mapping[str, Any]) -> RecordDict:
    device, own = question.device, diary(home.folder, question.run, question.device.name)
    if device.name != home.name:
        return excuse(question.heading(1), "STALE", f"this is device {home.name}")
    heading = question.heading(home.engine.client_data.count(device))
    use, write, since = (_stamp(about[name]) for name in ("use", "write", "since"))
    before = own.read(use) if use else Entry(None, {})
    if before is None:
        return excuse(heading, "MEMORY_LOST", f"what it remembered in round {use and use[0]} is not there")
    memory = home.engine.memory.prepare(device) if before.memory is None else before.memory
    sent, kept = _alone(question, home.engine, memory)
    if kept is not None and not all(all_finite(tensors.values()) for tensors in kept.values()):
        return excuse(heading, "NONFINITE", "what the device would remember is not finite")
    left = before.left_out
    if codec:
        sent, left = codec.encode_up(question.task, question.inbox, sent, left)
    news = kept is not None or left is not before.left_out
    if news and write:
        own.write(write, Entry(before.memory if kept is None else kept, left))
    if since:
        own.forget_before(since)
    return answer(heading, sent, news)


def _alone(question: Question, engine: InProcess, memory: Parcel) -> tuple[Parcel, Parcel | None]:
    """What it sends and what it is to remember. As a block of its own, with the draws that it would have in any
    other; nobody else is in it, or only itself again."""
    brought = replace(engine, memory=ClientStateStore(lambda device: memory))
    request = Request(brought, question.task, {question.device: question.inbox}, question.round_number, question.repeat)
    (work,) = make_blocks([request])
    outcome = run_block(work)
    return split(outcome.upload, 0), None if outcome.state is None else split(outcome.state, 0)


def _stamp(said: list[int] | None) -> Stamp | None:
    return (said[0], said[1]) if said else None


@contextmanager
def _precision(name: str) -> Iterator[None]:
    """Numbers as the server has them."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(DTYPES[name])
    try:
        yield
    finally:
        torch.set_default_dtype(before)
