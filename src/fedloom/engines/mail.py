"""A reply as bytes: safetensors with one line of JSON that says whose it is and what it answers. Nothing in it can be
run."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from safetensors.torch import load, save
from torch import Tensor

from ..fleet import Reply
from ..tensors import Parcel
from .admission import Refusal, excerpt
from .letters import Heading, Question, Refused, admitted, check_head, legible, place_of

__all__ = ["ENTRY", "Heading", "Question", "opened", "sealed"]

ENTRY = "fedloom"


def sealed(heading: Heading, parcel: Parcel) -> bytes:
    """Bundles are listed, for an empty one leaves no trace among tensors; tensors go by their bundle's number."""
    said = json.dumps({**asdict(heading), "bundles": list(parcel)})
    flat: dict[str, Tensor] = {}
    for number, tensors in enumerate(parcel.values()):
        flat |= {f"{number}/{name}": tensor.detach().contiguous().clone() for name, tensor in tensors.items()}
    return save(flat, {ENTRY: said})


def opened(data: bytes, question: Question) -> Reply | Refusal:
    return admitted(_Bytes(data), question)


@dataclass(frozen=True)
class _Bytes:
    data: bytes

    def head(self, room: int) -> Any:
        size = int.from_bytes(self.data[:8], "little")
        if len(self.data) < 8 or size > len(self.data) - 8:
            raise Refused("BAD_FORMAT", f"{len(self.data)} bytes are not a whole reply")
        check_head(size, room)
        with legible():
            return json.loads(json.loads(self.data[8 : 8 + size])["__metadata__"][ENTRY])

    def size(self) -> int:
        return len(self.data)

    def tensors(self, bundles: list[str]) -> dict[str, dict[str, Tensor]]:
        try:
            flat: Mapping[str, Tensor] = load(self.data)
        except Exception as error:  # whatever a reader makes of bytes that somebody else wrote
            raise Refused("BAD_FORMAT", f"not safetensors: {excerpt(str(error))}") from error
        sent: dict[str, dict[str, Tensor]] = {bundle: {} for bundle in bundles}
        for key, tensor in flat.items():
            bundle, name = place_of(key, bundles)
            sent[bundle][name] = tensor
        return sent
