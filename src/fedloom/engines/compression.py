"""Parcels in fewer bytes: half precision, 8-bit integers, the largest entries alone, or factors of low rank.

What travels is a parcel again, so it is counted, serialized and admitted like any other; its layout follows from shapes
and dtypes alone. Devices upload what they changed, and the server adds that to its own weights, so that rounding on
the way down does not add up over rounds.
"""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from ..client import Bounded, BundleSpec, Layout, Like, Task
from ..fleet import Device, Exchange, Reply, Request
from ..models import Model
from ..registry import Registry
from ..settings import Share
from ..tensors import Parcel, Tensors, tensor_bytes
from .gate import MAX_EXAMPLES, Refusal, Report, declared, ignore, refuse

Shape = tuple[int, ...]
STEPS = 127  # to either side of zero


class Malformed(Exception):  # noqa: N818 - named for what is wrong
    """A compressed tensor that no honest device would send."""


class Compressor(Protocol):
    """One tensor in fewer bytes, as named tensors again."""

    @property
    def of_updates(self) -> bool:
        """Whether it is meant for updates alone."""

    @property
    def error_feedback(self) -> bool:
        """Whether what is lost is kept by the device and added to its next update."""

    def parts(self, shape: Shape, dtype: torch.dtype) -> Layout:
        """The layout of what replaces such a tensor."""

    def encode(self, tensor: Tensor) -> dict[str, Tensor]: ...

    def decode(self, parts: Tensors, shape: Shape, dtype: torch.dtype) -> Tensor:
        """Restore a tensor from parts of the right layout; raises `Malformed` for impossible values."""


@dataclass(frozen=True)
class FullUpdate:
    """An update as it is, without compression."""

    of_updates, error_feedback = True, False

    def parts(self, shape: Shape, dtype: torch.dtype) -> Layout:
        return {"update": (shape, dtype)}

    def encode(self, tensor: Tensor) -> dict[str, Tensor]:
        return {"update": tensor}

    def decode(self, parts: Tensors, shape: Shape, dtype: torch.dtype) -> Tensor:
        return parts["update"]


@dataclass(frozen=True)
class HalfPrecision:
    """16-bit floats. Values out of range become the largest there are, values that are not finite stay so.

    Parameters
    ----------
    to : the 16-bit dtype.
    """

    to: torch.dtype
    of_updates, error_feedback = False, False

    def parts(self, shape: Shape, dtype: torch.dtype) -> Layout:
        return {"half": (shape, self.to)}

    def encode(self, tensor: Tensor) -> dict[str, Tensor]:
        most = torch.finfo(self.to).max
        return {"half": torch.where(tensor.isfinite(), tensor.clamp(-most, most), tensor).to(self.to)}

    def decode(self, parts: Tensors, shape: Shape, dtype: torch.dtype) -> Tensor:
        return parts["half"].to(dtype)


@dataclass(frozen=True)
class Int8:
    """8-bit integers: multiples of a scale, from -127 to 127.

    Parameters
    ----------
    scale : one scale for each "row" of the first axis, or one for the "tensor".
    """

    scale: Literal["row", "tensor"] = "row"
    of_updates, error_feedback = False, False

    def parts(self, shape: Shape, dtype: torch.dtype) -> Layout:
        return {"int8": (shape, torch.int8), "scale": ((shape[0] if self.scale == "row" else 1,), dtype)}

    def encode(self, tensor: Tensor) -> dict[str, Tensor]:
        rows = tensor.reshape(len(tensor) if self.scale == "row" else 1, -1)
        scales = rows.abs().amax(1) / STEPS
        steps = (rows / scales.unsqueeze(1)).nan_to_num(0.0).round().clamp(-STEPS, STEPS)  # a row of zeros has no scale
        return {"int8": steps.to(torch.int8).reshape(tensor.shape), "scale": scales}

    def decode(self, parts: Tensors, shape: Shape, dtype: torch.dtype) -> Tensor:
        steps, scales = parts["int8"], parts["scale"]
        if bool((scales < 0).any()):
            raise Malformed("a scale is negative")
        return steps.to(dtype) * scales.view(-1, *[1] * (steps.dim() - 1))


@dataclass(frozen=True)
class TopK:
    """Top-k sparsification: only the entries of largest magnitude are sent, of equal ones the first.

    Positions are sent as a bit mask, or as indices where that is shorter.

    Parameters
    ----------
    share : the share of the entries that is sent.
    error_feedback : whether what is left out is kept by the device and added to its next update.
    """

    share: Share
    error_feedback: bool = True
    of_updates = True

    def count(self, entries: int) -> int:
        return min(entries, max(1, math.ceil(self.share * entries - 1e-9)))

    def parts(self, shape: Shape, dtype: torch.dtype) -> Layout:
        entries = math.prod(shape)
        count, octets = self.count(entries), -(-entries // 8)
        numbers = Bounded((count,), torch.int32, below=entries)
        places = numbers if count * torch.int32.itemsize < octets else ((octets,), torch.uint8)
        return {"values": ((count,), dtype), "places": places}

    def encode(self, tensor: Tensor) -> dict[str, Tensor]:
        flat = tensor.flatten()
        taken = _largest(flat, self.count(len(flat)))
        _, kind = self.parts(tuple(tensor.shape), tensor.dtype)["places"]
        places = taken.nonzero().flatten().to(kind) if kind == torch.int32 else _packed(taken)
        return {"values": flat[taken], "places": places}

    def decode(self, parts: Tensors, shape: Shape, dtype: torch.dtype) -> Tensor:
        entries, count, places = math.prod(shape), len(parts["values"]), parts["places"]
        found = places.long() if places.dtype == torch.int32 else _unpacked(places, count)
        rising = len(found) == count and bool((found[1:] > found[:-1]).all())
        if not rising or int(found[0]) < 0 or int(found[-1]) >= entries:
            raise Malformed(f"the positions are not {count} different ones in order, of {entries}")
        made = torch.zeros(entries, dtype=dtype)
        made[found] = parts["values"]
        return made.view(shape)


@dataclass(frozen=True)
class LowRank:
    """Low rank: a matrix is sent as the product of two thin ones, the nearest of that rank.

    A kernel of a convolution is a matrix with one row per output channel. The rank follows from the shape, not from the
    values, so that the size of a message is known beforehand.

    Parameters
    ----------
    share : the rank, as a share of the full rank, the smaller of the numbers of rows and columns.
    error_feedback : whether what is left out is kept by the device and added to its next update.
    """

    share: Share
    error_feedback: bool = True
    of_updates = True

    def rank(self, shape: Shape) -> int:
        return max(1, math.ceil(self.share * min(shape[0], math.prod(shape[1:])) - 1e-9))

    def parts(self, shape: Shape, dtype: torch.dtype) -> Layout:
        rank = self.rank(shape)
        return {"left": ((shape[0], rank), dtype), "right": ((rank, math.prod(shape[1:])), dtype)}

    def encode(self, tensor: Tensor) -> dict[str, Tensor]:
        matrix, rank = tensor.flatten(1), self.rank(tuple(tensor.shape))
        if not bool(matrix.isfinite().all()):  # it has no singular values: NaN is sent and not hidden
            layout = self.parts(tuple(tensor.shape), tensor.dtype)
            return {name: torch.full(shape, math.nan, dtype=dtype) for name, (shape, dtype) in layout.items()}
        left, values, right = torch.linalg.svd(matrix.to(torch.float64), full_matrices=False)
        factors = {"left": left[:, :rank] * values[:rank], "right": right[:rank]}
        return {name: factor.to(tensor.dtype).contiguous() for name, factor in factors.items()}

    def decode(self, parts: Tensors, shape: Shape, dtype: torch.dtype) -> Tensor:
        return (parts["left"] @ parts["right"]).view(shape)


def float16() -> Compressor:
    """Half precision, IEEE 754: 11 bits of mantissa, values up to 65,504."""
    return HalfPrecision(torch.float16)


def bfloat16() -> Compressor:
    """Half precision with the range of float32: 8 bits of mantissa."""
    return HalfPrecision(torch.bfloat16)


COMPRESSORS: Registry[Callable[..., Compressor]] = Registry(
    "compressors", {"float16": float16, "bfloat16": bfloat16, "int8": Int8, "top_k": TopK, "low_rank": LowRank}
)
"""One that compresses updates alone (`of_updates`) is for the uplink only."""


def _largest(flat: Tensor, count: int) -> Tensor:
    """A mask; NaN counts as large, so that it is sent and not hidden."""
    sizes = flat.abs().nan_to_num(nan=math.inf, posinf=math.inf)
    least = sizes.topk(count).values[-1]
    taken = sizes > least
    taken[(sizes == least).nonzero().flatten()[: count - int(taken.sum())]] = True
    return taken


def _packed(bits: Tensor) -> Tensor:
    return torch.from_numpy(np.packbits(bits.numpy()))


def _unpacked(octets: Tensor, count: int) -> Tensor:
    """The positions of all set bits, padding included; none if their number is wrong."""
    bits = np.unpackbits(octets.numpy())
    return torch.from_numpy(np.flatnonzero(bits) if np.count_nonzero(bits) == count else np.zeros(0, dtype=np.int64))


def is_compressible(shape: Sequence[int], dtype: torch.dtype) -> bool:
    """Vectors and scalars travel as they are: they are small, and among them are biases, counts and statistics, which
    must not be rounded."""
    return dtype.is_floating_point and len(shape) > 1 and math.prod(shape) > 0


MARK = "@"  # between a tensor's name and the name of a part
Bundles = dict[str, dict[str, Tensor]]
Cache = dict[Hashable, tuple[object, Mapping[str, Tensor]]]
"""By identity of a tensor: what several devices share is compressed once, and still shared afterwards."""


@dataclass(frozen=True)
class Compression:
    """How the parcels of a run travel.

    Parameters
    ----------
    uplink : compresses what devices send; None: updates are sent in full.
    downlink : compresses what the server sends; None: it is sent as it is.
    """

    uplink: Compressor | None = None
    downlink: Compressor | None = None

    def encode_down(self, inbox: Parcel, cache: Cache | None = None) -> Bundles:
        """What the server sends. Names say how to decode, because a device does not know the layout beforehand.

        Parameters
        ----------
        inbox : the parcel for a device.
        cache : what was compressed before, so that tensors which several devices share are compressed once.
        """
        return {bundle: self._encode_down(tensors, {} if cache is None else cache) for bundle, tensors in inbox.items()}

    def decode_down(self, encoded: Parcel, cache: Cache | None = None) -> Bundles:
        """What a device receives, decoded.

        Parameters
        ----------
        encoded : what `encode_down` returned.
        cache : what was decoded before, so that tensors which several devices share are decoded once.
        """
        return {b: self._decode_down(tensors, {} if cache is None else cache) for b, tensors in encoded.items()}

    def encode_up(self, task: Task, inbox: Parcel, upload: Parcel, residual: Parcel) -> tuple[Bundles, Parcel]:
        """What a device sends.

        Parameters
        ----------
        task : the task, which declares the upload.
        inbox : what the device received.
        upload : what the task returned.
        residual : what was left out of earlier uploads.

        Returns
        -------
        What travels, and the new residual.
        """
        encoded: Bundles = {}
        for bundle, tensors in upload.items():
            key = _residual_key(task, bundle)
            encoded[bundle], left_out = self._encode_up(tensors, _base(task, bundle, inbox), residual.get(key, {}))
            if left_out and _has_same_entries(task, bundle):
                residual = {**residual, key: left_out}
        return encoded, residual

    def decode_up(self, reply: Reply, task: Task, inbox: Parcel, max_examples: int = MAX_EXAMPLES) -> Reply | Refusal:
        """What the server receives, decoded.

        Only what travelled is checked here, so that it can be decoded; the gate follows.

        Parameters
        ----------
        reply : the reply as it travelled.
        task : the task, which declares the upload.
        inbox : the server's own inbox of the device, before compression.
        max_examples : the largest number of examples that a device may claim to hold.
        """
        refusal = refuse(reply, self.encoded_task(task), inbox, max_examples)
        if refusal:
            return refusal
        layouts = declared(task, reply.device, inbox, reply.examples)
        try:
            upload = {b: self._decode_up(reply.upload[b], one, _base(task, b, inbox)) for b, one in layouts.items()}
        except Malformed as error:
            return Refusal(reply.device.name, "BAD_FORMAT", str(error))
        return replace(reply, upload=upload)

    def encoded_task(self, task: Task) -> Task:
        """The same task, declaring what travels.

        Parameters
        ----------
        task : the task.
        """
        return replace(task, sends={bundle: _EncodedSpec(self, spec) for bundle, spec in task.sends.items()})

    def bytes_down(self, inbox: Parcel) -> int:
        """The bytes of an inbox as it travels.

        Parameters
        ----------
        inbox : the inbox, before compression.
        """
        outlines = [(tuple(one.shape), one.dtype) for tensors in inbox.values() for one in tensors.values()]
        return sum(_size(self._downlink_for(*outline), *outline) for outline in outlines)

    def bytes_up(self, task: Task, upload: Parcel) -> int:
        """The bytes of an upload as it travels.

        Parameters
        ----------
        task : the task, which declares the upload.
        upload : the upload, before compression.
        """
        return sum(
            _size(self.uplink_for(one, isinstance(task.sends[bundle], Like)), *one)
            for bundle, tensors in upload.items()
            for one in ((tuple(tensor.shape), tensor.dtype) for tensor in tensors.values())
        )

    def uplink_for(self, outline: tuple[Shape, torch.dtype], is_update: bool) -> Compressor | None:
        """The compressor of a tensor; None: it travels as it is.

        Parameters
        ----------
        outline : its shape and dtype.
        is_update : whether it is an update of a tensor of the inbox.
        """
        if not is_compressible(*outline) or (not is_update and (self.uplink is None or self.uplink.of_updates)):
            return None
        saves = self.uplink is not None and _size(self.uplink, *outline) <= tensor_bytes(*outline)
        return self.uplink if saves else FullUpdate() if is_update else None

    def _downlink_for(self, shape: Shape, dtype: torch.dtype) -> Compressor | None:
        if self.downlink is None or not is_compressible(shape, dtype):
            return None
        return self.downlink if _size(self.downlink, shape, dtype) <= tensor_bytes(shape, dtype) else None

    def _encode_down(self, tensors: Tensors, cache: Cache) -> dict[str, Tensor]:
        encoded: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            key = _memory_key(tensor)
            if key not in cache:
                compressor = self._downlink_for(tuple(tensor.shape), tensor.dtype)
                cache[key] = tensor, compressor.encode(tensor) if compressor else {"": tensor}
            encoded |= _marked(name, tensor.dtype, cache[key][1])
        return encoded

    def _decode_down(self, encoded: Tensors, cache: Cache) -> dict[str, Tensor]:
        parts: dict[tuple[str, str], dict[str, Tensor]] = {}
        for key, tensor in encoded.items():
            name, _, mark = key.partition(MARK)
            part, _, dtype = mark.partition(":")
            parts.setdefault((name, dtype), {})[part] = tensor
        return {name: self._decode_one_down(own, dtype, cache) for (name, dtype), own in parts.items()}

    def _decode_one_down(self, parts: Tensors, dtype: str, cache: Cache) -> Tensor:
        first = next(iter(parts.values()))
        if self.downlink is None or not dtype:
            return first
        if id(first) not in cache:
            cache[id(first)] = first, {"": self.downlink.decode(parts, tuple(first.shape), _dtype(dtype))}
        return cache[id(first)][1][""]

    def _encode_up(
        self, tensors: Tensors, base: Tensors | None, residual: Tensors
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        encoded: dict[str, Tensor] = {}
        left_out: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            outline, old = (tuple(tensor.shape), tensor.dtype), _same_kind(tensor, base, name)
            compressor = self.uplink_for(outline, old is not None)
            change = tensor if compressor is None or old is None else tensor - old
            more = _same_kind(change, residual, name) if compressor and compressor.error_feedback else None
            change = change if more is None else change + more
            parts = compressor.encode(change) if compressor else {"": change}
            encoded |= _marked(name, tensor.dtype, parts)
            if compressor and compressor.error_feedback:
                left_out[name] = change - compressor.decode(parts, *outline)
        return encoded, left_out

    def _decode_up(self, encoded: Tensors, layout: Layout, base: Tensors | None) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for name, (shape, dtype) in layout.items():
            compressor = self.uplink_for((shape, dtype), base is not None)
            if compressor is None:
                tensors[name] = encoded[name]
                continue
            parts = {part: encoded[_key(name, dtype, part)] for part in compressor.parts(shape, dtype)}
            change = compressor.decode(parts, shape, dtype)
            tensors[name] = change if base is None else base[name] + change
        return tensors


@dataclass(frozen=True)
class ServerEnd:
    """The server's half of compression, as a transport.

    Parameters
    ----------
    compression : how parcels travel.
    report : called for every reply that cannot be decoded.
    max_examples : the largest number of examples that a device may claim to hold.
    side : where the transport runs.
    """

    compression: Compression
    report: Report = ignore
    max_examples: int = MAX_EXAMPLES
    side: Literal["server"] = "server"

    def open(self, request: Request) -> Exchange:
        return _ServerExchange(self, request)


@dataclass
class _ServerExchange(Exchange):
    server: ServerEnd
    request: Request
    cache: Cache = field(default_factory=dict)

    def encoded_task(self, task: Task) -> Task:
        return self.server.compression.encoded_task(task)

    def deliver(self, device: Device, inbox: Parcel) -> Parcel | None:
        return self.server.compression.encode_down(inbox, self.cache)

    def upload(self, reply: Reply) -> Reply | None:
        task, inbox = self.request.task, self.request.inboxes[reply.device]
        decoded = self.server.compression.decode_up(reply, task, inbox, self.server.max_examples)
        if isinstance(decoded, Refusal):
            self.server.report(self.request.round_number, decoded)
            return None
        return decoded


@dataclass(frozen=True)
class DeviceEnd:
    """The devices' half of compression, as a transport.

    Parameters
    ----------
    compression : how parcels travel.
    residual : reads what a device has left out so far.
    side : where the transport runs.
    """

    compression: Compression
    residual: Callable[[Device], Parcel]
    side: Literal["device"] = "device"

    def open(self, request: Request) -> Exchange:
        return _DeviceExchange(self, request)


@dataclass
class _DeviceExchange(Exchange):
    device_end: DeviceEnd
    request: Request
    received: dict[Device, Parcel] = field(default_factory=dict)
    cache: Cache = field(default_factory=dict)

    def deliver(self, device: Device, inbox: Parcel) -> Parcel | None:
        self.received[device] = self.device_end.compression.decode_down(inbox, self.cache)
        return self.received[device]

    def upload(self, reply: Reply) -> Reply | None:
        before, received = self.device_end.residual(reply.device), self.received[reply.device]
        encoded, after = self.device_end.compression.encode_up(self.request.task, received, reply.upload, before)
        return replace(reply, upload=encoded, residual=None if after is before else after)


@dataclass(frozen=True)
class _EncodedSpec:
    """What a bundle declares, as it travels."""

    compression: Compression
    spec: BundleSpec

    def __call__(self, model: Model, inbox: Parcel, examples: int) -> Layout:
        layout: dict[str, tuple[Shape, torch.dtype]] = {}
        for name, outline in self.spec(model, inbox, examples).items():
            compressor = self.compression.uplink_for((outline[0], outline[1]), isinstance(self.spec, Like))
            parts = compressor.parts(*outline) if compressor else {"": outline}
            layout |= {_key(name, outline[1], part): one for part, one in parts.items()}
        return layout


def _memory_key(tensor: Tensor) -> Hashable:
    """The same for views of the same memory, such as the slices that the devices of a tier are sent."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _base(task: Task, bundle: str, inbox: Parcel) -> Tensors | None:
    """The tensors that a bundle is an update of; None where it is no update."""
    spec = task.sends.get(bundle)
    return inbox[spec.bundle] if isinstance(spec, Like) else None


def _has_same_entries(task: Task, bundle: str) -> bool:
    """False if what was left out of a bundle cannot be added to the next: its entries are then other weights."""
    spec = task.sends.get(bundle)
    return not isinstance(spec, Like) or spec.same_entries


def _same_kind(tensor: Tensor, tensors: Tensors | None, name: str) -> Tensor | None:
    """The tensor of that name if shape and dtype agree. A wrong upload is refused later; a device whose model has
    another size than before starts with an empty residual."""
    other = tensors.get(name) if tensors else None
    return other if other is not None and (other.shape, other.dtype) == (tensor.shape, tensor.dtype) else None


def _residual_key(task: Task, bundle: str) -> str:
    return f"{task.stream} {bundle}"


def _size(compressor: Compressor | None, shape: Shape, dtype: torch.dtype) -> int:
    parts = compressor.parts(shape, dtype) if compressor else {"": (shape, dtype)}
    return sum(tensor_bytes(*one) for one in parts.values())


def _marked(name: str, dtype: torch.dtype, parts: Tensors) -> dict[str, Tensor]:
    return {_key(name, dtype, part): tensor for part, tensor in parts.items()}


def _key(name: str, dtype: torch.dtype, part: str) -> str:
    if MARK in name:
        raise ValueError(f"with compression, no tensor can have a name with {MARK}, as {name} has")
    return f"{name}{MARK}{part}:{str(dtype).removeprefix('torch.')}" if part else name


def _dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype
