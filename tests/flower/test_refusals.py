"""What comes back over Flower and is no answer: each kind has its code, and the round is as if it had not come."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedloom.engines import Norms, Question, Refusal
from fedloom.engines.gate import CODES
from fedloom.fleet import Reply
from fedloom.flower.engine import Flower
from fedloom.flower.messages import DTYPES, HEADER, RAW, TEXT, _to_array, decode_reply, encode_reply
from fedloom.methods.heterofl import HeteroFL
from fedloom.tensors import fingerprint
from tests.desk import FIRST, Desk, connect, desk_of

SIZES = (8, 5, 9, 8)
BAD = FIRST + 2
METHOD = HeteroFL()

Craft = Callable[[RecordDict], RecordDict]


def reworded(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Craft:
    def craft(content: RecordDict) -> RecordDict:
        said = json.loads(str(content[HEADER][TEXT]))
        return RecordDict({**dict(content.items()), HEADER: ConfigRecord({TEXT: json.dumps(change(said))})})

    return craft


def headed(**changes: Any) -> Craft:
    return reworded(lambda said: {**said, "reply": {**said["reply"], **changes}})


def with_array(make: Callable[[Array], Array], key: str = "0") -> Craft:
    """The first array of a bundle is another."""

    def craft(content: RecordDict) -> RecordDict:
        first, *_ = content[key]
        arrays = {name: make(one) if name == first else one for name, one in content[key].items()}
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
    return lambda content: RecordDict({name: one for name, one in content.items() if name != key})


def renamed(content: RecordDict) -> RecordDict:
    arrays = {f"{name}_": one for name, one in content["0"].items()}
    return RecordDict({**dict(content.items()), "0": ArrayRecord(arrays)})


FORGED: dict[str, tuple[Craft, str]] = {
    "of another run": (headed(run="another"), "STALE"),
    "of another round": (headed(round=7), "STALE"),
    "of another task": (headed(task="judge"), "STALE"),
    "of another device": (headed(device="0"), "STALE"),
    "of another tier": (headed(tier="a"), "TIER_MISMATCH"),
    "of another model": (headed(spec="0"), "TIER_MISMATCH"),
    "no examples": (headed(examples=0), "VALUE"),
    "too many examples": (headed(examples=10**10), "VALUE"),
    "nothing": (lambda content: RecordDict(), "BAD_FORMAT"),
    "no head": (without(HEADER), "BAD_FORMAT"),
    "a head of arrays": (lambda content: with_record(HEADER, content["0"])(content), "BAD_FORMAT"),
    "a head that is no JSON": (with_record(HEADER, ConfigRecord({TEXT: "{"})), "BAD_FORMAT"),
    "a head that is a list": (with_record(HEADER, ConfigRecord({TEXT: "[1]"})), "BAD_FORMAT"),
    "a deep head": (with_record(HEADER, ConfigRecord({TEXT: "[" * 3000})), "BAD_FORMAT"),
    "a head in bytes": (with_record(HEADER, ConfigRecord({TEXT: b"{}"})), "BAD_FORMAT"),
    "no list of bundles": (reworded(lambda said: {**said, "bundles": 3}), "BAD_FORMAT"),
    "a long head": (reworded(lambda said: {**said, "more": "x" * 10**5}), "TOO_BIG"),
    "metrics": (with_record("1", MetricRecord({"x": 1.0})), "BAD_FORMAT"),
    "numpy's format": (with_array(lambda one: Array(one.dtype, one.shape, "numpy.ndarray", one.data)), "BAD_FORMAT"),
    "strings": (with_array(lambda one: Array("str", one.shape, RAW, one.data)), "BAD_FORMAT"),
    "a negative shape": (with_array(lambda one: Array(one.dtype, (-1, -8), RAW, one.data)), "BAD_FORMAT"),
    "a giant shape": (with_array(lambda one: Array(one.dtype, (10**12,), RAW, one.data)), "BAD_FORMAT"),
    "half an array": (with_array(lambda one: Array(one.dtype, one.shape, RAW, one.data[:-1])), "BAD_FORMAT"),
    "a giant array": (with_array(lambda one: Array("uint8", (10**5,), RAW, bytes(10**5))), "TOO_BIG"),
    "a bundle too many": (with_record("7", ArrayRecord()), "KEYS"),
    "a bundle by another number": (lambda content: with_record("0/x", content["0"])(content), "KEYS"),
    "a bundle twice": (reworded(lambda said: {**said, "bundles": ["weights"] * 2}), "KEYS"),
    "a bundle too few": (without("1"), "KEYS"),
    "other names": (renamed, "KEYS"),
    "another shape": (with_tensor(lambda tensor: tensor.flatten()), "SHAPE"),
    "other numbers": (with_tensor(lambda tensor: tensor.to(torch.int32)), "DTYPE"),
    "no number": (filled(torch.nan), "NONFINITE"),
    "infinity": (filled(torch.inf), "NONFINITE"),
    "too much": (filled(1e30), "HUGE"),
    "neither true nor false": (with_array(lambda one: Array(one.dtype, one.shape, RAW, b"\xff" * 4), "1"), "VALUE"),
    "too far": (filled(1e3), "NORM"),
    "an excuse": (reworded(lambda said: {**said, "refusal": ["NONFINITE", "I cannot"]}), "NONFINITE"),
    "an unknown excuse": (reworded(lambda said: {**said, "refusal": ["HUNGRY", "\x1b[31m"]}), "BAD_FORMAT"),
    "an excuse of another run": (
        reworded(lambda said: {**said, "reply": {**said["reply"], "run": "x"}, "refusal": ["MEMORY_LOST", ""]}), "STALE",
    ),
}  # fmt: skip


def forging(craft: Craft) -> Callable[[Message], Iterable[Message]]:
    def transit(message: Message) -> Iterable[Message]:
        if message.metadata.src_node_id == BAD and message.metadata.message_type == "train":
            message.content = craft(message.content)
        return [message]

    return transit


def dropping(message: Message) -> Iterable[Message]:
    """Nothing of it but that it did not work."""
    return forging(reworded(lambda said: {**said, "refusal": ["STALE", ""]}))(message)


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
def test_whatever_comes_is_a_reply_or_a_refusal(data: st.DataObject, world: Callable[..., Any]) -> None:
    place = world(widths=(1.0, 0.5), sizes=SIZES)
    device = place.fleet.device(2, 1)
    inbox = {"weights": device.footprint.read(METHOD.start(place.fleet, 0)["weights"])}
    question = Question("first", 1, 0, METHOD.train, device, inbox)
    sent = {"weights": inbox["weights"], "labels": {"seen": torch.ones(4, dtype=torch.bool)}}
    honest = encode_reply(question.heading(9), sent, False)
    assert isinstance(decode_reply(honest, question)[0], Reply)
    said = json.loads(str(honest[HEADER][TEXT]))
    key = data.draw(st.sampled_from([*said, *said["reply"], "refusal"]))
    changed = {**said, key: data.draw(words)} if key not in said["reply"] else said
    changed = {**changed, "reply": {**said["reply"], key: data.draw(words)}} if key in said["reply"] else changed
    content = dict(honest.items())
    if data.draw(st.booleans()):
        content[HEADER] = ConfigRecord({TEXT: json.dumps(changed)})
    if data.draw(st.booleans()):
        name = data.draw(st.sampled_from([*inbox["weights"], "x"]))
        content[data.draw(st.sampled_from(["0", "1", "2", "x"]))] = ArrayRecord({name: data.draw(arrays)})
    found, _ = decode_reply(RecordDict(content), question)
    assert isinstance(found, Reply | Refusal)
    if isinstance(found, Refusal):
        assert found.code in CODES | {"MEMORY_LOST"}
        assert found.reason.isascii() and found.reason.isprintable()


@pytest.fixture(scope="module")
def played(world: Callable[..., Any], tmp_path_factory: Any) -> Callable[..., tuple[str, list[tuple[str, str]]]]:
    def play(transit: Any, rounds: int = 1) -> tuple[str, list[tuple[str, str]]]:
        place = world(widths=(1.0, 0.5), sizes=SIZES)
        engine = connect(place, METHOD, tmp_path_factory.mktemp("disks"), norms=Norms(100.0))
        desk_of(engine).transit = transit
        server = place.play(METHOD, engine, rounds)
        return fingerprint(server), [(one.device, one.code) for one in place.refusals]

    return play


@pytest.fixture(scope="module")
def without_it(played: Callable[..., tuple[str, list[tuple[str, str]]]]) -> str:
    return played(dropping)[0]


@pytest.mark.parametrize("kind", FORGED)
def test_every_kind_has_its_code(
    kind: str, played: Callable[..., tuple[str, list[tuple[str, str]]]], without_it: str
) -> None:
    craft, code = FORGED[kind]
    server, refused = played(forging(craft))
    assert refused == [("2", code)]
    assert server == without_it


def test_a_replayed_answer_is_stale(played: Callable[..., tuple[str, list[tuple[str, str]]]]) -> None:
    kept: list[RecordDict] = []

    def replay(content: RecordDict) -> RecordDict:
        kept.append(content)
        return kept[0]

    _, refused = played(forging(replay), rounds=2)
    assert refused == [("2", "STALE")]


def test_of_two_answers_the_first_counts(played: Callable[..., tuple[str, list[tuple[str, str]]]]) -> None:
    def twice(message: Message) -> Iterable[Message]:
        return [message, message] if message.metadata.src_node_id == BAD else [message]

    def once(message: Message) -> Iterable[Message]:
        return [message]

    server, refused = played(lambda message: twice(message) if message.metadata.message_type == "train" else [message])
    assert refused == [("2", "DUPLICATE")]
    assert server == played(once)[0]


def test_a_device_does_not_answer_for_another(world: Callable[..., Any], tmp_path: Path) -> None:
    place = world(widths=(1.0, 0.5), sizes=SIZES)
    engine = connect(place, METHOD, tmp_path)
    apps = desk_of(engine).apps
    engine.nodes.identify = lambda node, said: {"2": "3", "3": "2"}.get(said["device"], said["device"])
    place.play(METHOD, engine, 1)
    assert sorted((one.device, one.code) for one in place.refusals) == [("2", "STALE"), ("3", "STALE")]
    assert len(apps) == len(SIZES)


def test_a_second_node_of_the_same_name_is_not_believed(world: Callable[..., Any], tmp_path: Path) -> None:
    place = world(sizes=SIZES)
    engine: Flower = connect(place, METHOD, tmp_path)
    desk: Desk = desk_of(engine)
    desk.apps[FIRST + 9] = desk.apps[FIRST]
    place.play(METHOD, engine, 1)
    assert [(one.device, one.code) for one in place.refusals] == [("0", "DUPLICATE")]
    assert engine.nodes.node_ids["0"] == FIRST
