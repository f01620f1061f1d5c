"""Letters that no device should send, each with the code by which it is refused."""

import json
import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedloom.engines import Expected, Refusal, decode_reply, encode_reply
from fedloom.engines.protocol import Header

Sent = dict[str, dict[str, Tensor]]


@dataclass(frozen=True)
class SentMessage:
    """An honest one, to be spoiled."""

    data: bytes
    expected: Expected
    header: Header
    sent: Sent

    def headed(self, **changes: Any) -> bytes:
        return encode_reply(replace(self.header, **changes), self.sent)

    def holding(self, sent: Sent) -> bytes:
        return encode_reply(self.header, sent)

    def floats(self) -> list[tuple[str, str, Tensor]]:
        """Those with something in them, the longest shape first."""
        all_of_them = [(bundle, name, t) for bundle, tensors in self.sent.items() for name, t in tensors.items()]
        found = [one for one in all_of_them if one[2].is_floating_point() and one[2].numel()]
        return sorted(found, key=lambda one: -one[2].dim())

    def changed(self, bundle: str, name: str, tensor: Tensor) -> bytes:
        return self.holding({**self.sent, bundle: {**self.sent[bundle], name: tensor}})

    def with_extra(self, tensor: Tensor | None = None) -> bytes:
        bundle = next(iter(self.sent), "extra")
        extra = torch.zeros(2) if tensor is None else tensor
        return self.holding({**self.sent, bundle: {**self.sent.get(bundle, {}), "stowaway": extra}})


def honest(data: bytes, expected: Expected) -> SentMessage:
    reply = decode_reply(data, expected)
    assert not isinstance(reply, Refusal), reply
    sent = {bundle: dict(tensors) for bundle, tensors in reply.upload.items()}
    return SentMessage(data, expected, expected.header(reply.examples), sent)


def in_one(change: Callable[[Tensor], Tensor]) -> Callable[[SentMessage], list[bytes]]:
    """Change the first tensor that becomes another by it; where a device sends none, it sends one."""

    def craft(message: SentMessage) -> list[bytes]:
        for bundle, name, tensor in message.floats():
            made = change(tensor.clone())
            if made.shape != tensor.shape or made.dtype != tensor.dtype or not torch.equal(made, tensor):
                return [message.changed(bundle, name, made)]
        return [message.with_extra(change(torch.ones(2, 3)))]

    return craft


def _first(value: float) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        tensor.view(-1)[0] = value
        return tensor

    return change


def _transposed(tensor: Tensor) -> Tensor:
    """A square one loses a row as well: transposed, it has the declared shape."""
    square = tensor.dim() > 1 and tensor.shape[0] == tensor.shape[1]
    return tensor.transpose(0, 1)[int(square) :] if tensor.dim() > 1 else tensor


def _broadcastable(tensor: Tensor) -> Tensor:
    return tensor[:1] if tensor.dim() and len(tensor) > 1 else tensor.unsqueeze(0)


def _grown(tensor: Tensor) -> Tensor:
    return torch.ones([size + 1 for size in tensor.shape] or [1], dtype=tensor.dtype)


def _missing(message: SentMessage) -> list[bytes]:
    if not message.floats():
        return [message.with_extra()]
    bundle, missing, _ = message.floats()[0]
    rest = {name: tensor for name, tensor in message.sent[bundle].items() if name != missing}
    return [message.holding({**message.sent, bundle: rest})]


def _renamed(message: SentMessage) -> list[bytes]:
    if not message.floats():
        return [message.with_extra()]
    bundle, old, _ = message.floats()[0]
    renamed = {f"{name}_" if name == old else name: tensor for name, tensor in message.sent[bundle].items()}
    return [message.holding({**message.sent, bundle: renamed})]


def _of_a_smaller_tier(message: SentMessage) -> list[bytes]:
    smaller = {
        bundle: {name: t[:1] if t.dim() else t for name, t in one.items()} for bundle, one in message.sent.items()
    }
    return [encode_reply(replace(message.header, tier="smaller", spec="0" * 64), smaller)]


def with_head(data: bytes, change: Callable[[str], str]) -> bytes:
    """The same with another head, its length set right."""
    size = int.from_bytes(data[:8], "little")
    head = change(data[8 : 8 + size].decode()).encode()
    return len(head).to_bytes(8, "little") + head + data[8 + size :]


def _of_strings(message: SentMessage) -> list[bytes]:
    data = message.data if message.floats() else message.with_extra()
    return [with_head(data, lambda head: head.replace('"dtype":"F', '"dtype":"STRING_', 1))]


def _giant_head(message: SentMessage) -> list[bytes]:
    return [with_head(message.data, lambda head: head + " " * 500_000)]


def _noise(message: SentMessage) -> list[bytes]:
    return [torch.randint(0, 256, (300,), generator=torch.Generator().manual_seed(3)).to(torch.uint8).numpy().tobytes()]


def _numbered(examples: Any) -> Callable[[SentMessage], list[bytes]]:
    return lambda message: [message.headed(examples=examples)]


MALFORMED: dict[str, tuple[Callable[[SentMessage], list[bytes]], str]] = {
    "empty": (lambda message: [b""], "BAD_FORMAT"),
    "truncated": (lambda message: [message.data[:-5]], "BAD_FORMAT"),
    "random bytes": (_noise, "BAD_FORMAT"),
    "pickle": (lambda message: [pickle.dumps({"weights": [1.0] * 50})], "BAD_FORMAT"),
    "wrong magic": (lambda message: [message.data[:8] + b"PK" + message.data[10:]], "BAD_FORMAT"),
    "giant header": (_giant_head, "TOO_BIG"),
    "missing key": (_missing, "KEYS"),
    "extra key": (lambda message: [message.with_extra()], "KEYS"),
    "renamed key": (_renamed, "KEYS"),
    "transposed": (in_one(_transposed), "SHAPE"),
    "broadcastable": (in_one(_broadcastable), "SHAPE"),
    "smaller tier": (_of_a_smaller_tier, "TIER_MISMATCH"),
    "bigger tier": (in_one(_grown), "SHAPE"),
    "int tensor": (in_one(lambda tensor: torch.ones(tensor.shape, dtype=torch.int32)), "DTYPE"),
    "string tensor": (_of_strings, "BAD_FORMAT"),
    "one NaN": (in_one(_first(torch.nan)), "NONFINITE"),
    "all NaN": (in_one(lambda tensor: torch.full_like(tensor, torch.nan)), "NONFINITE"),
    "Inf": (in_one(_first(-torch.inf)), "NONFINITE"),
    "metric out of range": (_numbered(2.5), "VALUE"),
    "1e30": (in_one(_first(1e30)), "HUGE"),
    "weight -1": (_numbered(-1), "VALUE"),
    "weight 0": (_numbered(0), "VALUE"),
    "weight NaN": (_numbered(torch.nan), "VALUE"),
    "weight 1e18": (_numbered(10**18), "VALUE"),
    "old round": (lambda message: [message.headed(round=message.header.round - 1)], "STALE"),
    "other run": (lambda message: [message.headed(run="another")], "STALE"),
    "duplicate": (lambda message: [message.data, message.data], "DUPLICATE"),
}
OF_TENSORS = {"SHAPE", "DTYPE", "NONFINITE", "HUGE"}  # without tensors there is only one way to spoil them: to add one


def expected_code(kind: str, message: SentMessage) -> str:
    code = MALFORMED[kind][1]
    return "KEYS" if code in OF_TENSORS and not message.floats() else code


def head_of(data: bytes | bytearray) -> dict[str, Any]:
    made: dict[str, Any] = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return made
