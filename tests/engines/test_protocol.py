"""Replies as bytes: what comes back is what was sent, or a refusal with a code, whatever the bytes."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from fedloom.client import Bounded, Client, ClientResult, Task, like, shaped
from fedloom.engines import Question, Refusal, encode_reply, opened
from fedloom.engines.protocol import ENTRY
from fedloom.fleet import Device, Reply, make_nested_tiers
from fedloom.models import build_model
from fedloom.tensors import Parcel, fingerprint
from tests.malformed import MALFORMED, head_of, honest, with_head
from tests.pickles import pickles_heard


def tiny() -> nn.Module:
    return nn.Linear(2, 3)


def run(client: Client, inbox: Parcel) -> ClientResult:
    return ClientResult({})


TASK = Task(
    "train",
    run,
    {
        "weights": like("weights"),
        "labels": shaped(seen=(("classes",), torch.bool)),
        "nothing": shaped(),
        "rows": lambda model, inbox, examples: {"label": Bounded((examples,), torch.int64, below=model.classes)},
    },
)
INBOX = {"weights": {"weight": torch.zeros(3, 2), "b/ias": torch.zeros(3), "one": torch.tensor(0.0)}}


def question(**changes: Any) -> Question:
    tier = make_nested_tiers([("a", build_model("tiny", tiny, {}, (2,), 3))])[0]
    asked = Question("first run", 4, 0, TASK, Device("07", "a", tier.model, tier.footprint), INBOX, max_examples=1000)
    return replace(asked, **changes)


def sent(**changes: Any) -> dict[str, dict[str, Any]]:
    made = {
        "weights": {"weight": torch.randn(3, 2), "b/ias": torch.randn(3), "one": torch.tensor(0.25)},
        "labels": {"seen": torch.tensor([True, False, True])},
        "nothing": {},
        "rows": {"label": torch.tensor([2, 0])},
    }
    return {**made, **changes}


def letter(**heading: Any) -> bytes:
    return encode_reply(replace(question().heading(2), **heading), sent())


def code_of(data: bytes, asked: Question | None = None) -> str:
    found = opened(data, asked or question())
    return found.code if isinstance(found, Refusal) else ""


def test_what_comes_back_is_what_was_sent() -> None:
    parcel = sent()
    reply = opened(encode_reply(question().heading(2), parcel), question())
    assert isinstance(reply, Reply)
    assert (reply.device.name, reply.examples) == ("07", 2)
    assert fingerprint(reply.upload) == fingerprint(parcel)
    assert [list(tensors) for tensors in reply.upload.values()] == [list(tensors) for tensors in parcel.values()]


def test_views_and_shared_memory_travel() -> None:
    block = torch.randn(5, 3)
    weights = {"weight": block.t()[:, :2], "b/ias": block[0], "one": block[0, 0]}
    reply = opened(encode_reply(question().heading(2), sent(weights=weights)), question())
    assert isinstance(reply, Reply)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in reply.upload["weights"].items())


@pytest.mark.parametrize("kind", MALFORMED)
def test_every_malformed_letter_has_its_code(kind: str) -> None:
    craft, code = MALFORMED[kind]
    last = craft(honest(letter(), question()))[-1]
    assert code_of(last, question(answered=kind == "duplicate")) == code


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"run": "another"}, "STALE"),
        ({"run": 7}, "STALE"),
        ({"round": 3}, "STALE"),
        ({"round": 4.0}, "STALE"),
        ({"round": None}, "STALE"),
        ({"task": "judge"}, "STALE"),
        ({"repeat": 1}, "STALE"),
        ({"repeat": False}, "STALE"),
        ({"device": "08"}, "STALE"),
        ({"tier": "b"}, "TIER_MISMATCH"),
        ({"spec": ""}, "TIER_MISMATCH"),
        ({"examples": 1001}, "VALUE"),
        ({"examples": True}, "VALUE"),
        ({"examples": "2"}, "VALUE"),
        ({"examples": None}, "VALUE"),
        ({"examples": 2.0}, "VALUE"),
        ({"examples": 3}, "SHAPE"),  # it may hold as many, but has sent two rows
        ({"tier": ["b"]}, "BAD_FORMAT"),
    ],
)
def test_a_heading_must_be_that_of_the_question(changes: dict[str, Any], code: str) -> None:
    assert code_of(letter(**changes)) == code


def test_the_cheapest_objection_comes_first() -> None:
    """Everything is wrong with it; what is mended was the reason."""
    long = with_head(letter(round=3, tier="b", examples=0), lambda head: head + " " * 100_000)
    assert code_of(long) == "TOO_BIG"
    bad = sent(weights={"weight": torch.full((2, 3), torch.nan, dtype=torch.float64)})
    heading = replace(question().heading(2), round=3, tier="b", examples=0)
    found = []
    for mended in ({"round": 4}, {"tier": "a"}, {"examples": 2}):
        found.append(code_of(encode_reply(heading, bad)))
        heading = replace(heading, **mended)
    for weights in (
        bad["weights"],
        {**sent()["weights"], "weight": torch.full((2, 3), torch.nan, dtype=torch.float64)},
        {**sent()["weights"], "weight": torch.full((3, 2), torch.nan, dtype=torch.float64)},
        {**sent()["weights"], "weight": torch.full((3, 2), torch.nan)},
        sent()["weights"],
    ):
        found.append(code_of(encode_reply(heading, sent(weights=weights))))
    assert found == ["STALE", "TIER_MISMATCH", "VALUE", "KEYS", "SHAPE", "DTYPE", "NONFINITE", ""]


def test_more_bytes_than_the_task_declares_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    from fedloom.engines import protocol

    def never(data: bytes) -> None:
        raise AssertionError("it was read")

    monkeypatch.setattr(protocol, "load", never)
    swollen = {**sent()["weights"], "weight": torch.zeros(300, 200)}
    assert code_of(encode_reply(question().heading(2), sent(weights=swollen))) == "TOO_BIG"
    assert code_of(letter() + b"\0" * 100_000) == "TOO_BIG"


def test_truth_values_and_labels_must_be_some() -> None:
    data = bytearray(letter())
    data[8 + int.from_bytes(data[:8], "little") + head_of(data)["1/seen"]["data_offsets"][0]] = 255
    assert code_of(bytes(data)) == "VALUE"
    for label in (-1, 3, 2**62):
        assert code_of(encode_reply(question().heading(2), sent(rows={"label": torch.tensor([0, label])}))) == "VALUE"


def test_bundles_are_those_declared_each_once() -> None:
    heading = question().heading(2)
    assert code_of(encode_reply(heading, {name: one for name, one in sent().items() if name != "nothing"})) == "KEYS"
    assert code_of(encode_reply(heading, sent(more={}))) == "KEYS"

    def listed(*bundles: Any) -> bytes:
        head = head_of(letter())
        said = json.loads(head["__metadata__"][ENTRY])
        head["__metadata__"][ENTRY] = json.dumps({**said, "bundles": list(bundles)})
        return with_head(letter(), lambda _: json.dumps(head))

    assert code_of(listed("weights", "labels", "nothing", "rows")) == ""
    assert code_of(listed("weights", "labels", "nothing", "rows", "rows")) == "KEYS"
    assert code_of(listed("weights", "labels", "nothing")) == "KEYS"
    assert code_of(listed("weights", "labels", "nothing", 3)) == "BAD_FORMAT"


@pytest.mark.parametrize(
    "head",
    [
        "", "{", "[]", "null", '{"__metadata__": 3}', '{"__metadata__": {"fedloom": 3}}', '{"__metadata__": {}}',
        '{"__metadata__": {"fedloom": "{}"}}', '{"__metadata__": {"fedloom": "[1]"}}', "[" * 4000, '{"a":' * 800,
        '{"__metadata__": {"fedloom": "' + "[" * 2000 + '"}}', "1" * 4500, '{"__metadata__": {"fedloom": "\\ud800"}}',
    ],
)  # fmt: skip
def test_heads_that_make_no_sense(head: str) -> None:
    assert code_of(with_head(letter(), lambda _: head)) == "BAD_FORMAT"


def test_a_reason_is_short_and_plain() -> None:
    """It is shown on screens and written to files."""
    found = opened(letter(run="\x1b[31m" + "\ud800é" * 200), question())
    assert isinstance(found, Refusal)
    assert found.code == "STALE"
    assert found.reason.isascii() and found.reason.isprintable() and len(found.reason) < 200


def test_no_pickle_is_read_while_letters_are_opened() -> None:
    letters = [letter()]
    letters += [data for craft, _ in MALFORMED.values() for data in craft(honest(letter(), question()))]
    with pickles_heard() as heard:
        for data in letters:
            opened(data, question())
    assert heard == []
