"""One bad device is nothing: with every method, a round in which one device sends what it should not is the round in
which it was asked and nothing of it came."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from fedloom.client import ClientResult
from fedloom.engines import BytesTransport, Expected, InlineExecutor
from fedloom.engines.in_process import Block, Job, make_blocks, run_block
from fedloom.methods import Method
from fedloom.tensors import Parcel, fingerprint
from fedloom.testing import with_transports
from fedloom.testing.methods import check_messages
from tests.malformed import MALFORMED, expected_code, honest

SIZES = (6, 5, 9, 8)
LABELS = [[0, 1], [1, 2], [0, 1, 2, 3], [0, 3]]
BAD = ("2", "pool")  # the latter is the only device of a method that gathers all data

Prints = dict[str, str]


@dataclass
class OneIsBad:
    kind: str | None  # None: nothing of it arrives
    codes: list[tuple[str, str]] = field(default_factory=list)  # device and code of all that should be refused

    def __call__(self, data: bytes, expected: Expected) -> Iterable[bytes]:
        if expected.device.name not in BAD:
            return [data]
        if self.kind is None:
            return []
        message = honest(data, expected)
        self.codes.append((expected.device.name, expected_code(self.kind, message)))
        return MALFORMED[self.kind][0](message)


def bits(parcel: Parcel) -> str:
    """Also of what a block shares, which is stored once and has no strides."""
    plain = {
        bundle: {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
        for bundle, tensors in parcel.items()
    }
    return fingerprint(plain)


@dataclass
class Remembering(InlineExecutor):
    """What a block of devices makes of the same expected is worked out once: only what becomes of it is tried here."""

    known: dict[Any, ClientResult] = field(default_factory=dict)

    def run(self, job: Job) -> Iterator[tuple[Block, ClientResult]]:
        for block in make_blocks([job]):
            request, devices = job.request, tuple(member.device.name for member in block.members)
            asked = request.task.name, request.round_number, request.repeat, *devices
            key = asked, bits(block.inbox), bits(block.state)
            if key not in self.known:
                self.known[key] = run_block(block)
            yield block, self.known[key]


def played(place: Any, method: Method, engine: Any, inner: Any) -> Prints:
    """What a round leaves behind, at the server and on the devices."""
    server = place.play(method, engine, rounds=1)
    kept = {name: fingerprint(parcel) for name, parcel in inner.client_states.committed.items()}
    return {"": fingerprint(server), **kept}


@pytest.fixture
def round_of(method: Method, world_for: Callable[..., Any]) -> Callable[..., tuple[Prints, list[tuple[str, str]]]]:
    place, executor = world_for(method, None, sizes=SIZES, labels=LABELS), Remembering()

    def play(transit: Any) -> tuple[Prints, list[tuple[str, str]]]:
        place.refusals.clear()
        inner = place.engine(method, executor=executor)
        bytes_transport = BytesTransport(transit=transit, report=inner.gate.report)
        engine = inner if transit is None else with_transports(inner, bytes_transport)
        prints = played(place, method, engine, inner)
        return prints, [(refusal.device, refusal.code) for refusal in place.refusals]

    return play


def test_a_malformed_reply_is_as_one_that_never_came(
    round_of: Callable[..., tuple[Prints, list[tuple[str, str]]]],
) -> None:
    with_it, none = round_of(lambda data, expected: [data])
    assert none == []
    without, none = round_of(OneIsBad(None))
    assert none == []
    assert with_it != without
    for kind in MALFORMED:
        bad = OneIsBad(kind)
        prints, refused = round_of(bad)
        assert sorted(refused) == sorted(bad.codes) != [], kind
        assert prints == (with_it if kind == "duplicate" else without), kind  # the first of two counts


def test_messages_change_no_bits(method: Method, world_for: Callable[..., Any]) -> None:
    check_messages(method, world_for(method, None, sizes=SIZES, labels=LABELS))


def test_there_are_as_many_kinds_as_promised() -> None:
    assert len(MALFORMED) == 27  # of 24, one is four: weights of -1, 0, NaN and 1e18
