"""Parcels as bytes: safetensors, which holds tensors and nothing that could be run."""

from collections.abc import Mapping

from safetensors.torch import load, save
from torch import Tensor

from ..tensors import Parcel


def pack(parcel: Parcel) -> bytes:
    """The parcel of a block; what all its devices share is written once."""
    flat: dict[str, Tensor] = {}
    for bundle, tensors in parcel.items():
        for name, tensor in tensors.items():
            shared = tensor.dim() > 0 and tensor.stride(0) == 0 and len(tensor) > 1
            kind = f"x{len(tensor)}" if shared else "="
            flat[f"{kind}/{bundle}/{name}"] = (tensor[:1] if shared else tensor).contiguous()
    return save(_apart(flat))


def unpack(data: bytes, bundles: list[str]) -> dict[str, dict[str, Tensor]]:
    """`bundles` names all of them, because an empty one leaves no tensor."""
    parcel: dict[str, dict[str, Tensor]] = {bundle: {} for bundle in bundles}
    for key, tensor in load(data).items():
        kind, bundle, name = key.split("/", 2)
        parcel[bundle][name] = tensor if kind == "=" else tensor.expand(int(kind[1:]), *tensor.shape[1:])
    return parcel


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """safetensors refuses tensors that share memory."""
    seen: set[int] = set()
    made = {}
    for name, tensor in tensors.items():
        made[name] = tensor.clone() if tensor.data_ptr() in seen else tensor
        seen.add(tensor.data_ptr())
    return made
