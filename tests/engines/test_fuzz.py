"""Letters damaged in every way that chance finds: each is refused, or is as good as it should be."""

import random
import time
from collections import Counter
from collections.abc import Callable

import torch

from fedloom.engines import Refusal, decode_reply
from tests.engines.test_protocol import expected, message
from tests.malformed import with_head

LETTERS = 20_000
CODES = {"STALE", "TIER_MISMATCH", "TOO_BIG", "BAD_FORMAT", "KEYS", "SHAPE", "DTYPE", "NONFINITE", "HUGE", "VALUE"}
WORDS = [
    "NaN",
    "1e18",
    "-1",
    "0",
    "null",
    "[]",
    "{}",
    '"x"',
    "F64",
    "BOOL",
    "I64",
    "F8_E5M2",
    "true",
    "9" * 30,
    "\\u0000",
]


def flipped(data: bytes, draw: random.Random) -> bytes:
    """A few bits, in the head as likely as behind it."""
    made = bytearray(data)
    head = 8 + int.from_bytes(data[:8], "little")
    for _ in range(draw.choice((1, 1, 2, 8))):
        place = draw.randrange(*draw.choice(((0, 8), (8, head), (head, len(data)))))
        made[place] ^= 1 << draw.randrange(8)
    return bytes(made)


def cut(data: bytes, draw: random.Random) -> bytes:
    first, last = sorted((draw.randrange(len(data) + 1), draw.randrange(len(data) + 1)))
    return draw.choice((data[:last], data[first:], data[:first] + data[last:]))


def stuffed(data: bytes, draw: random.Random) -> bytes:
    place, size = draw.randrange(len(data) + 1), draw.choice((1, 4, 8, 100, 20_000))
    return data[:place] + draw.choice((bytes(size), draw.randbytes(size), data[:size])) + data[place:]


def mislabelled(data: bytes, draw: random.Random) -> bytes:
    """Another length of the head."""
    right = int.from_bytes(data[:8], "little")
    length = draw.choice((0, 1, right - 1, right + 1, len(data) - 8, 2**63, 2**64 - 1, draw.randrange(2 * len(data))))
    return length.to_bytes(8, "little") + data[8:]


def reworded(data: bytes, draw: random.Random) -> bytes:
    """The head is still text, and its length is right."""

    def change(head: str) -> str:
        first = draw.randrange(len(head))
        return head[:first] + draw.choice((*WORDS, head[first : first + 20])) + head[first + draw.choice((0, 1, 3)) :]

    return with_head(data, change)


def renumbered(data: bytes, draw: random.Random) -> bytes:
    """Some digit of the head is another: a shape, an offset, a count, a round."""

    def change(head: str) -> str:
        place = draw.choice([place for place, sign in enumerate(head) if sign.isdigit()])
        return head[:place] + str(draw.choice((0, 1, 2, 3, 7, 9, 12, 2**31, 2**64))) + head[place + 1 :]

    return with_head(data, change)


def retyped(data: bytes, draw: random.Random) -> bytes:
    """Tensors of another kind, some of the same size."""
    old, new = (
        draw.choice(("F32", "I64", "BOOL")),
        draw.choice(("F32", "I32", "U8", "BOOL", "F8_E4M3", "C64", "F64", "Q")),
    )
    return with_head(data, lambda head: head.replace(f'"{old}"', f'"{new}"', draw.choice((1, -1))))


def refilled(data: bytes, draw: random.Random) -> bytes:
    """The head as it is, and noise behind it."""
    head = 8 + int.from_bytes(data[:8], "little")
    noise = draw.choice((draw.randbytes(len(data) - head), b"\xff" * (len(data) - head), b"\x7f" * (len(data) - head)))
    return data[:head] + noise


MUTATIONS: list[Callable[[bytes, random.Random], bytes]] = [
    flipped, flipped, cut, stuffed, mislabelled, reworded, renumbered, retyped, refilled,
]  # fmt: skip


def test_decode_reply_damaged_bytes_never_raise() -> None:
    draw, whole, asked = random.Random(20), message(), expected()
    found: Counter[str] = Counter()
    slowest = 0.0
    for _ in range(LETTERS):
        data = draw.choice(MUTATIONS)(whole, draw)
        if draw.random() < 0.2:
            data = draw.choice((cut, stuffed))(data, draw)
        began = time.process_time()
        reply = decode_reply(data, asked)
        slowest = max(slowest, time.process_time() - began)
        if isinstance(reply, Refusal):
            found[reply.code] += 1
            continue
        found["admitted"] += 1
        assert 1 <= reply.examples <= asked.max_examples
        for bundle, sends in asked.task.sends.items():
            layout = sends(asked.device.model, asked.inbox, reply.examples)
            assert reply.upload[bundle].keys() == layout.keys()
            for name, (shape, dtype) in layout.items():
                tensor = reply.upload[bundle][name]
                assert (tuple(tensor.shape), tensor.dtype) == (shape, dtype)
                assert bool(torch.isfinite(tensor).all()) and float(tensor.double().abs().max()) <= 1e18
        assert int(reply.upload["labels"]["seen"].view(torch.uint8).max()) <= 1
    assert sum(found.values()) == LETTERS
    assert found.keys() - {"admitted"} == CODES  # every check but that for duplicates has had its say
    assert slowest < 1.0
