"""Parcels as records: they round-trip, and shared tensors are encoded once."""

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

from fedloom.flower.apps import OtherVersion, handle_request
from fedloom.flower.messages import DTYPES, HEADER, TEXT, RecordEncoder, decode_request
from fedloom.tensors import fingerprint


def through_proto(records: RecordDict) -> RecordDict:
    return recorddict_from_proto(ProtoRecordDict.FromString(recorddict_to_proto(records).SerializeToString()))


def through_objects(records: RecordDict) -> RecordDict:
    """As a real SuperLink transfers records: object by object."""
    objects = {name: nested.deflate() for name, nested in get_all_nested_objects(records).items()}
    inflated = inflate_object_from_contents(records.object_id, objects)
    assert isinstance(inflated, RecordDict)
    return inflated


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    dtype = draw(st.sampled_from(sorted(DTYPES)))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    size = int(np.prod(shape, dtype=int)) * DTYPES[dtype].itemsize
    data = draw(st.binary(min_size=size, max_size=size))
    if dtype == "bool":
        data = bytes(byte & 1 for byte in data)
    flat = torch.frombuffer(bytearray(data), dtype=DTYPES[dtype]) if data else torch.empty(0, dtype=DTYPES[dtype])
    tensor = flat.reshape(shape)
    return tensor.transpose(0, 1) if tensor.dim() > 1 and draw(st.booleans()) else tensor


names = st.text(max_size=6)
parcels = st.dictionaries(names, st.dictionaries(names, tensors(), max_size=3), max_size=3)


@pytest.mark.parametrize("transfer", [through_proto, through_objects])
@given(parcel=parcels)
def test_record_encoder_any_parcel_round_trips(transfer: Any, parcel: dict[str, dict[str, Tensor]]) -> None:
    header, decoded = decode_request(transfer(RecordEncoder().encode({"round": 3}, parcel)))
    assert header["round"] == 3
    assert fingerprint(decoded) == fingerprint(parcel)
    assert {b: list(names) for b, names in decoded.items()} == {b: list(names) for b, names in parcel.items()}


def test_record_encoder_header_is_one_line_of_json() -> None:
    records = RecordEncoder().encode({"round": 3, "nothing": None, "list": [1, [2]]}, {"empty": {}})
    assert list(records[HEADER]) == [TEXT]
    assert json.loads(str(records[HEADER][TEXT])) == {
        "round": 3,
        "nothing": None,
        "list": [1, [2]],
        "bundles": ["empty"],
    }


def test_record_encoder_same_tensors_are_one_record() -> None:
    weights, encoder = {"w": torch.randn(6, 5)}, RecordEncoder()
    first, second, other = (
        encoder.encode({}, {"weights": {"w": weights["w"][:rows, :3]}, "own": {"x": torch.tensor(float(number))}})
        for number, rows in enumerate((4, 4, 5))
    )
    assert first["0"] is second["0"]
    assert first["0"] is not other["0"] and first["1"] is not second["1"]


@pytest.mark.parametrize("version", ["0.1.4", None])
def test_handle_request_of_another_version_is_refused_before_anything_is_run(version: str | None) -> None:
    content = RecordEncoder().encode({} if version is None else {"fedloom": version}, {})
    with pytest.raises(OtherVersion, match=rf"the server {version or 'an unknown version'}"):
        handle_request(content, lambda recipe: pytest.fail("the request was executed"))
