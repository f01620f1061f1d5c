"""Replies as bytes: what comes back is what was sent, or a refusal with a code, whatever the bytes."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from fedloom.client import Bounded, Client, ClientResult, Task, like, shaped
from fedloom.engines import Expected, Refusal, decode_reply, encode_reply
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


def expected(**changes: Any) -> Expected:
    tier = make_nested_tiers([("a", build_model("tiny", tiny, {}, (2,), 3))])[0]
    asked = Expected("first run", 4, 0, TASK, Device("07", "a", tier.model, tier.footprint), INBOX, max_examples=1000)
    return replace(asked, **changes)


def sent(**changes: Any) -> dict[str, dict[str, Any]]:
    made = {
        "weights": {"weight": torch.randn(3, 2), "b/ias": torch.randn(3), "one": torch.tensor(0.25)},
        "labels": {"seen": torch.tensor([True, False, True])},
        "nothing": {},
        "rows": {"label": torch.tensor([2, 0])},
    }
    return {**made, **changes}


def message(**header: Any) -> bytes:
    return encode_reply(replace(expected().header(2), **header), sent())


def code_of(data: bytes, asked: Expected | None = None) -> str:
    found = decode_reply(data, asked or expected())
    return found.code if isinstance(found, Refusal) else ""


def test_decode_reply_encoded_reply_is_equal() -> None:
    parcel = sent()
    reply = decode_reply(encode_reply(expected().header(2), parcel), expected())
    assert isinstance(reply, Reply)
    assert (reply.device.name, reply.examples) == ("07", 2)
    assert fingerprint(reply.upload) == fingerprint(parcel)
    assert [list(tensors) for tensors in reply.upload.values()] == [list(tensors) for tensors in parcel.values()]


def test_encode_reply_views_are_contiguous() -> None:
    block = torch.randn(5, 3)
    weights = {"weight": block.t()[:, :2], "b/ias": block[0], "one": block[0, 0]}
    reply = decode_reply(encode_reply(expected().header(2), sent(weights=weights)), expected())
    assert isinstance(reply, Reply)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in reply.upload["weights"].items())


@pytest.mark.parametrize("kind", MALFORMED)
def test_decode_reply_malformed_has_code(kind: str) -> None:
    craft, code = MALFORMED[kind]
    last = craft(honest(message(), expected()))[-1]
    assert code_of(last, expected(answered=kind == "duplicate")) == code


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
def test_decode_reply_other_header_is_refused(changes: dict[str, Any], code: str) -> None:
    assert code_of(message(**changes)) == code


def test_decode_reply_cheapest_check_comes_first() -> None:
    """Everything is wrong with it; what is mended was the reason."""
    long = with_head(message(round=3, tier="b", examples=0), lambda head: head + " " * 100_000)
    assert code_of(long) == "TOO_BIG"
    bad = sent(weights={"weight": torch.full((2, 3), torch.nan, dtype=torch.float64)})
    header = replace(expected().header(2), round=3, tier="b", examples=0)
    found = []
    for mended in ({"round": 4}, {"tier": "a"}, {"examples": 2}):
        found.append(code_of(encode_reply(header, bad)))
        header = replace(header, **mended)
    for weights in (
        bad["weights"],
        {**sent()["weights"], "weight": torch.full((2, 3), torch.nan, dtype=torch.float64)},
        {**sent()["weights"], "weight": torch.full((3, 2), torch.nan, dtype=torch.float64)},
        {**sent()["weights"], "weight": torch.full((3, 2), torch.nan)},
        sent()["weights"],
    ):
        found.append(code_of(encode_reply(header, sent(weights=weights))))
    assert found == ["STALE", "TIER_MISMATCH", "VALUE", "KEYS", "SHAPE", "DTYPE", "NONFINITE", ""]


def test_decode_reply_too_many_bytes_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    from fedloom.engines import protocol

    def never(data: bytes) -> None:
        raise AssertionError("it was read")

    monkeypatch.setattr(protocol, "load", never)
    swollen = {**sent()["weights"], "weight": torch.zeros(300, 200)}
    assert code_of(encode_reply(expected().header(2), sent(weights=swollen))) == "TOO_BIG"
    assert code_of(message() + b"\0" * 100_000) == "TOO_BIG"


def test_decode_reply_values_out_of_range_are_refused() -> None:
    data = bytearray(message())
    data[8 + int.from_bytes(data[:8], "little") + head_of(data)["1/seen"]["data_offsets"][0]] = 255
    assert code_of(bytes(data)) == "VALUE"
    for label in (-1, 3, 2**62):
        assert code_of(encode_reply(expected().header(2), sent(rows={"label": torch.tensor([0, label])}))) == "VALUE"


def test_decode_reply_undeclared_bundles_are_refused() -> None:
    header = expected().header(2)
    assert code_of(encode_reply(header, {name: one for name, one in sent().items() if name != "nothing"})) == "KEYS"
    assert code_of(encode_reply(header, sent(more={}))) == "KEYS"

    def listed(*bundles: Any) -> bytes:
        head = head_of(message())
        said = json.loads(head["__metadata__"][ENTRY])
        head["__metadata__"][ENTRY] = json.dumps({**said, "bundles": list(bundles)})
        return with_head(message(), lambda _: json.dumps(head))

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
def test_decode_reply_unreadable_header_is_refused(head: str) -> None:
    assert code_of(with_head(message(), lambda _: head)) == "BAD_FORMAT"


def test_decode_reply_reason_is_short_ascii() -> None:
    """It is shown on screens and written to files."""
    found = decode_reply(message(run="\x1b[31m" + "\ud800é" * 200), expected())
    assert isinstance(found, Refusal)
    assert found.code == "STALE"
    assert found.reason.isascii() and found.reason.isprintable() and len(found.reason) < 200


def test_decode_reply_reads_no_pickle() -> None:
    messages = [message()]
    messages += [data for craft, _ in MALFORMED.values() for data in craft(honest(message(), expected()))]
    with pickles_heard() as heard:
        for data in messages:
            decode_reply(data, expected())
    assert heard == []
