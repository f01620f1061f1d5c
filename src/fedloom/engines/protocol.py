"""Replies as bytes, and the checks that turn bytes from outside into a reply that a method may see.

A reply is safetensors with one line of JSON that says which request it answers; nothing in it can be run. Nothing is
allocated for a message that is larger than the request allows. Device state never travels.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from math import prod
from typing import Any, Literal, Protocol

from safetensors.torch import load, save
from torch import Tensor

from ..client import Layout, Task
from ..fleet import Device, Exchange, Reply, Request
from ..models import Model
from ..tensors import Parcel
from .gate import MAX_EXAMPLES, Fault, Refusal, Report, count_fault, declared, excerpt, ignore, refuse

ROOM = 4096  # bytes for the header
ROOM_EACH = 256  # for every tensor, beside its name


MAX_MESSAGE_BYTES = 2**31 - 1
"""The largest message to or from a real device: the limit of gRPC and protobuf, which Flower cannot raise."""


@dataclass(frozen=True)
class Header:
    """What precedes every reply: which request it answers.

    Parameters
    ----------
    run : the run.
    round : the round.
    task : the name of the task.
    repeat : the number of earlier requests of the round with the task's random stream.
    device : the name of the device.
    tier : the name of its tier.
    spec : a hash of the model that the reply is for.
    examples : the number of the device's examples.
    """

    run: str
    round: int
    task: str
    repeat: int
    device: str
    tier: str
    spec: str
    examples: int


@dataclass(frozen=True)
class Expected:
    """What the server knows of a reply before it comes: the request to one device.

    Parameters
    ----------
    run : the run.
    round_number : the round.
    repeat : the number of earlier requests of the round with the task's random stream.
    task : the task.
    device : the device.
    inbox : what it receives.
    max_examples : the largest number of examples that it may claim to hold.
    answered : whether a reply has come already.
    """

    run: str
    round_number: int
    repeat: int
    task: Task
    device: Device
    inbox: Parcel
    max_examples: int = MAX_EXAMPLES
    answered: bool = False

    def header(self, examples: int) -> Header:
        """The header of an honest reply.

        Parameters
        ----------
        examples : the number of the device's examples.
        """
        device = self.device
        return Header(
            self.run,
            self.round_number,
            self.task.name,
            self.repeat,
            device.name,
            device.tier,
            model_spec(device.model),
            examples,
        )


class Refused(Exception):  # noqa: N818 - it never leaves this module and its readers
    def __init__(self, code: str, reason: str):
        super().__init__(code, reason)
        self.code, self.reason = code, reason


class Message(Protocol):
    """A reply as it came, by whatever carrier. Every method may raise `Refused`."""

    def header(self, room: int) -> Any:
        """Header and list of bundles as parsed JSON, if they take at most `room` bytes."""

    def size(self) -> int:
        """Bytes of the whole message."""

    def tensors(self, bundles: list[str]) -> dict[str, dict[str, Tensor]]: ...


def read_reply(message: Message, expected: Expected) -> Reply | Refusal:
    """Check and decode a message. Whatever it holds, this ends in a reply or a refusal, never in an exception."""
    try:
        header, bundles = _read_header(message.header(_room(expected)))
        _raise(_misdirected(header, expected))
        _raise(count_fault(expected.device, header.examples, expected.max_examples))
        layouts = declared(expected.task, expected.device, expected.inbox, header.examples)
        _check_size(message.size(), expected, layouts)
        if len(set(bundles)) < len(bundles):
            raise Refused("KEYS", "a bundle is listed twice")
        sent = message.tensors(bundles)
    except Refused as refused:
        return Refusal(expected.device.name, refused.code, refused.reason)
    reply = Reply(expected.device, header.examples, sent)
    refusal = refuse(reply, expected.task, expected.inbox, expected.max_examples)
    return refusal or Reply(expected.device, header.examples, _in_order(sent, layouts))


@contextmanager
def readable_header() -> Iterator[None]:
    """Refuse a header that cannot be read."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Refused("BAD_FORMAT", f"the header cannot be read: {type(error).__name__}") from error


def check_header_size(size: int, room: int) -> None:
    if size > room:
        raise Refused("TOO_BIG", f"a header of {size} bytes, {room} are enough")


def bundle_of(key: str, bundles: list[str]) -> tuple[str, str]:
    """Tensors are keyed by the number of their bundle, because names may hold anything."""
    number, _, name = key.partition("/")
    if number not in map(str, range(len(bundles))):
        raise Refused("KEYS", f"{excerpt(key)} belongs to no bundle")
    return bundles[int(number)], name


@lru_cache(maxsize=4096)
def model_spec(model: Model) -> str:
    """A hash of family, settings, shapes and frozen weights: the same wherever the same model is built.

    A device sends no frozen weights, so this is where one with another base is noticed.
    """
    shapes = sorted((name, tuple(shape)) for name, shape in model.shapes().items())
    facts = repr((model.family, sorted(model.settings), model.input_shape, model.classes, model.tokens, shapes))
    return hashlib.sha256((facts + model.frozen_sha256()).encode()).hexdigest()


def _raise(fault: Fault | None) -> None:
    if fault:
        raise Refused(*fault)


def _room(expected: Expected) -> int:
    """The longest header of an honest reply. Names do not depend on the number of examples."""
    layouts = declared(expected.task, expected.device, expected.inbox, 1)
    names = [name for layout in layouts.values() for name in layout]
    return ROOM + sum(6 * len(bundle) for bundle in layouts) + sum(ROOM_EACH + 6 * len(name) for name in names)


def _read_header(head: Any) -> tuple[Header, list[str]]:
    with readable_header():
        values = dict(head)
        bundles = values.pop("bundles")
        header = Header(**values)
    if not isinstance(bundles, list) or not all(isinstance(bundle, str) for bundle in bundles):
        raise Refused("BAD_FORMAT", "the header does not list the bundles")
    if any(isinstance(value, list | dict) for value in values.values()):
        raise Refused("BAD_FORMAT", "the header holds more than strings and numbers")
    return header, bundles


def _misdirected(header: Header, expected: Expected) -> Fault | None:
    """Whether a reply answers another request or comes from another device."""
    asked = expected.header(header.examples)
    for name in (field.name for field in fields(Header)):
        value, wanted = getattr(header, name), getattr(asked, name)
        if name != "examples" and (type(value) is not type(wanted) or value != wanted):
            code = "TIER_MISMATCH" if name in ("tier", "spec") else "STALE"
            meaning = ": the model's settings, shapes or frozen weights differ" if name == "spec" else ""
            return code, f"{name} is {excerpt(value)}, expected {excerpt(wanted)}{meaning}"
    return ("DUPLICATE", "this request was answered before") if expected.answered else None


def _check_size(size: int, expected: Expected, layouts: Mapping[str, Layout]) -> None:
    most = (
        8
        + _room(expected)
        + sum(prod(shape) * dtype.itemsize for one in layouts.values() for shape, dtype in one.values())
    )
    if size > most:
        raise Refused("TOO_BIG", f"{size} bytes, the task may send {most}")


def _in_order(sent: Parcel, layouts: Mapping[str, Layout]) -> dict[str, dict[str, Tensor]]:
    """In declared order: bytes do not keep the order of names."""
    return {bundle: {name: sent[bundle][name] for name in layout} for bundle, layout in layouts.items()}


ENTRY = "fedloom"


def encode_reply(header: Header, parcel: Parcel) -> bytes:
    """A reply as bytes: safetensors with the header as metadata.

    Parameters
    ----------
    header : which request it answers.
    parcel : the bundles that the device sends.
    """
    line = json.dumps({**asdict(header), "bundles": list(parcel)})
    flat: dict[str, Tensor] = {}
    for number, tensors in enumerate(parcel.values()):
        flat |= {f"{number}/{name}": tensor.detach().contiguous().clone() for name, tensor in tensors.items()}
    return save(flat, {ENTRY: line})


def decode_reply(data: bytes, expected: Expected) -> Reply | Refusal:
    """Check and decode the bytes of a reply. Whatever they hold, this ends in a reply or a refusal.

    Parameters
    ----------
    data : the bytes.
    expected : the request that they should answer.
    """
    return read_reply(_Bytes(data), expected)


@dataclass(frozen=True)
class _Bytes:
    data: bytes

    def header(self, room: int) -> Any:
        size = int.from_bytes(self.data[:8], "little")
        if len(self.data) < 8 or size > len(self.data) - 8:
            raise Refused("BAD_FORMAT", f"{len(self.data)} bytes are not a whole reply")
        check_header_size(size, room)
        with readable_header():
            return json.loads(json.loads(self.data[8 : 8 + size])["__metadata__"][ENTRY])

    def size(self) -> int:
        return len(self.data)

    def tensors(self, bundles: list[str]) -> dict[str, dict[str, Tensor]]:
        try:
            flat: Mapping[str, Tensor] = load(self.data)
        except Exception as error:  # any error that a reader raises for bytes written elsewhere
            raise Refused("BAD_FORMAT", f"not safetensors: {excerpt(str(error))}") from error
        sent: dict[str, dict[str, Tensor]] = {bundle: {} for bundle in bundles}
        for key, tensor in flat.items():
            bundle, name = bundle_of(key, bundles)
            sent[bundle][name] = tensor
        return sent


Transit = Callable[[bytes, Expected], Iterable[bytes]]
"""What arrives of the bytes that a device sent: as a rule just those, but maybe nothing, others, or several copies."""


def unchanged(data: bytes, expected: Expected) -> Iterable[bytes]:
    return (data,)


@dataclass(frozen=True)
class BytesTransport:
    """A transport that sends replies as bytes, as a real network does.

    Parameters
    ----------
    run : the name of the run in headers.
    transit : what arrives of the bytes that a device sent; it may garble, lose or copy them.
    encoded_task : turns a task into one that declares what travels.
    report : called for every message that is refused.
    max_examples : the largest number of examples that a device may claim to hold.
    side : where the transport runs.
    """

    run: str = "run"
    transit: Transit = unchanged
    encoded_task: Callable[[Task], Task] = lambda task: task
    report: Report = ignore
    max_examples: int = MAX_EXAMPLES
    side: Literal["network"] = "network"

    def open(self, request: Request) -> Exchange:
        return _BytesExchange(self, request)


@dataclass
class _BytesExchange(Exchange):
    transport: BytesTransport
    request: Request

    def upload(self, reply: Reply) -> Reply | None:
        """The first copy that is admitted counts."""
        transport, request, device = self.transport, self.request, reply.device
        expected = Expected(
            transport.run,
            request.round_number,
            request.repeat,
            transport.encoded_task(request.task),
            device,
            request.inboxes[device],
            transport.max_examples,
        )
        first: Reply | None = None
        for data in transport.transit(encode_reply(expected.header(reply.examples), reply.upload), expected):
            decoded = decode_reply(data, replace(expected, answered=first is not None))
            if isinstance(decoded, Refusal):
                transport.report(request.round_number, decoded)
            else:
                first = replace(reply, examples=decoded.examples, upload=decoded.upload)
        return first
