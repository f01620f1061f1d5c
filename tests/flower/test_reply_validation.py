"""Invalid replies over Flower: each kind is refused with its code, and the round goes on without it."""

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedloom.engines import Expected, NormScreening, Refusal
from fedloom.engines.gate import CODES
from fedloom.fleet import Reply
from fedloom.flower.engine import Flower
from fedloom.flower.messages import DTYPES, HEADER, RAW, TEXT, _to_array, decode_reply, encode_reply
from fedloom.methods.heterofl import HeteroFL
from fedloom.tensors import fingerprint
from tests.in_memory_grid import FIRST_NODE, InMemoryGrid, connect, grid_of

SIZES = (8, 5, 9, 8)
BAD = FIRST_NODE + 2
METHOD = HeteroFL()

Craft = Callable[[RecordDict], RecordDict]


def with_header(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Craft:
    def craft(content: RecordDict) -> RecordDict:
        header = json.loads(str(content[HEADER][TEXT]))
        return RecordDict({**dict(content.items()), HEADER: ConfigRecord({TEXT: json.dumps(change(header))})})

    return craft


def with_heading(**changes: Any) -> Craft:
    return with_header(lambda header: {**header, "reply": {**header["reply"], **changes}})


def with_array(make: Callable[[Array], Array], key: str = "0") -> Craft:
    """Replace the first array of a bundle."""

    def craft(content: RecordDict) -> RecordDict:
        first, *_ = content[key]
        arrays = {name: make(array) if name == first else array for name, array in content[key].items()}
        return RecordDict({**dict(content.items()), key: ArrayRecord(arrays)})

    return craft


def with_tensor(change: Callable[[Tensor], Tensor]) -> Craft:
    def make(array: Array) -> Array:
        tensor = torch.frombuffer(bytearray(array.data), dtype=torch.float32).view(tuple(array.shape))
        return _to_array(change(tensor.clone()))

    return with_array(make)


def filled(value: float) -> Craft:
    return with_tensor(lambda tensor: tensor.fill_(value))


def with_record(key: str, record: Any) -> Craft:
    return lambda content: RecordDict({**dict(content.items()), key: record})


def without(key: str) -> Craft:
    return lambda content: RecordDict({name: record for name, record in content.items() if name != key})


def renamed(content: RecordDict) -> RecordDict:
    arrays = {f"{name}_": array for name, array in content["0"].items()}
    return RecordDict({**dict(content.items()), "0": ArrayRecord(arrays)})


FORGED: dict[str, tuple[Craft, str]] = {
    "of another run": (with_heading(run="another"), "STALE"),
    "of another round": (with_heading(round=7), "STALE"),
    "of another task": (with_heading(task="judge"), "STALE"),
    "of another device": (with_heading(device="0"), "STALE"),
    "of another tier": (with_heading(tier="a"), "TIER_MISMATCH"),
    "of another model": (with_heading(spec="0"), "TIER_MISMATCH"),
    "no examples": (with_heading(examples=0), "VALUE"),
    "too many examples": (with_heading(examples=10**10), "VALUE"),
    "nothing": (lambda content: RecordDict(), "BAD_FORMAT"),
    "no header": (without(HEADER), "BAD_FORMAT"),
    "a header of arrays": (lambda content: with_record(HEADER, content["0"])(content), "BAD_FORMAT"),
    "a header that is not JSON": (with_record(HEADER, ConfigRecord({TEXT: "{"})), "BAD_FORMAT"),
    "a header that is a list": (with_record(HEADER, ConfigRecord({TEXT: "[1]"})), "BAD_FORMAT"),
    "a deep header": (with_record(HEADER, ConfigRecord({TEXT: "[" * 3000})), "BAD_FORMAT"),
    "a header in bytes": (with_record(HEADER, ConfigRecord({TEXT: b"{}"})), "BAD_FORMAT"),
    "no list of bundles": (with_header(lambda header: {**header, "bundles": 3}), "BAD_FORMAT"),
    "a long header": (with_header(lambda header: {**header, "more": "x" * 10**5}), "TOO_BIG"),
    "metrics": (with_record("1", MetricRecord({"x": 1.0})), "BAD_FORMAT"),
    "numpy's format": (with_array(lambda a: Array(a.dtype, a.shape, "numpy.ndarray", a.data)), "BAD_FORMAT"),
    "strings": (with_array(lambda array: Array("str", array.shape, RAW, array.data)), "BAD_FORMAT"),
    "a negative shape": (with_array(lambda array: Array(array.dtype, (-1, -8), RAW, array.data)), "BAD_FORMAT"),
    "a giant shape": (with_array(lambda array: Array(array.dtype, (10**12,), RAW, array.data)), "BAD_FORMAT"),
    "half an array": (with_array(lambda array: Array(array.dtype, array.shape, RAW, array.data[:-1])), "BAD_FORMAT"),
    "a giant array": (with_array(lambda array: Array("uint8", (10**5,), RAW, bytes(10**5))), "TOO_BIG"),
    "a bundle too many": (with_record("7", ArrayRecord()), "KEYS"),
    "a bundle by another number": (lambda content: with_record("0/x", content["0"])(content), "KEYS"),
    "a bundle twice": (with_header(lambda header: {**header, "bundles": ["weights"] * 2}), "KEYS"),
    "a bundle too few": (without("1"), "KEYS"),
    "other names": (renamed, "KEYS"),
    "another shape": (with_tensor(lambda tensor: tensor.flatten()), "SHAPE"),
    "other numbers": (with_tensor(lambda tensor: tensor.to(torch.int32)), "DTYPE"),
    "not a number": (filled(torch.nan), "NONFINITE"),
    "infinity": (filled(torch.inf), "NONFINITE"),
    "huge values": (filled(1e30), "HUGE"),
    "neither true nor false": (with_array(lambda a: Array(a.dtype, a.shape, RAW, b"\xff" * 4), "1"), "VALUE"),
    "large norm": (filled(1e3), "NORM"),
    "a refusal": (with_header(lambda header: {**header, "refusal": ["NONFINITE", "overflow"]}), "NONFINITE"),
    "an unknown refusal": (with_header(lambda header: {**header, "refusal": ["HUNGRY", "\x1b[31m"]}), "BAD_FORMAT"),
    "a refusal of another run": (
        with_header(lambda it: {**it, "reply": {**it["reply"], "run": "x"}, "refusal": ["STATE_LOST", ""]}),
        "STALE",
    ),
}  # fmt: skip


def forging(craft: Craft) -> Callable[[Message], Iterable[Message]]:
    def transit(message: Message) -> Iterable[Message]:
        if message.metadata.src_node_id == BAD and message.metadata.message_type == "train":
            message.content = craft(message.content)
        return [message]

    return transit


def dropping(message: Message) -> Iterable[Message]:
    """Replace the reply by a refusal."""
    return forging(with_header(lambda header: {**header, "refusal": ["STALE", ""]}))(message)


words = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
arrays = st.builds(
    Array,
    st.sampled_from([*DTYPES, "object", ""]),
    st.lists(st.integers(-2, 9) | st.just(2**62), max_size=3).map(tuple),
    st.sampled_from([RAW, "numpy.ndarray"]),
    st.binary(max_size=40),
)


@given(data=st.data())
def test_decode_reply_arbitrary_content_is_a_reply_or_a_refusal(data: st.DataObject, world: Callable[..., Any]) -> None:
    small_world = world(widths=(1.0, 0.5), sizes=SIZES)
    device = small_world.fleet.device(2, 1)
    inbox = {"weights": device.footprint.read(METHOD.start(small_world.fleet, 0)["weights"])}
    expected = Expected("first", 1, 0, METHOD.train, device, inbox)
    sent = {"weights": inbox["weights"], "labels": {"seen": torch.ones(4, dtype=torch.bool)}}
    honest = encode_reply(expected.header(9), sent, False)
    assert isinstance(decode_reply(honest, expected)[0], Reply)
    header = json.loads(str(honest[HEADER][TEXT]))
    key = data.draw(st.sampled_from([*header, *header["reply"], "refusal"]))
    changed = {**header, key: data.draw(words)} if key not in header["reply"] else header
    changed = {**changed, "reply": {**header["reply"], key: data.draw(words)}} if key in header["reply"] else changed
    content = dict(honest.items())
    if data.draw(st.booleans()):
        content[HEADER] = ConfigRecord({TEXT: json.dumps(changed)})
    if data.draw(st.booleans()):
        name = data.draw(st.sampled_from([*inbox["weights"], "x"]))
        content[data.draw(st.sampled_from(["0", "1", "2", "x"]))] = ArrayRecord({name: data.draw(arrays)})
    result, _ = decode_reply(RecordDict(content), expected)
    assert isinstance(result, Reply | Refusal)
    if isinstance(result, Refusal):
        assert result.code in CODES | {"STATE_LOST"}
        assert result.reason.isascii() and result.reason.isprintable()


@pytest.fixture(scope="module")
def play_rounds(world: Callable[..., Any], tmp_path_factory: Any) -> Callable[..., tuple[str, list[tuple[str, str]]]]:
    def play(transit: Any, rounds: int = 1) -> tuple[str, list[tuple[str, str]]]:
        small_world = world(widths=(1.0, 0.5), sizes=SIZES)
        engine = connect(small_world, METHOD, tmp_path_factory.mktemp("disks"))
        grid_of(engine).transit = transit
        screening = NormScreening(100.0, report=lambda number, refusal: small_world.refusals.append(refusal))
        server = METHOD.start(small_world.fleet, small_world.seed)
        for number in range(1, rounds + 1):
            context = replace(small_world.context(engine, number), transports=(screening,))
            server = METHOD.round(server, context)
            engine.commit(number)
            screening.commit()
        return fingerprint(server), [(refusal.device, refusal.code) for refusal in small_world.refusals]

    return play


@pytest.fixture(scope="module")
def without_bad_reply(play_rounds: Callable[..., tuple[str, list[tuple[str, str]]]]) -> str:
    return play_rounds(dropping)[0]


@pytest.mark.parametrize("kind", FORGED)
def test_engine_forged_reply_is_refused_with_its_code(
    kind: str, play_rounds: Callable[..., tuple[str, list[tuple[str, str]]]], without_bad_reply: str
) -> None:
    craft, code = FORGED[kind]
    server, refused = play_rounds(forging(craft))
    assert refused == [("2", code)]
    assert server == without_bad_reply


def test_engine_replayed_reply_is_stale(play_rounds: Callable[..., tuple[str, list[tuple[str, str]]]]) -> None:
    earlier: list[RecordDict] = []

    def replay(content: RecordDict) -> RecordDict:
        earlier.append(content)
        return earlier[0]

    _, refused = play_rounds(forging(replay), rounds=2)
    assert refused == [("2", "STALE")]


def test_engine_duplicate_reply_counts_once(play_rounds: Callable[..., tuple[str, list[tuple[str, str]]]]) -> None:
    def twice(message: Message) -> Iterable[Message]:
        return [message, message] if message.metadata.src_node_id == BAD else [message]

    def once(message: Message) -> Iterable[Message]:
        return [message]

    server, refused = play_rounds(
        lambda message: twice(message) if message.metadata.message_type == "train" else [message]
    )
    assert refused == [("2", "DUPLICATE")]
    assert server == play_rounds(once)[0]


def test_engine_reply_for_another_device_is_stale(world: Callable[..., Any], tmp_path: Path) -> None:
    small_world = world(widths=(1.0, 0.5), sizes=SIZES)
    engine = connect(small_world, METHOD, tmp_path)
    apps = grid_of(engine).apps
    engine.nodes.identify = lambda node, info: {"2": "3", "3": "2"}.get(info["device"], info["device"])
    small_world.play(METHOD, engine, 1)
    assert sorted((refusal.device, refusal.code) for refusal in small_world.refusals) == [
        ("2", "STALE"),
        ("3", "STALE"),
    ]
    assert len(apps) == len(SIZES)


def test_node_registry_second_node_of_a_device_is_refused(world: Callable[..., Any], tmp_path: Path) -> None:
    small_world = world(sizes=SIZES)
    engine: Flower = connect(small_world, METHOD, tmp_path)
    grid: InMemoryGrid = grid_of(engine)
    grid.apps[FIRST_NODE + 9] = grid.apps[FIRST_NODE]
    small_world.play(METHOD, engine, 1)
    assert [(refusal.device, refusal.code) for refusal in small_world.refusals] == [("0", "DUPLICATE")]
    assert engine.nodes.node_ids["0"] == FIRST_NODE
