"""From what came, by whatever carrier, to a reply that a method may see: every letter is asked the same questions.

Whatever it holds, opening it ends in a reply or in a refusal, never in an exception, and nothing is allocated for what
is larger than the question allows. What a device is to remember stays with it.

A reply as bytes: safetensors with one line of JSON that says whose it is and what it answers. Nothing in it can be
run.

A simulation whose devices answer in bytes, as they would over a network: the same bits as without.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from math import prod
from typing import Any, Protocol

from safetensors.torch import load, save
from torch import Tensor

from ..client import Layout, Task
from ..fleet import Device, Reply
from ..models import Model
from ..tensors import Parcel
from .blocks import Parcels
from .compression import Codec, Coded
from .gate import MAX_EXAMPLES, Fault, Refusal, count_fault, declared, excerpt, refuse
from .in_process import InProcess

ROOM = 4096  # bytes for the heading
ROOM_EACH = 256  # for every tensor, beside its name


@dataclass(frozen=True)
class Header:
    """What stands above a reply. `spec` tells the model that it is for."""

    run: str
    round: int
    task: str
    repeat: int
    device: str
    tier: str
    spec: str
    examples: int


@dataclass(frozen=True)
class Question:
    """What the server asked a device, and so all that it knows of the answer before it comes."""

    run: str
    round_number: int
    repeat: int
    task: Task
    device: Device
    inbox: Parcel
    max_examples: int = MAX_EXAMPLES
    answered: bool = False

    def heading(self, examples: int) -> Header:
        """Above an honest answer of a device with so many examples."""
        device = self.device
        return Header(
            self.run,
            self.round_number,
            self.task.name,
            self.repeat,
            device.name,
            device.tier,
            spec(device.model),
            examples,
        )


class Refused(Exception):  # noqa: N818 - it does not leave whoever opens letters
    def __init__(self, code: str, reason: str):
        super().__init__(code, reason)
        self.code, self.reason = code, reason


class Letter(Protocol):
    """A reply as it came; each of these may refuse."""

    def head(self, room: int) -> Any:
        """The heading and the list of bundles, in JSON's words, if they are no longer than that."""

    def size(self) -> int:
        """All of it, in bytes."""

    def tensors(self, bundles: list[str]) -> dict[str, dict[str, Tensor]]: ...


def admitted(letter: Letter, question: Question) -> Reply | Refusal:
    try:
        heading, bundles = _read_heading(letter.head(_room(question)))
        _raise(_misdirected(heading, question))
        _raise(count_fault(question.device, heading.examples, question.max_examples))
        layouts = declared(question.task, question.device, question.inbox, heading.examples)
        _check_size(letter.size(), question, layouts)
        if len(set(bundles)) < len(bundles):
            raise Refused("KEYS", "a bundle is listed twice")
        sent = letter.tensors(bundles)
    except Refused as found:
        return Refusal(question.device.name, found.code, found.reason)
    reply = Reply(question.device, heading.examples, sent)
    refusal = refuse(reply, question.task, question.inbox, max_examples=question.max_examples)
    return refusal or Reply(question.device, heading.examples, _in_order(sent, layouts))


@contextmanager
def legible() -> Iterator[None]:
    """A head that is not what it should be is refused."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Refused("BAD_FORMAT", f"the head cannot be read: {type(error).__name__}") from error


def check_head(size: int, room: int) -> None:
    if size > room:
        raise Refused("TOO_BIG", f"a head of {size} bytes, {room} are enough")


def place_of(key: str, bundles: list[str]) -> tuple[str, str]:
    """A tensor goes by its bundle's number, for a name may hold anything."""
    number, _, name = key.partition("/")
    if number not in map(str, range(len(bundles))):
        raise Refused("KEYS", f"{excerpt(key)} belongs to no bundle")
    return bundles[int(number)], name


@lru_cache(maxsize=4096)
def spec(model: Model) -> str:
    """The same wherever the same model is built: a hash of what it is made of and of all its shapes."""
    shapes = sorted((name, tuple(shape)) for name, shape in model.shapes().items())
    said = repr((model.family, sorted(model.settings), model.input_shape, model.classes, model.tokens, shapes))
    return hashlib.sha256(said.encode()).hexdigest()


def _raise(fault: Fault | None) -> None:
    if fault:
        raise Refused(*fault)


def _room(question: Question) -> int:
    """How long the head of a reply may be. Names do not depend on how many examples there are."""
    layouts = declared(question.task, question.device, question.inbox, 1)
    names = [name for layout in layouts.values() for name in layout]
    return ROOM + sum(6 * len(bundle) for bundle in layouts) + sum(ROOM_EACH + 6 * len(name) for name in names)


def _read_heading(head: Any) -> tuple[Header, list[str]]:
    with legible():
        said = dict(head)
        bundles = said.pop("bundles")
        heading = Header(**said)
    if not isinstance(bundles, list) or not all(isinstance(bundle, str) for bundle in bundles):
        raise Refused("BAD_FORMAT", "the head does not list the bundles")
    if any(isinstance(value, list | dict) for value in said.values()):
        raise Refused("BAD_FORMAT", "the head holds more than words and numbers")
    return heading, bundles


def _misdirected(heading: Header, question: Question) -> Fault | None:
    """Whether a reply answers another question, or comes from one who takes itself for another."""
    asked = question.heading(heading.examples)
    for name in (field.name for field in fields(Header)):
        said, wanted = getattr(heading, name), getattr(asked, name)
        if name != "examples" and (type(said) is not type(wanted) or said != wanted):
            code = "TIER_MISMATCH" if name in ("tier", "spec") else "STALE"
            return code, f"{name} is {excerpt(said)}, asked was {excerpt(wanted)}"
    return ("DUPLICATE", "this was answered before") if question.answered else None


def _check_size(size: int, question: Question, layouts: Mapping[str, Layout]) -> None:
    most = (
        8
        + _room(question)
        + sum(prod(shape) * dtype.itemsize for one in layouts.values() for shape, dtype in one.values())
    )
    if size > most:
        raise Refused("TOO_BIG", f"{size} bytes, the task may send {most}")


def _in_order(sent: Parcel, layouts: Mapping[str, Layout]) -> dict[str, dict[str, Tensor]]:
    """As it was declared: bytes do not keep the order of names."""
    return {bundle: {name: sent[bundle][name] for name in layout} for bundle, layout in layouts.items()}


ENTRY = "fedloom"


def encode_reply(heading: Header, parcel: Parcel) -> bytes:
    """Bundles are listed, for an empty one leaves no trace among tensors; tensors go by their bundle's number."""
    said = json.dumps({**asdict(heading), "bundles": list(parcel)})
    flat: dict[str, Tensor] = {}
    for number, tensors in enumerate(parcel.values()):
        flat |= {f"{number}/{name}": tensor.detach().contiguous().clone() for name, tensor in tensors.items()}
    return save(flat, {ENTRY: said})


def opened(data: bytes, question: Question) -> Reply | Refusal:
    return admitted(_Bytes(data), question)


@dataclass(frozen=True)
class _Bytes:
    data: bytes

    def head(self, room: int) -> Any:
        size = int.from_bytes(self.data[:8], "little")
        if len(self.data) < 8 or size > len(self.data) - 8:
            raise Refused("BAD_FORMAT", f"{len(self.data)} bytes are not a whole reply")
        check_head(size, room)
        with legible():
            return json.loads(json.loads(self.data[8 : 8 + size])["__metadata__"][ENTRY])

    def size(self) -> int:
        return len(self.data)

    def tensors(self, bundles: list[str]) -> dict[str, dict[str, Tensor]]:
        try:
            flat: Mapping[str, Tensor] = load(self.data)
        except Exception as error:  # whatever a reader makes of bytes that somebody else wrote
            raise Refused("BAD_FORMAT", f"not safetensors: {excerpt(str(error))}") from error
        sent: dict[str, dict[str, Tensor]] = {bundle: {} for bundle in bundles}
        for key, tensor in flat.items():
            bundle, name = place_of(key, bundles)
            sent[bundle][name] = tensor
        return sent


Transit = Callable[[bytes, Question], Iterable[bytes]]
"""What arrives of what a device sent: as a rule just that, but it may be nothing, something else, or several things."""


def as_sent(data: bytes, question: Question) -> Iterable[bytes]:
    return (data,)


@dataclass(frozen=True)
class ByMail:
    """The first reply to a question that is admitted counts. A device of which nothing was does not remember."""

    inner: InProcess
    run: str = "run"
    transit: Transit = as_sent
    codec: Codec | None = None

    def ask(self, task: Task, inboxes: Parcels, round_number: int, repeat: int = 0) -> Iterator[Reply]:
        asked = self.codec.asked(task) if self.codec else task

        def way(reply: Reply) -> Reply | None:
            if reply.device.is_server:  # the server does not write to itself
                return reply
            device, most = reply.device, self.inner.max_examples
            return self._arrived(reply, Question(self.run, round_number, repeat, asked, device, inboxes[device], most))

        engine = Coded(self.inner, self.codec) if self.codec else self.inner
        return engine.ask(task, inboxes, round_number, repeat, way)

    def commit(self, round_number: int) -> None:
        self.inner.commit(round_number)

    def close(self) -> None:
        self.inner.close()

    def _arrived(self, reply: Reply, question: Question) -> Reply | None:
        first: Reply | None = None
        for data in self.transit(encode_reply(question.heading(reply.examples), reply.upload), question):
            found = opened(data, replace(question, answered=first is not None))
            if isinstance(found, Refusal):
                self.inner.on_refusal(question.round_number, found)
            else:
                first = found
        return first
