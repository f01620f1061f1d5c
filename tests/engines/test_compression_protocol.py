"""Parcels in fewer bytes: both ways read as they were written, updates on top of what the server has, and whatever else
comes refused with a code."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedloom.client import Bounded, Client, ClientResult, Task, like, shaped
from fedloom.engines import Compression, Expected, Refusal, decode_reply, encode_reply, refuse
from fedloom.engines.compression import Compressor, HalfPrecision, Int8, TopK, is_compressible
from fedloom.fleet import Device, Reply
from fedloom.tensors import Parcel, fingerprint, payload_bytes
from tests.engines.test_protocol import expected as any_expected

FLOAT16, INT8, TOP = HalfPrecision(torch.float16), Int8(), TopK(0.1)
CODECS = {
    "float16": Compression(FLOAT16, FLOAT16),
    "int8": Compression(INT8, INT8),
    "top_k": Compression(TOP, None),
    "top_k and int8": Compression(TOP, INT8),
    "down alone": Compression(None, FLOAT16),
    "a little": Compression(TopK(0.01), None),
}


def run(client: Client, inbox: Parcel) -> ClientResult:
    return ClientResult({})


TASK = Task(
    "train",
    run,
    {
        "weights": like("weights"),
        "features": lambda model, inbox, examples: {
            "x": ((examples, 4), torch.float32),
            "label": Bounded((examples,), torch.int64, below=model.classes),
        },
        "labels": shaped(seen=(("classes",), torch.bool)),
        "nothing": shaped(),
    },
)
DEVICE: Device = any_expected().device


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


INBOX: Parcel = {
    "weights": {"a.weight": numbers(6, 5, 2), "bias": numbers(6, seed=1), "column": numbers(7, 1, seed=2)},
    "shown": {"images": torch.arange(12, dtype=torch.uint8).view(3, 4), "features": numbers(3, 4, seed=3)},
    "empty": {},
}


def answer(inbox: Parcel, seed: int = 5) -> dict[str, dict[str, Tensor]]:
    """What a device has made of what it got."""
    return {
        "weights": {n: t + 0.1 * numbers(*t.shape, seed=seed + k) for k, (n, t) in enumerate(inbox["weights"].items())},
        "features": {"x": numbers(3, 4, seed=seed), "label": torch.tensor([2, 0, 1])},
        "labels": {"seen": torch.tensor([True, False, True])},
        "nothing": {},
    }


def sent_by(codec: Compression, left: Parcel | None = None) -> tuple[Reply, Parcel]:
    got = codec.decode_down(codec.encode_down(INBOX))
    coded, after = codec.encode_up(TASK, got, answer(got), left or {})
    return Reply(DEVICE, 3, coded), after


def heard(codec: Compression, reply: Reply) -> Reply:
    found = codec.decode_up(reply, TASK, INBOX)
    assert isinstance(found, Reply), found
    return found


@pytest.fixture(params=CODECS.values(), ids=CODECS)
def codec(request: pytest.FixtureRequest) -> Compression:
    made: Compression = request.param
    return made


def test_decode_down_encoded_inbox_is_rounded_inbox(codec: Compression) -> None:
    read = codec.decode_down(codec.encode_down(INBOX))
    assert list(read) == list(INBOX)
    for bundle, tensors in INBOX.items():
        assert list(read[bundle]) == list(tensors)
        for name, tensor in tensors.items():
            down = codec.downlink if is_compressible(tuple(tensor.shape), tensor.dtype) else None
            rounded = down.decode(down.encode(tensor), tuple(tensor.shape), tensor.dtype) if down else tensor
            assert torch.equal(read[bundle][name], rounded)
    assert read["shown"]["images"].dtype == torch.uint8
    assert torch.equal(read["weights"]["bias"], INBOX["weights"]["bias"])


@pytest.mark.usefixtures("double")
def test_decode_down_float64_stays_float64(codec: Compression) -> None:
    read = codec.decode_down(codec.encode_down({"weights": {"w": torch.randn(3, 4, dtype=torch.float64)}}))
    assert read["weights"]["w"].dtype == torch.float64


def test_decode_up_update_is_added_to_server_weights(codec: Compression) -> None:
    """And not to what a device made of it: what nobody changed stays to the bit, whatever rounding there was."""
    got = codec.decode_down(codec.encode_down(INBOX))
    still = {**answer(got), "weights": got["weights"]}
    coded, _ = codec.encode_up(TASK, got, still, {})
    found = heard(codec, Reply(DEVICE, 3, coded))
    assert fingerprint({"w": found.upload["weights"]}) == fingerprint({"w": INBOX["weights"]})


def test_decode_up_reply_is_close_and_admitted(codec: Compression) -> None:
    reply, left = sent_by(codec)
    found = heard(codec, reply)
    assert refuse(found, TASK, INBOX) is None
    assert [list(tensors) for tensors in found.upload.values()] == [list(one) for one in answer(INBOX).values()]
    got = codec.decode_down(codec.encode_down(INBOX))
    true = answer(got)
    for name in ("label",):
        assert torch.equal(found.upload["features"][name], true["features"][name])
    assert torch.equal(found.upload["labels"]["seen"], true["labels"]["seen"])
    assert torch.equal(found.upload["weights"]["bias"], true["weights"]["bias"])
    assert float((found.upload["features"]["x"] - true["features"]["x"]).abs().max()) <= 0.02
    lost = left.get("train weights", {})
    for name, tensor in true["weights"].items():
        moved = found.upload["weights"][name] - INBOX["weights"][name] + lost.get(name, torch.zeros(()))
        assert float((moved - (tensor - got["weights"][name])).abs().max()) <= 0.002


def test_encode_up_residual_holds_updates_only() -> None:
    _, left = sent_by(CODECS["top_k"])
    assert {drawer: list(tensors) for drawer, tensors in left.items()} == {"train weights": ["a.weight", "column"]}
    for name in ("float16", "int8", "down alone"):
        assert sent_by(CODECS[name])[1] == {}
    assert sent_by(Compression(TopK(0.1, error_feedback=False)))[1] == {}


@given(st.integers(1, 5), st.floats(0.02, 1.0))
def test_encode_up_residual_is_added_to_next_update(rounds: int, share: float) -> None:
    """All that was ever sent and what is left are all that ever changed."""
    codec, left = Compression(TopK(share)), dict[str, Any]()
    changed = arrived = torch.zeros(6, 5, 2)
    for number in range(rounds):
        told = answer(INBOX, seed=10 * number)
        coded, left = codec.encode_up(TASK, INBOX, told, left)
        update = told["weights"]["a.weight"] - INBOX["weights"]["a.weight"]
        changed = changed + update
        key = next(name for name in coded["weights"] if name.startswith("a.weight@"))
        if "values" in key:
            parts = {k.partition("@")[2].partition(":")[0]: v for k, v in coded["weights"].items() if "a.weight@" in k}
            arrived = arrived + TopK(share).decode(parts, (6, 5, 2), torch.float32)
        else:
            arrived = arrived + coded["weights"][key]
    rest = left["train weights"]["a.weight"] if left else torch.zeros(())
    assert float((arrived + rest - changed).abs().max()) <= 1e-5


def test_encode_up_parts_and_residual_sum_to_update() -> None:
    codec = Compression(TOP)
    before = {"train weights": {"a.weight": numbers(6, 5, 2, seed=9)}, "other task": {"w": numbers(2, 2)}}
    told = answer(INBOX)
    coded, after = codec.encode_up(TASK, INBOX, told, before)
    whole = told["weights"]["a.weight"] - INBOX["weights"]["a.weight"] + before["train weights"]["a.weight"]
    parts = {key: coded["weights"][f"a.weight@{key}:float32"] for key in ("values", "places")}
    assert torch.equal(TOP.decode(parts, (6, 5, 2), torch.float32) + after["train weights"]["a.weight"], whole)
    assert after["other task"] is before["other task"]
    assert torch.equal(before["train weights"]["a.weight"], numbers(6, 5, 2, seed=9)), "nothing is changed in place"


def test_encode_up_other_model_size_drops_residual() -> None:
    fresh, _ = sent_by(CODECS["top_k"])
    again, _ = sent_by(CODECS["top_k"], {"train weights": {"a.weight": torch.ones(3, 5, 2)}})
    assert fingerprint(again.upload) == fingerprint(fresh.upload)


def test_bytes_up_equal_encoded_payload(codec: Compression) -> None:
    reply, _ = sent_by(codec)
    assert codec.bytes_up(TASK, answer(INBOX)) == payload_bytes(reply.upload)
    assert codec.bytes_down(INBOX) == payload_bytes(codec.encode_down(INBOX))
    assert codec.bytes_down(INBOX) <= payload_bytes(INBOX)
    assert codec.bytes_up(TASK, answer(INBOX)) <= payload_bytes(answer(INBOX))


def test_encode_small_tensor_is_not_compressed() -> None:
    """A scale for each of seven single numbers is no saving."""
    coded = CODECS["int8"].encode_down(INBOX)["weights"]
    assert list(coded) == ["a.weight@int8:float32", "a.weight@scale:float32", "bias", "column"]


def test_encode_similar_names_stay_apart() -> None:
    with pytest.raises(ValueError, match="x@int8"):
        CODECS["int8"].encode_down({"weights": {"x@int8": torch.ones(2, 2)}})


def message(codec: Compression, sent: Parcel) -> Reply | Refusal:
    """By mail: the same gate for what travels, which declares itself."""
    asked = Expected("run", 1, 0, codec.encoded_task(TASK), DEVICE, INBOX)
    found = decode_reply(encode_reply(asked.header(3), sent), asked)
    return found if isinstance(found, Refusal) else codec.decode_up(found, TASK, INBOX)


def test_decode_reply_compressed_changes_no_bits(codec: Compression) -> None:
    reply, _ = sent_by(codec)
    found = message(codec, reply.upload)
    assert isinstance(found, Reply)
    assert fingerprint(found.upload) == fingerprint(heard(codec, reply).upload)


Change = Callable[[dict[str, Tensor]], dict[str, Tensor]]
VALUES, PLACES = "a.weight@values:float32", "a.weight@places:float32"
STEPS, SCALE, HALF = "a.weight@int8:float32", "a.weight@scale:float32", "a.weight@half:float32"


def set_to(key: str, tensor: Tensor) -> Change:
    return lambda sent: {**sent, key: tensor}


def without(key: str) -> Change:
    return lambda sent: {name: tensor for name, tensor in sent.items() if name != key}


def first(key: str, value: float) -> Change:
    def change(sent: dict[str, Tensor]) -> dict[str, Tensor]:
        made = sent[key].clone()
        made.view(-1)[0] = value
        return {**sent, key: made}

    return change


SPOILT: dict[str, tuple[str, Change, str]] = {
    "no places": ("top_k", without(PLACES), "KEYS"),
    "the tensor itself": ("top_k", set_to("a.weight", torch.ones(6, 5, 2)), "KEYS"),
    "more values": ("top_k", set_to(VALUES, torch.ones(7)), "SHAPE"),
    "fewer values": ("top_k", set_to(VALUES, torch.ones(5)), "SHAPE"),
    "all the values there are": ("top_k", set_to(VALUES, torch.ones(60)), "SHAPE"),
    "a huge table of places": ("top_k", set_to(PLACES, torch.zeros(10_000, dtype=torch.uint8)), "SHAPE TOO_BIG"),
    "places of another kind": ("top_k", set_to(PLACES, torch.zeros(8)), "DTYPE"),
    "no place at all": ("top_k", set_to(PLACES, torch.zeros(8, dtype=torch.uint8)), "BAD_FORMAT"),
    "every place": ("top_k", set_to(PLACES, torch.full((8,), 255, dtype=torch.uint8)), "BAD_FORMAT"),
    "a place behind the end": ("top_k", first(PLACES, 255), "BAD_FORMAT"),
    "a value that is none": ("top_k", first(VALUES, torch.nan), "NONFINITE"),
    "a value beyond measure": ("top_k", first(VALUES, 1e30), "HUGE"),
    "one place more": ("a little", set_to(PLACES, torch.tensor([5, 5], dtype=torch.int32)), "SHAPE"),
    "a place out of range": ("a little", set_to(PLACES, torch.tensor([60], dtype=torch.int32)), "VALUE"),
    "a place below zero": ("a little", set_to(PLACES, torch.tensor([-1], dtype=torch.int32)), "VALUE"),
    "a scale that is none": ("int8", first(SCALE, torch.nan), "NONFINITE"),
    "a scale without end": ("int8", first(SCALE, torch.inf), "NONFINITE"),
    "a scale beyond measure": ("int8", first(SCALE, 1e30), "HUGE"),
    "a negative scale": ("int8", first(SCALE, -1.0), "BAD_FORMAT"),
    "too many scales": ("int8", set_to(SCALE, torch.ones(60)), "SHAPE"),
    "steps of another shape": ("int8", set_to(STEPS, torch.ones(6, 10, dtype=torch.int8)), "SHAPE"),
    "steps that are not whole": ("int8", set_to(STEPS, torch.ones(6, 5, 2)), "DTYPE"),
    "a half number without end": ("float16", first(HALF, torch.inf), "NONFINITE"),
    "half numbers of the other kind": ("float16", set_to(HALF, torch.ones(6, 5, 2, dtype=torch.bfloat16)), "DTYPE"),
    "the sum beyond measure": ("int8", set_to(SCALE, torch.full((6,), 9e17)), "HUGE"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "change", "code"), SPOILT.values(), ids=SPOILT)
def test_decode_up_malformed_parts_are_refused(name: str, change: Change, code: str) -> None:
    codec = CODECS[name]
    reply, _ = sent_by(codec)
    sent = {**reply.upload, "weights": change(dict(reply.upload["weights"]))}
    for found in (codec.decode_up(replace(reply, upload=sent), TASK, INBOX), message(codec, sent)):
        whole = found if isinstance(found, Refusal) else refuse(found, TASK, INBOX)
        assert whole is not None
        assert whole.device == DEVICE.name
        assert whole.code in code.split()  # a message that is too big is not even decode_reply


@given(st.sampled_from(sorted(CODECS)), st.integers(0, 2**31))
def test_decode_up_random_parts_never_raise(name: str, seed: int) -> None:
    codec, draw = CODECS[name], torch.Generator().manual_seed(seed)
    reply, _ = sent_by(codec)
    sent = {
        bundle: {key: noise(tensor, draw) for key, tensor in tensors.items()}
        for bundle, tensors in reply.upload.items()
    }
    found = codec.decode_up(replace(reply, upload=sent), TASK, INBOX)
    if isinstance(found, Reply):
        assert all(found.upload["weights"][key].shape == one.shape for key, one in INBOX["weights"].items())
    else:
        assert found.code in {"NONFINITE", "HUGE", "VALUE", "BAD_FORMAT"}


def noise(tensor: Tensor, draw: torch.Generator) -> Tensor:
    """Other bytes, as often as not."""
    if float(torch.rand((), generator=draw)) < 0.5 or tensor.numel() == 0:
        return tensor
    size = (tensor.numel() * tensor.element_size(),)
    return torch.randint(0, 256, size, generator=draw, dtype=torch.uint8).view(tensor.dtype).view(tensor.shape)


def test_decode_up_undeclared_upload_is_refused() -> None:
    codec: Compression = CODECS["top_k and int8"]
    for bad in (
        {"weights": {"a.weight": torch.ones(2, 5, 2), "bias": torch.ones(6), "column": torch.ones(7, 1)}},
        {"weights": {"b": torch.ones(2, 2)}},
        {"unheard": {"of": torch.ones(2, 2)}},
    ):
        coded, _ = codec.encode_up(TASK, INBOX, {**answer(INBOX), **bad}, {})
        assert isinstance(codec.decode_up(Reply(DEVICE, 3, coded), TASK, INBOX), Refusal)


def test_compression_is_hashable_value() -> None:
    code: Compressor = TopK(0.1)
    assert Compression(code, None) == Compression(TopK(0.1), None) != Compression(TopK(0.2), None)
