"""Parcels, named bundles of named tensors: the one type of server state, messages and device state.

On a device every tensor has a leading device axis, [K, ...] for a block of K devices and [1, ...] for one. `inner` and
`per_device` respect it. On the server there is no such axis.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

Tensors = Mapping[str, Tensor]
Parcel = Mapping[str, Tensors]


def combine(function: Callable[..., Tensor], *bundles: Tensors) -> dict[str, Tensor]:
    """Apply a function tensor by tensor to bundles of the same names.

    Parameters
    ----------
    function : takes one tensor of each bundle.
    bundles : the bundles; the names are those of the first.

    Examples
    --------
    >>> combine(lambda weight, grad: weight - 0.1 * grad, weights, gradients)
    """
    return {name: function(*(bundle[name] for bundle in bundles)) for name in bundles[0]}


def inner(left: Tensors, right: Tensors) -> Tensor:
    """The inner product of two bundles, each seen as one vector per device.

    Parameters
    ----------
    left : a bundle, [K, ...].
    right : a bundle of the same names and shapes.

    Returns
    -------
    One number per device, [K].
    """
    return torch.stack([(left[name] * right[name]).reshape(len(left[name]), -1).sum(1) for name in left]).sum(0)


def per_device(numbers: Tensor, tensor: Tensor) -> Tensor:
    """Reshape one number per device so that it broadcasts against a tensor.

    Parameters
    ----------
    numbers : [K].
    tensor : [K, ...].
    """
    return numbers.view(-1, *[1] * (tensor.dim() - 1))


def join(parcels: Sequence[Parcel]) -> dict[str, dict[str, Tensor]]:
    """Stack parcels of one layout along a new device axis. A tensor that all of them share is expanded, not copied.

    Parameters
    ----------
    parcels : the parcel of each device.
    """
    if any(layout(parcel) != layout(parcels[0]) for parcel in parcels[1:]):
        raise ValueError("parcels of different layout cannot be joined")
    return {
        bundle: {name: _stack([parcel[bundle][name] for parcel in parcels]) for name in tensors}
        for bundle, tensors in parcels[0].items()
    }


def split(block: Parcel, device: int) -> dict[str, dict[str, Tensor]]:
    """One device's parcel of a block's, copied: a view would keep the memory of the whole block alive.

    Parameters
    ----------
    block : the parcel of a block, [K, ...].
    device : the index of the device.
    """
    return {bundle: combine(lambda tensor: tensor[device].clone(), tensors) for bundle, tensors in block.items()}


def layout(parcel: Parcel) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
    """Names and shapes. Parcels of one layout can be joined.

    Parameters
    ----------
    parcel : the parcel.
    """
    return tuple(
        (bundle, name, tuple(tensor.shape))
        for bundle, tensors in sorted(parcel.items())
        for name, tensor in sorted(tensors.items())
    )


def payload_bytes(parcel: Parcel) -> int:
    """The size of a parcel in a message: numbers at their own size, booleans one bit each.

    Parameters
    ----------
    parcel : the parcel.
    """
    return sum(tensor_bytes(one.shape, one.dtype) for tensors in parcel.values() for one in tensors.values())


def tensor_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    """The size of a tensor in a message: numbers at their own size, booleans one bit each.

    Parameters
    ----------
    shape : its shape.
    dtype : its dtype.
    """
    entries = math.prod(shape)
    return -(-entries // 8) if dtype == torch.bool else entries * dtype.itemsize


def fingerprint(parcel: Parcel) -> str:
    """A sha256 of names, shapes, dtypes and bytes: equal only for parcels that are equal bit for bit.

    Parameters
    ----------
    parcel : the parcel.
    """
    digest = hashlib.sha256()
    for bundle, tensors in sorted(parcel.items()):
        for name, tensor in sorted(tensors.items()):
            digest.update(repr((bundle, name, tuple(tensor.shape), str(tensor.dtype))).encode())
            digest.update(raw_bytes(tensor))
    return digest.hexdigest()


def raw_bytes(tensor: Tensor) -> bytes:
    """The entries of a tensor in C order, in their storage format.

    Parameters
    ----------
    tensor : the tensor.
    """
    flat = tensor.detach().cpu().contiguous().flatten()
    if flat.stride() != (1,):  # an expanded or single entry counts as contiguous with any stride
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8).numpy().tobytes()


def to_safetensors(weights: Tensors, about: Mapping[str, Any] | None = None) -> bytes:
    """The content of a safetensors file, the same bytes every time.

    Parameters
    ----------
    weights : the tensors, by name.
    about : metadata, of JSON's types. The library orders metadata at random, so all of it is one entry, `about`.
    """
    copies = {name: weight.detach().contiguous().clone() for name, weight in weights.items()}
    return save(copies, {"about": json.dumps(dict(about), sort_keys=True, default=repr)} if about else None)


def relative_distance(found: Parcel, expected: Parcel) -> float:
    """How far a parcel is from another of the same names and shapes, relative to the norm of all its numbers.

    Parameters
    ----------
    found : the parcel.
    expected : what it is compared with.
    """
    apart = size = 0.0
    for bundle, tensors in expected.items():
        for name, tensor in tensors.items():
            apart += float((found[bundle][name].double() - tensor.double()).square().sum())
            size += float(tensor.double().square().sum())
    return math.sqrt(apart / size) if size else math.sqrt(apart)


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """True if all numbers are finite.

    Parameters
    ----------
    tensors : the tensors; those of integers are finite.
    """
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors if tensor.is_floating_point())


def finite_devices(tensors: Tensors) -> Tensor:
    """[K]: True for devices whose numbers are all finite.

    Parameters
    ----------
    tensors : a bundle, [K, ...].
    """
    each = [torch.isfinite(tensor).reshape(len(tensor), -1).all(1) for tensor in tensors.values()]
    return torch.stack(each).all(0)


def _stack(tensors: Sequence[Tensor]) -> Tensor:
    if all(tensor is tensors[0] for tensor in tensors):
        return tensors[0].expand(len(tensors), *tensors[0].shape)
    return torch.stack(list(tensors))


def pack(parcel: Parcel) -> bytes:
    """A parcel of a block as safetensors, in which nothing can be run; what all devices share is written once.

    Parameters
    ----------
    parcel : the parcel of a block, [K, ...].
    """
    flat: dict[str, Tensor] = {}
    for bundle, tensors in parcel.items():
        for name, tensor in tensors.items():
            shared = tensor.dim() > 0 and tensor.stride(0) == 0 and len(tensor) > 1
            kind = f"x{len(tensor)}" if shared else "="
            flat[f"{kind}/{bundle}/{name}"] = (tensor[:1] if shared else tensor).contiguous()
    return save(_separate_memory(flat))


def unpack(data: bytes, bundles: list[str]) -> dict[str, dict[str, Tensor]]:
    """Restore a packed parcel.

    Parameters
    ----------
    data : what `pack` returned.
    bundles : the names of all bundles, because an empty one leaves no tensor.
    """
    parcel: dict[str, dict[str, Tensor]] = {bundle: {} for bundle in bundles}
    for key, tensor in load(data).items():
        kind, bundle, name = key.split("/", 2)
        parcel[bundle][name] = tensor if kind == "=" else tensor.expand(int(kind[1:]), *tensor.shape[1:])
    return parcel


def _separate_memory(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """safetensors refuses tensors that share memory."""
    seen: set[int] = set()
    separate = {}
    for name, tensor in tensors.items():
        separate[name] = tensor.clone() if tensor.data_ptr() in seen else tensor
        seen.add(tensor.data_ptr())
    return separate
