"""Named bundles of tensors: the one shape of server state, of every message and of a device's memory.

On a device every tensor carries one leading device axis: a block of K devices is [K, ...], one device is
[1, ...]. `inner` and `per_device` keep the devices apart; on the server there is no such axis.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from safetensors.torch import save
from torch import Tensor

Tensors = Mapping[str, Tensor]
Parcel = Mapping[str, Tensors]


def combine(function: Callable[..., Tensor], *bundles: Tensors) -> dict[str, Tensor]:
    """Apply `function` tensor by tensor to bundles of the same names."""
    return {name: function(*(bundle[name] for bundle in bundles)) for name in bundles[0]}


def inner(left: Tensors, right: Tensors) -> Tensor:
    """Per device, the inner product of two bundles seen as one long vector each: [K]."""
    return torch.stack([(left[name] * right[name]).reshape(len(left[name]), -1).sum(1) for name in left]).sum(0)


def per_device(numbers: Tensor, tensor: Tensor) -> Tensor:
    """One number per device, [K], shaped to multiply [K, ...]."""
    return numbers.view(-1, *[1] * (tensor.dim() - 1))


def join(parcels: Sequence[Parcel]) -> dict[str, dict[str, Tensor]]:
    """One parcel for a block of devices of one layout. What all of them share is expanded, not copied."""
    if any(layout(parcel) != layout(parcels[0]) for parcel in parcels[1:]):
        raise ValueError("parcels of different layout cannot be joined")
    return {
        bundle: {name: _stack([parcel[bundle][name] for parcel in parcels]) for name in tensors}
        for bundle, tensors in parcels[0].items()
    }


def split(block: Parcel, device: int) -> dict[str, dict[str, Tensor]]:
    """One device's parcel out of a block's, as its own memory: a view would keep the whole block alive."""
    return {bundle: combine(lambda tensor: tensor[device].clone(), tensors) for bundle, tensors in block.items()}


def layout(parcel: Parcel) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
    """Names and shapes: parcels of one layout can be joined."""
    return tuple(
        (bundle, name, tuple(tensor.shape))
        for bundle, tensors in sorted(parcel.items())
        for name, tensor in sorted(tensors.items())
    )


def payload_bytes(parcel: Parcel) -> int:
    """What a parcel costs to send: numbers at their own size, truth values one bit each."""
    return sum(outline_bytes(one.shape, one.dtype) for tensors in parcel.values() for one in tensors.values())


def outline_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    """The same for a tensor that need not be there."""
    entries = math.prod(shape)
    return -(-entries // 8) if dtype == torch.bool else entries * dtype.itemsize


def fingerprint(parcel: Parcel) -> str:
    """sha256 over names, shapes, dtypes and bytes: equal only for parcels equal to the bit."""
    digest = hashlib.sha256()
    for bundle, tensors in sorted(parcel.items()):
        for name, tensor in sorted(tensors.items()):
            digest.update(repr((bundle, name, tuple(tensor.shape), str(tensor.dtype))).encode())
            digest.update(raw_bytes(tensor))
    return digest.hexdigest()


def raw_bytes(tensor: Tensor) -> bytes:
    """Its numbers one after the other, as they are stored."""
    plain = tensor.detach().cpu().contiguous().flatten()
    if plain.stride() != (1,):  # one number seen as many, or as one, is contiguous too
        plain = plain.clone(memory_format=torch.contiguous_format)
    return plain.view(torch.uint8).numpy().tobytes()


def all_finite(tensors: Iterable[Tensor]) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors if tensor.is_floating_point())


def _stack(alike: Sequence[Tensor]) -> Tensor:
    if all(tensor is alike[0] for tensor in alike):
        return alike[0].expand(len(alike), *alike[0].shape)
    return torch.stack(list(alike))


def filed(weights: Tensors, about: Mapping[str, str] | None = None) -> bytes:
    """A safetensors file, the same bytes every time: the library shuffles what is said beside the tensors, so all of it
    is one entry, `about`, in JSON."""
    plain = {name: weight.detach().contiguous().clone() for name, weight in weights.items()}
    return save(plain, {"about": json.dumps(dict(about), sort_keys=True)} if about else None)
