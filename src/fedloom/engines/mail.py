"""A reply as bytes: safetensors with one line of JSON that says whose it is and what it answers.

Nothing in it can be run. Whatever the bytes, opening them ends in a reply or in a refusal, never in an exception, and
nothing is allocated for what is larger than the question allows. What a device is to remember stays with it.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from math import prod
from typing import Any

from safetensors.torch import load, save
from torch import Tensor

from ..fleet import Device, Reply
from ..models import Model
from ..tensors import Parcel
from ..training import Layout, Task
from .admission import MOST_EXAMPLES, Fault, Refusal, count_fault, declared, excerpt, refuse

ENTRY = "fedloom"
ROOM = 4096  # bytes for the heading
ROOM_EACH = 256  # for every tensor, beside its name


@dataclass(frozen=True)
class Heading:
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
    most_examples: int = MOST_EXAMPLES
    answered: bool = False

    def heading(self, examples: int) -> Heading:
        """Above an honest answer of a device with so many examples."""
        device = self.device
        return Heading(
            self.run,
            self.round_number,
            self.task.name,
            self.repeat,
            device.name,
            device.tier,
            spec(device.model),
            examples,
        )


class _Refused(Exception):  # noqa: N818 - it does not leave this file
    def __init__(self, code: str, reason: str):
        super().__init__(code, reason)
        self.code, self.reason = code, reason


def sealed(heading: Heading, parcel: Parcel) -> bytes:
    """Bundles are listed, for an empty one leaves no trace among tensors; tensors go by their bundle's number."""
    said = json.dumps({**asdict(heading), "bundles": list(parcel)})
    flat: dict[str, Tensor] = {}
    for number, tensors in enumerate(parcel.values()):
        flat |= {f"{number}/{name}": tensor.detach().contiguous().clone() for name, tensor in tensors.items()}
    return save(flat, {ENTRY: said})


def opened(data: bytes, question: Question) -> Reply | Refusal:
    try:
        heading, bundles = _read_heading(data, _room(question))
        _raise(_misdirected(heading, question))
        _raise(count_fault(question.device, heading.examples, question.most_examples))
        layouts = declared(question.task, question.device, question.inbox, heading.examples)
        _check_size(data, question, layouts)
        sent = _read_tensors(data, bundles)
    except _Refused as found:
        return Refusal(question.device.name, found.code, found.reason)
    reply = Reply(question.device, heading.examples, sent)
    refusal = refuse(reply, question.task, question.inbox, most_examples=question.most_examples)
    return refusal or Reply(question.device, heading.examples, _in_order(sent, layouts))


@lru_cache(maxsize=4096)
def spec(model: Model) -> str:
    """The same wherever the same model is built: a hash of what it is made of and of all its shapes."""
    shapes = sorted((name, tuple(shape)) for name, shape in model.shapes().items())
    said = repr((model.family, sorted(model.settings), model.input_shape, model.classes, model.tokens, shapes))
    return hashlib.sha256(said.encode()).hexdigest()


def _raise(fault: Fault | None) -> None:
    if fault:
        raise _Refused(*fault)


def _room(question: Question) -> int:
    """How long the head of a reply may be. Names do not depend on how many examples there are."""
    layouts = declared(question.task, question.device, question.inbox, 1)
    names = [name for layout in layouts.values() for name in layout]
    return ROOM + sum(6 * len(bundle) for bundle in layouts) + sum(ROOM_EACH + 6 * len(name) for name in names)


def _read_heading(data: bytes, room: int) -> tuple[Heading, list[str]]:
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or size > len(data) - 8:
        raise _Refused("BAD_FORMAT", f"{len(data)} bytes are not a whole reply")
    if size > room:
        raise _Refused("TOO_BIG", f"a head of {size} bytes, {room} are enough")
    try:
        said = json.loads(json.loads(data[8 : 8 + size])["__metadata__"][ENTRY])
        bundles = said.pop("bundles")
        heading = Heading(**said)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _Refused("BAD_FORMAT", f"the head cannot be read: {type(error).__name__}") from error
    if not isinstance(bundles, list) or not all(isinstance(bundle, str) for bundle in bundles):
        raise _Refused("BAD_FORMAT", "the head does not list the bundles")
    if any(isinstance(value, list | dict) for value in said.values()):
        raise _Refused("BAD_FORMAT", "the head holds more than words and numbers")
    return heading, bundles


def _misdirected(heading: Heading, question: Question) -> Fault | None:
    """Whether a reply answers another question, or comes from one who takes itself for another."""
    asked = question.heading(heading.examples)
    for name in (field.name for field in fields(Heading)):
        said, wanted = getattr(heading, name), getattr(asked, name)
        if name != "examples" and (type(said) is not type(wanted) or said != wanted):
            code = "TIER_MISMATCH" if name in ("tier", "spec") else "STALE"
            return code, f"{name} is {excerpt(said)}, asked was {excerpt(wanted)}"
    return ("DUPLICATE", "this was answered before") if question.answered else None


def _check_size(data: bytes, question: Question, layouts: Mapping[str, Layout]) -> None:
    most = (
        8
        + _room(question)
        + sum(prod(shape) * dtype.itemsize for one in layouts.values() for shape, dtype in one.values())
    )
    if len(data) > most:
        raise _Refused("TOO_BIG", f"{len(data)} bytes, the task may send {most}")


def _read_tensors(data: bytes, bundles: list[str]) -> dict[str, dict[str, Tensor]]:
    if len(set(bundles)) < len(bundles):
        raise _Refused("KEYS", "a bundle is listed twice")
    try:
        flat: Mapping[str, Any] = load(data)
    except Exception as error:  # whatever a reader makes of bytes that somebody else wrote
        raise _Refused("BAD_FORMAT", f"not safetensors: {excerpt(str(error))}") from error
    sent: dict[str, dict[str, Tensor]] = {bundle: {} for bundle in bundles}
    for key, tensor in flat.items():
        number, _, name = key.partition("/")
        if number not in map(str, range(len(bundles))):
            raise _Refused("KEYS", f"{excerpt(key)} belongs to no bundle")
        sent[bundles[int(number)]][name] = tensor
    return sent


def _in_order(sent: Parcel, layouts: Mapping[str, Layout]) -> dict[str, dict[str, Tensor]]:
    """As it was declared: bytes do not keep the order of names."""
    return {bundle: {name: sent[bundle][name] for name in layout} for bundle, layout in layouts.items()}
