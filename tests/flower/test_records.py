"""Parcels as records: they come back as they were, and what is the same is there once."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import RecordDict
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.recorddict_pb2 import RecordDict as ProtoRecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedloom.flower.messages import DTYPES, HEADER, TEXT, RecordEncoder, decode_request
from fedloom.tensors import fingerprint


def by_proto(records: RecordDict) -> RecordDict:
    return recorddict_from_proto(ProtoRecordDict.FromString(recorddict_to_proto(records).SerializeToString()))


def by_objects(records: RecordDict) -> RecordDict:
    """The way of a real SuperLink: piece by piece."""
    pieces = {name: one.deflate() for name, one in get_all_nested_objects(records).items()}
    made = inflate_object_from_contents(records.object_id, pieces)
    assert isinstance(made, RecordDict)
    return made


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    dtype = draw(st.sampled_from(sorted(DTYPES)))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    size = int(np.prod(shape, dtype=int)) * DTYPES[dtype].itemsize
    data = draw(st.binary(min_size=size, max_size=size))
    if dtype == "bool":
        data = bytes(byte & 1 for byte in data)
    flat = torch.frombuffer(bytearray(data), dtype=DTYPES[dtype]) if data else torch.empty(0, dtype=DTYPES[dtype])
    made = flat.reshape(shape)
    return made.transpose(0, 1) if made.dim() > 1 and draw(st.booleans()) else made


names = st.text(max_size=6)
parcels = st.dictionaries(names, st.dictionaries(names, tensors(), max_size=3), max_size=3)


@pytest.mark.parametrize("way", [by_proto, by_objects])
@given(parcel=parcels)
def test_a_parcel_comes_back_as_it_was(way: Any, parcel: dict[str, dict[str, Tensor]]) -> None:
    said, found = decode_request(way(RecordEncoder().encode({"round": 3}, parcel)))
    assert said["round"] == 3
    assert fingerprint(found) == fingerprint(parcel)
    assert {b: list(one) for b, one in found.items()} == {b: list(one) for b, one in parcel.items()}


def test_words_are_one_line_of_json() -> None:
    records = RecordEncoder().encode({"round": 3, "nothing": None, "list": [1, [2]]}, {"empty": {}})
    assert list(records[HEADER]) == [TEXT]
    assert json.loads(str(records[HEADER][TEXT])) == {
        "round": 3,
        "nothing": None,
        "list": [1, [2]],
        "bundles": ["empty"],
    }


def test_what_a_tier_shares_is_one_record() -> None:
    whole, encoder = {"w": torch.randn(6, 5)}, RecordEncoder()
    first, second, other = (
        encoder.encode({}, {"weights": {"w": whole["w"][:rows, :3]}, "own": {"x": torch.tensor(float(number))}})
        for number, rows in enumerate((4, 4, 5))
    )
    assert first["0"] is second["0"]
    assert first["0"] is not other["0"] and first["1"] is not second["1"]


def test_what_a_codec_makes_of_a_bundle_is_made_once() -> None:
    made = []

    def halved(parcel: Any) -> Any:
        made.append(parcel)
        return {bundle: {name: one.half() for name, one in tensors.items()} for bundle, tensors in parcel.items()}

    encoder, weights = RecordEncoder(halved), {"w": torch.randn(3)}
    records = [encoder.encode({}, {"weights": weights}) for _ in range(3)]
    assert len(made) == 1
    assert records[0]["0"]["w"].dtype == "float16"
