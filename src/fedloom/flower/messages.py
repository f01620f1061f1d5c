"""Send requests and fetch replies over Flower's grid, and encode parcels as Flower's records.

A header is one line of JSON, tensors are raw bytes: numpy's own format has no bfloat16, and its header could ask the
reader for any amount of memory. Bundles shared by many messages are one record, so they are sent and stored once.
"""

import json
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from math import prod
from typing import Any, Protocol

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from torch import Tensor

from ..engines.gate import Refusal, excerpt
from ..engines.protocol import Expected, Header, Refused, bundle_of, check_header_size, read_reply, readable_header
from ..fleet import Reply
from ..tensors import Parcel, Tensors, raw_bytes

POLL_INTERVAL = 0.25  # seconds; a reply is lost if its device leaves before it is fetched

ERRORS = {
    0: "DEVICE_ERROR", 1: "APP_MISSING", 2: "RAISED", 3: "EXPIRED", 4: "EXPIRED", 5: "GONE", 6: "DEVICE_ERROR",
    7: "APP_INVALID", 8: "CRASHED",
}  # fmt: skip
"""Flower's error codes as codes of events."""


class Grid(Protocol):
    """The part of Flower's grid that is used here."""

    def get_node_ids(self) -> Iterable[int]: ...

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]: ...

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]: ...


@dataclass(frozen=True)
class PendingReply:
    """A reply that did not come in time. Its device gets no other request before it arrives."""

    device: str
    round_number: int


@dataclass
class MessageClient:
    grid: Grid
    poll_interval: float = POLL_INTERVAL
    pending: dict[str, PendingReply] = field(default_factory=dict)  # by message id
    restarts: Callable[[], int] = lambda: 0  # how often the SuperLink has restarted so far
    _known_restarts: int = 0

    def has_restarted(self) -> bool:
        """True if the SuperLink restarted since the last call: messages in flight may then be lost."""
        before, self._known_restarts = self._known_restarts, self.restarts()
        return self._known_restarts != before

    def send(self, content: RecordDict, node: int, kind: str, ttl: float | None, group: str = "") -> str | None:
        """Send a message; return its id, or None if the node is not connected."""
        message = Message(content, node, kind, ttl=ttl, group_id=group)
        accepted = set(self.grid.push_messages([message]))
        return message.metadata.message_id if message.metadata.message_id in accepted else None

    def fetch(self, message_ids: Iterable[str]) -> list[tuple[str, Message]]:
        """Replies that have arrived, with the ids of their requests. Errors name no other sender than the server."""
        wanted = set(message_ids)
        messages = self.grid.pull_messages(sorted(wanted)) if wanted else ()
        replies = [(message.metadata.reply_to_message_id, message) for message in messages]
        return [(message_id, message) for message_id, message in replies if message_id in wanted]

    def fetch_pending(self) -> list[tuple[PendingReply, Message]]:
        """Late replies that have arrived by now."""
        replies = self.fetch(self.pending)
        return [(self.pending.pop(name), message) for name, message in replies if name in self.pending]

    def busy_devices(self) -> dict[str, PendingReply]:
        return {reply.device: reply for reply in self.pending.values()}

    def pause(self) -> None:
        time.sleep(self.poll_interval)


def read_error(message: Message) -> tuple[str, str] | None:
    """Code and reason if a message is one of Flower's errors."""
    if message.has_content():
        return None
    error: Any = message.error
    return ERRORS.get(error.code, "DEVICE_ERROR"), f"Flower's error {error.code}: {error.reason or 'no reason given'}"


HEADER, TEXT, RAW = "fedloom", "json", "raw"
DEVICE_REASONS = ("STATE_LOST", "NONFINITE", "STALE")  # for which a device may refuse a request
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
        torch.uint8, torch.bool,
    )
}  # fmt: skip


@dataclass(frozen=True)
class RecordEncoder:
    """Encodes the parcels of one request, each bundle once: tensors at the same address are one record."""

    cache: dict[Hashable, ArrayRecord] = field(default_factory=dict)

    def encode(self, header: Mapping[str, Any], parcel: Parcel) -> RecordDict:
        text = ConfigRecord({TEXT: json.dumps({**header, "bundles": list(parcel)})})
        arrays = {str(number): self._encode_bundle(tensors) for number, tensors in enumerate(parcel.values())}
        return RecordDict({HEADER: text, **arrays})

    def _encode_bundle(self, tensors: Tensors) -> ArrayRecord:
        key = tuple((name, t.data_ptr(), t.shape, t.stride(), t.dtype) for name, t in tensors.items())
        if key not in self.cache:
            self.cache[key] = ArrayRecord({name: _to_array(tensor) for name, tensor in tensors.items()})
        return self.cache[key]


def decode_request(content: RecordDict) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]]]:
    """Header and inbox of a server's request."""
    records = _Records(content)
    header = records.line()
    return header, records.tensors(header["bundles"])


def encode_reply(header: Header, upload: Parcel, has_new_state: bool) -> RecordDict:
    return RecordEncoder().encode({"reply": asdict(header), "has_new_state": has_new_state}, upload)


def encode_refusal(header: Header, code: str, reason: str) -> RecordDict:
    """The reply of a device that does not execute a request."""
    return RecordEncoder().encode({"reply": asdict(header), "refusal": [code, reason]}, {})


def decode_reply(content: RecordDict, expected: Expected) -> tuple[Reply | Refusal, bool]:
    """A reply, or why it is refused; and whether its device has saved a new state."""
    records = _Records(content)
    result = read_reply(records, expected)
    return result, isinstance(result, Reply) and records.line().get("has_new_state") is True


@dataclass(frozen=True)
class _Records:
    content: RecordDict

    def text(self) -> str:
        record = self.content.get(HEADER)
        text = record.get(TEXT) if isinstance(record, ConfigRecord) else None
        if not isinstance(text, str):
            raise Refused("BAD_FORMAT", "there is no header")
        return text

    def line(self) -> dict[str, Any]:
        with readable_header():
            return dict(json.loads(self.text()))

    def header(self, room: int) -> Any:
        check_header_size(len(self.text()), room)
        header = self.line()
        with readable_header():
            return {**header["reply"], "bundles": header["bundles"]}

    def size(self) -> int:
        return len(self.text()) + sum(len(array.data) for _, record in self.arrays() for array in record.values())

    def arrays(self) -> list[tuple[str, ArrayRecord]]:
        others = [(key, record) for key, record in self.content.items() if key != HEADER]
        invalid = [key for key, record in others if not isinstance(record, ArrayRecord)]
        if invalid:
            raise Refused("BAD_FORMAT", f"{excerpt(invalid[0])} is not a record of arrays")
        return [(key, record) for key, record in others if isinstance(record, ArrayRecord)]

    def tensors(self, bundles: list[str]) -> dict[str, dict[str, Tensor]]:
        if "refusal" in self.line():
            raise _device_refusal(self.line()["refusal"])
        sent: dict[str, dict[str, Tensor]] = {bundle: {} for bundle in bundles}
        for key, record in self.arrays():
            bundle, more = bundle_of(f"{key}/", bundles)
            if more:
                raise Refused("KEYS", f"{excerpt(key)} is no bundle's number")
            sent[bundle] = {name: _to_tensor(name, array) for name, array in record.items()}
        return sent


def _device_refusal(refusal: Any) -> Refused:
    is_valid = isinstance(refusal, list) and len(refusal) == 2 and isinstance(refusal[1], str)
    if is_valid and refusal[0] in DEVICE_REASONS:
        return Refused(refusal[0], excerpt(refusal[1]))
    return Refused("BAD_FORMAT", f"unknown refusal: {excerpt(refusal)}")


def _to_array(tensor: Tensor) -> Array:
    return Array(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), RAW, raw_bytes(tensor))


def _to_tensor(name: str, array: Array) -> Tensor:
    """A tensor with memory of its own."""
    dtype, shape = DTYPES.get(array.dtype), tuple(array.shape)
    if array.stype != RAW or dtype is None or any(size < 0 for size in shape):
        raise Refused("BAD_FORMAT", f"{excerpt(name)} is not a numeric array: {excerpt(array.dtype)}")
    if len(array.data) != prod(shape) * dtype.itemsize:
        raise Refused("BAD_FORMAT", f"{excerpt(name)} has {len(array.data)} bytes, its shape needs another number")
    if not array.data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(array.data), dtype=dtype).view(shape)
