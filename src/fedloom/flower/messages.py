"""Messages out and answers in, by Flower's own grid. Who owes an answer is not written to again.

Parcels as Flower's records: one line of JSON, and tensors as the bytes that they are.

Arrays are not written in numpy's own format: it knows no bfloat16, and its header could ask a reader for more memory
than there is. What is the same in many messages is one record, so that it is sent and stored once.
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
from ..engines.protocol import Header, Question, Refused, admitted, check_head, legible, place_of
from ..fleet import Reply
from ..tensors import Parcel, Tensors, raw_bytes

PAUSE = 0.25  # seconds between looks: an answer whose device leaves before it is fetched is lost

ERRORS = {
    0: "DEVICE_ERROR", 1: "APP_MISSING", 2: "RAISED", 3: "EXPIRED", 4: "EXPIRED", 5: "GONE", 6: "DEVICE_ERROR",
    7: "APP_INVALID", 8: "CRASHED",
}  # fmt: skip
"""What Flower says of a message without an answer, as codes of events."""


class Grid(Protocol):
    """As much of Flower's as is needed here."""

    def get_node_ids(self) -> Iterable[int]: ...

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]: ...

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]: ...


@dataclass(frozen=True)
class PendingReply:
    """An answer that did not come in time."""

    device: str
    round_number: int


@dataclass
class MessageClient:
    grid: Grid
    pause: float = PAUSE
    owing: dict[str, PendingReply] = field(default_factory=dict)  # by message
    breaks: Callable[[], int] = lambda: 0  # how often whatever carries messages has ended and begun again
    _breaks: int = 0  # that are known of

    def broken(self) -> bool:
        """Whether it has since this was last asked: a message that was just being handed over is then nobody's."""
        before, self._breaks = self._breaks, self.breaks()
        return self._breaks != before

    def send(self, content: RecordDict, node: int, kind: str, ttl: float | None, group: str = "") -> str | None:
        """The message's name; None: it could not be sent, for nobody of that number is there."""
        message = Message(content, node, kind, ttl=ttl, group_id=group)
        accepted = set(self.grid.push_messages([message]))
        return message.metadata.message_id if message.metadata.message_id in accepted else None

    def fetch(self, messages: Iterable[str]) -> list[tuple[str, Message]]:
        """Answers with what they answer: an error has no other sender than the server itself."""
        wanted = set(messages)
        found = self.grid.pull_messages(sorted(wanted)) if wanted else ()
        answered = [(message.metadata.reply_to_message_id, message) for message in found]
        return [(name, message) for name, message in answered if name in wanted]

    def settle(self) -> list[tuple[PendingReply, Message]]:
        """Answers that are here at last."""
        found = self.fetch(self.owing)
        return [(self.owing.pop(name), message) for name, message in found if name in self.owing]

    def busy(self) -> dict[str, PendingReply]:
        return {debt.device: debt for debt in self.owing.values()}

    def rest(self) -> None:
        time.sleep(self.pause)


def error_of(message: Message) -> tuple[str, str] | None:
    """A code and what Flower says, if a message holds no answer."""
    if message.has_content():
        return None
    error: Any = message.error
    return ERRORS.get(error.code, "DEVICE_ERROR"), f"Flower says {error.code}: {error.reason or 'nothing'}"


ENTRY, SAID, RAW = "fedloom", "said", "raw"
OWN_REASONS = ("MEMORY_LOST", "NONFINITE", "STALE")  # that a device may give for not answering
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
        torch.uint8, torch.bool,
    )
}  # fmt: skip


def as_it_is(parcel: Parcel) -> Parcel:
    return parcel


@dataclass(frozen=True)
class RecordEncoder:
    """Makes records, each bundle once: of what is still there, the same memory is the same tensor. `code` is what
    becomes of a bundle on its way."""

    code: Callable[[Parcel], Parcel] = as_it_is
    made: dict[Hashable, ArrayRecord] = field(default_factory=dict)

    def records(self, said: Mapping[str, Any], parcel: Parcel) -> RecordDict:
        words = ConfigRecord({SAID: json.dumps({**said, "bundles": list(parcel)})})
        arrays = {str(number): self._record(*bundle) for number, bundle in enumerate(parcel.items())}
        return RecordDict({ENTRY: words, **arrays})

    def _record(self, bundle: str, tensors: Tensors) -> ArrayRecord:
        key = tuple((name, t.data_ptr(), t.shape, t.stride(), t.dtype) for name, t in tensors.items())
        if key not in self.made:
            travels = self.code({bundle: tensors})[bundle]
            self.made[key] = ArrayRecord({name: _array(tensor) for name, tensor in travels.items()})
        return self.made[key]


def read(content: RecordDict) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]]]:
    """What the server asks: its words and the inbox. Raises what a device would tell it."""
    letter = _Records(content)
    said = letter.said()
    return said, letter.tensors(said["bundles"])


def answer(heading: Header, sent: Parcel, remembers: bool) -> RecordDict:
    return RecordEncoder().records({"reply": asdict(heading), "remembers": remembers}, sent)


def excuse(heading: Header, code: str, reason: str) -> RecordDict:
    """What a device sends that does not do what it was asked."""
    return RecordEncoder().records({"reply": asdict(heading), "excuse": [code, reason]}, {})


def opened(content: RecordDict, question: Question) -> tuple[Reply | Refusal, bool]:
    """A reply, or why it is none; and whether its device has put down something to remember."""
    letter = _Records(content)
    found = admitted(letter, question)
    return found, isinstance(found, Reply) and letter.said().get("remembers") is True


@dataclass(frozen=True)
class _Records:
    content: RecordDict

    def text(self) -> str:
        words = self.content.get(ENTRY)
        text = words.get(SAID) if isinstance(words, ConfigRecord) else None
        if not isinstance(text, str):
            raise Refused("BAD_FORMAT", "there is no head")
        return text

    def said(self) -> dict[str, Any]:
        with legible():
            return dict(json.loads(self.text()))

    def head(self, room: int) -> Any:
        check_head(len(self.text()), room)
        said = self.said()
        with legible():
            return {**said["reply"], "bundles": said["bundles"]}

    def size(self) -> int:
        return len(self.text()) + sum(len(array.data) for _, one in self.arrays() for array in one.values())

    def arrays(self) -> list[tuple[str, ArrayRecord]]:
        others = [(key, record) for key, record in self.content.items() if key != ENTRY]
        odd = [key for key, record in others if not isinstance(record, ArrayRecord)]
        if odd:
            raise Refused("BAD_FORMAT", f"{excerpt(odd[0])} is no record of arrays")
        return [(key, record) for key, record in others if isinstance(record, ArrayRecord)]

    def tensors(self, bundles: list[str]) -> dict[str, dict[str, Tensor]]:
        if "excuse" in self.said():
            raise _own_reason(self.said()["excuse"])
        sent: dict[str, dict[str, Tensor]] = {bundle: {} for bundle in bundles}
        for key, record in self.arrays():
            bundle, more = place_of(f"{key}/", bundles)
            if more:
                raise Refused("KEYS", f"{excerpt(key)} is no bundle's number")
            sent[bundle] = {name: _tensor(name, array) for name, array in record.items()}
        return sent


def _own_reason(said: Any) -> Refused:
    if isinstance(said, list) and len(said) == 2 and said[0] in OWN_REASONS and isinstance(said[1], str):
        return Refused(said[0], excerpt(said[1]))
    return Refused("BAD_FORMAT", f"no such excuse: {excerpt(said)}")


def _array(tensor: Tensor) -> Array:
    return Array(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), RAW, raw_bytes(tensor))


def _tensor(name: str, array: Array) -> Tensor:
    """In memory of its own."""
    dtype, shape = DTYPES.get(array.dtype), tuple(array.shape)
    if array.stype != RAW or dtype is None or any(size < 0 for size in shape):
        raise Refused("BAD_FORMAT", f"{excerpt(name)} is not an array of numbers: {excerpt(array.dtype)}")
    if len(array.data) != prod(shape) * dtype.itemsize:
        raise Refused("BAD_FORMAT", f"{excerpt(name)} is not whole: {len(array.data)} bytes")
    return (
        torch.frombuffer(bytearray(array.data), dtype=dtype).view(shape)
        if array.data
        else torch.empty(shape, dtype=dtype)
    )
