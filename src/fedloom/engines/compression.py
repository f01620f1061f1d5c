"""Parcels in fewer bytes, on their way to devices and back. What travels is a parcel again, so it is counted, sealed
and admitted like any other.

From a device comes what it changed: the server adds that to what it has, not to what rounding made of it on the way
down, so rounding does not add up from round to round. All of it are pure functions, the same for every engine.

One tensor in fewer bytes, as tensors again: shorter numbers, whole ones with a scale, or the largest entries alone.

How much a code takes follows from shape and dtype, never from the numbers, so whoever reads it knows the layout before
it comes. Reading checks all that a layout does not say and allocates no more than the tensor that was declared.

A simulation whose parcels go through a codec. An engine for the turns of a method; whoever judges asks another.

What a device leaves out it remembers only if its reply is admitted, and from the round's commit on, as all its memory.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from ..client import Bounded, Layout, Like, BundleSpec, Task
from ..fleet import Device, Reply
from ..models import Model
from ..settings import Share
from ..tensors import Parcel, Tensors, combine, tensor_bytes
from .blocks import Parcels
from .client_data import ClientData
from .gate import MAX_EXAMPLES, Refusal, declared, refuse
from .in_process import InProcess, Way, straight

Shape = tuple[int, ...]
STEPS = 127  # to either side of zero


class Malformed(Exception):  # noqa: N818 - named for what is wrong
    """A tensor coded as no honest device would."""


class Code(Protocol):
    @property
    def of_updates(self) -> bool:
        """Whether it is for updates alone, and would spoil anything else."""

    @property
    def error_feedback(self) -> bool:
        """Whether what is lost is kept, and added to the next update."""

    def parts(self, shape: Shape, dtype: torch.dtype) -> Layout:
        """What takes the place of such a tensor, each part under its name."""

    def encode(self, tensor: Tensor) -> dict[str, Tensor]: ...

    def decode(self, parts: Tensors, shape: Shape, dtype: torch.dtype) -> Tensor:
        """Of parts that have the layout they should; raises `Malformed`."""


@dataclass(frozen=True)
class Whole:
    """An update as it is."""

    of_updates, error_feedback = True, False

    def parts(self, shape: Shape, dtype: torch.dtype) -> Layout:
        return {"update": (shape, dtype)}

    def encode(self, tensor: Tensor) -> dict[str, Tensor]:
        return {"update": tensor}

    def decode(self, parts: Tensors, shape: Shape, dtype: torch.dtype) -> Tensor:
        return parts["update"]


@dataclass(frozen=True)
class Half:
    """Shorter floating numbers; what they cannot reach becomes the largest they have, what is not finite stays so."""

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
    """Multiples of a scale, -127 to 127: a scale for every row (of the first axis), or one for the tensor."""

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
    """The entries farthest from zero, so large a share of them; of equal ones the first. Where they are is told by a
    bit for every entry, or by their numbers where that is shorter."""

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
            raise Malformed(f"the places are not {count} different ones in order, of {entries}")
        made = torch.zeros(entries, dtype=dtype)
        made[found] = parts["values"]
        return made.view(shape)


def float16() -> Code:
    return Half(torch.float16)


def bfloat16() -> Code:
    return Half(torch.bfloat16)


DOWN: Mapping[str, Callable[..., Code]] = {"float16": float16, "bfloat16": bfloat16, "int8": Int8}
UP: Mapping[str, Callable[..., Code]] = {**DOWN, "top_k": TopK}


def _largest(flat: Tensor, count: int) -> Tensor:
    """Truth values; what is no number counts as large, so that it is sent and not hidden."""
    sizes = flat.abs().nan_to_num(nan=math.inf, posinf=math.inf)
    least = sizes.topk(count).values[-1]
    taken = sizes > least
    taken[(sizes == least).nonzero().flatten()[: count - int(taken.sum())]] = True
    return taken


def _packed(bits: Tensor) -> Tensor:
    return torch.from_numpy(np.packbits(bits.numpy()))


def _unpacked(octets: Tensor, count: int) -> Tensor:
    """The places of all set bits, those behind the last entry too; none if there are not so many."""
    bits = np.unpackbits(octets.numpy())
    return torch.from_numpy(np.flatnonzero(bits) if np.count_nonzero(bits) == count else np.zeros(0, dtype=np.int64))


def is_coded(shape: Sequence[int], dtype: torch.dtype) -> bool:
    """Vectors and single numbers travel as they are: there are few of them, and among them are biases, counts and
    statistics, which do not bear rounding."""
    return dtype.is_floating_point and len(shape) > 1 and math.prod(shape) > 0


MARK = "@"  # between a tensor's name and what is made of it
Bundles = dict[str, dict[str, Tensor]]


@dataclass(frozen=True)
class Codec:
    """How a run's parcels travel; None: as they are, but for updates, which are then sent whole."""

    up: Code | None = None
    down: Code | None = None

    def encode_down(self, inbox: Parcel) -> Bundles:
        """What the server sends. It says itself what it is, for a device knows no layout of what it is to get."""
        return {bundle: self._written_down(tensors) for bundle, tensors in inbox.items()}

    def decode_down(self, coded: Parcel) -> Bundles:
        """What a device has of it."""
        return {bundle: self._read_down(tensors) for bundle, tensors in coded.items()}

    def rounded(self, tensor: Tensor) -> Tensor:
        """What a device has of one tensor, without the detour."""
        code = self._code_down(tuple(tensor.shape), tensor.dtype)
        return tensor if code is None else code.decode(code.encode(tensor), tuple(tensor.shape), tensor.dtype)

    def encode_up(self, task: Task, inbox: Parcel, sent: Parcel, left: Parcel) -> tuple[Bundles, Parcel]:
        """What a device sends, and what it leaves out of it. `inbox` is what it has got, `left` what it left out
        before."""
        coded: Bundles = {}
        for bundle, tensors in sent.items():
            before = left.get(_drawer(task, bundle), {})
            coded[bundle], after = self._written_up(tensors, _base(task, bundle, inbox), before)
            if after:
                left = {**left, _drawer(task, bundle): after}
        return coded, left

    def decode_up(self, reply: Reply, task: Task, inbox: Parcel, max_examples: int = MAX_EXAMPLES) -> Reply | Refusal:
        """What the server has of it. `inbox` is what it wanted to send. The gate is still to come: here only what
        travelled is checked, so that it can be read."""
        refusal = refuse(reply, self.asked(task), inbox, max_examples=max_examples)
        if refusal:
            return refusal
        layouts = declared(task, reply.device, inbox, reply.examples)
        try:
            made = {b: self._read_up(reply.upload[b], one, _base(task, b, inbox)) for b, one in layouts.items()}
        except Malformed as error:
            return Refusal(reply.device.name, "BAD_FORMAT", str(error))
        return replace(reply, upload=made)

    def asked(self, task: Task) -> Task:
        """The same task, as it declares what travels."""
        return replace(task, sends={bundle: _Coded(self, sent) for bundle, sent in task.sends.items()})

    def down_bytes(self, inbox: Parcel) -> int:
        outlines = [(tuple(one.shape), one.dtype) for tensors in inbox.values() for one in tensors.values()]
        return sum(_size(self._code_down(*outline), *outline) for outline in outlines)

    def up_bytes(self, task: Task, sent: Parcel) -> int:
        """Follows from shapes and dtypes alone."""
        return sum(
            _size(self.code_up(one, isinstance(task.sends[bundle], Like)), *one)
            for bundle, tensors in sent.items()
            for one in ((tuple(tensor.shape), tensor.dtype) for tensor in tensors.values())
        )

    def code_up(self, outline: tuple[Shape, torch.dtype], update: bool) -> Code | None:
        if not is_coded(*outline) or (not update and (self.up is None or self.up.of_updates)):
            return None
        worth = self.up is not None and _size(self.up, *outline) <= tensor_bytes(*outline)
        return self.up if worth else Whole() if update else None

    def _code_down(self, shape: Shape, dtype: torch.dtype) -> Code | None:
        if self.down is None or not is_coded(shape, dtype):
            return None
        return self.down if _size(self.down, shape, dtype) <= tensor_bytes(shape, dtype) else None

    def _written_down(self, tensors: Tensors) -> dict[str, Tensor]:
        made: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            code = self._code_down(tuple(tensor.shape), tensor.dtype)
            made |= _marked(name, tensor.dtype, code.encode(tensor) if code else {"": tensor})
        return made

    def _read_down(self, tensors: Tensors) -> dict[str, Tensor]:
        parts: dict[tuple[str, str], dict[str, Tensor]] = {}
        for key, tensor in tensors.items():
            name, _, mark = key.partition(MARK)
            part, _, dtype = mark.partition(":")
            parts.setdefault((name, dtype), {})[part] = tensor
        return {name: self._read_one_down(own, dtype) for (name, dtype), own in parts.items()}

    def _read_one_down(self, parts: Tensors, dtype: str) -> Tensor:
        first = next(iter(parts.values()))
        return first if self.down is None or not dtype else self.down.decode(parts, tuple(first.shape), _dtype(dtype))

    def _written_up(
        self, tensors: Tensors, base: Tensors | None, left: Tensors
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        made: dict[str, Tensor] = {}
        after: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            outline, old = (tuple(tensor.shape), tensor.dtype), _like(tensor, base, name)
            code = self.code_up(outline, old is not None)
            whole = tensor if code is None or old is None else tensor - old
            more = _like(whole, left, name) if code and code.error_feedback else None
            whole = whole if more is None else whole + more
            parts = code.encode(whole) if code else {"": whole}
            made |= _marked(name, tensor.dtype, parts)
            if code and code.error_feedback:
                after[name] = whole - code.decode(parts, *outline)
        return made, after

    def _read_up(self, coded: Tensors, layout: Layout, base: Tensors | None) -> dict[str, Tensor]:
        made: dict[str, Tensor] = {}
        for name, (shape, dtype) in layout.items():
            code = self.code_up((shape, dtype), base is not None)
            if code is None:
                made[name] = coded[name]
                continue
            parts = {part: coded[_key(name, dtype, part)] for part in code.parts(shape, dtype)}
            read = code.decode(parts, shape, dtype)
            made[name] = read if base is None else base[name] + read
        return made


@dataclass(frozen=True)
class _Coded:
    """What is declared of a bundle, as it travels."""

    codec: Codec
    sent: BundleSpec

    def __call__(self, model: Model, inbox: Parcel, examples: int) -> Layout:
        made: dict[str, tuple[Shape, torch.dtype]] = {}
        for name, outline in self.sent(model, inbox, examples).items():
            code = self.codec.code_up((outline[0], outline[1]), isinstance(self.sent, Like))
            parts = code.parts(*outline) if code else {"": outline}
            made |= {_key(name, outline[1], part): one for part, one in parts.items()}
        return made


def _base(task: Task, bundle: str, inbox: Parcel) -> Tensors | None:
    """What a bundle is an update of; None where it is none."""
    sent = task.sends.get(bundle)
    return inbox[sent.bundle] if isinstance(sent, Like) else None


def _like(tensor: Tensor, tensors: Tensors | None, name: str) -> Tensor | None:
    """The one of that name, if it is of the same shape and dtype; a device that sends anything else is refused later,
    and one whose model has another size than before begins anew."""
    found = tensors.get(name) if tensors else None
    return found if found is not None and (found.shape, found.dtype) == (tensor.shape, tensor.dtype) else None


def _drawer(task: Task, bundle: str) -> str:
    return f"{task.stream} {bundle}"


def _size(code: Code | None, shape: Shape, dtype: torch.dtype) -> int:
    parts = code.parts(shape, dtype) if code else {"": (shape, dtype)}
    return sum(tensor_bytes(*one) for one in parts.values())


def _marked(name: str, dtype: torch.dtype, parts: Tensors) -> dict[str, Tensor]:
    return {_key(name, dtype, part): tensor for part, tensor in parts.items()}


def _key(name: str, dtype: torch.dtype, part: str) -> str:
    if MARK in name:
        raise ValueError(f"where a codec is on, no tensor can have a name with {MARK}, as {name} has")
    return f"{name}{MARK}{part}:{str(dtype).removeprefix('torch.')}" if part else name


def _dtype(said: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, said)
    return found


@dataclass(frozen=True)
class Coded:
    inner: InProcess
    codec: Codec

    @property
    def client_data(self) -> ClientData:
        return self.inner.client_data

    def ask(
        self, task: Task, inboxes: Parcels, round_number: int, repeat: int = 0, way: Way = straight
    ) -> Iterator[Reply]:
        """`way` is what becomes of a reply as it travels: coded."""
        post = _Post(self, task, inboxes, self._told(inboxes), round_number, way)
        for reply in self.inner.ask(task, inboxes, round_number, repeat, post, post.told):
            if reply.device in post.left:
                self.inner.memory.leave_out(reply.device, post.left.pop(reply.device))
            yield reply

    def commit(self, round_number: int) -> None:
        self.inner.commit(round_number)

    def close(self) -> None:
        self.inner.close()

    def _told(self, inboxes: Parcels) -> Parcels:
        """What several devices share they still share, so that a block has it once."""
        if self.codec.down is None:
            return inboxes
        known: dict[int, Tensor] = {}

        def rounded(tensor: Tensor) -> Tensor:
            if id(tensor) not in known:
                known[id(tensor)] = self.codec.rounded(tensor)
            return known[id(tensor)]

        return {device: inbox if device.is_server else _each(rounded, inbox) for device, inbox in inboxes.items()}


@dataclass(frozen=True)
class _Post:
    """The way of the replies to one question."""

    engine: Coded
    task: Task
    inboxes: Parcels  # as the server has them
    told: Parcels  # as the devices do
    round_number: int
    way: Way
    left: dict[Device, Parcel] = field(default_factory=dict)  # out, by those who are heard

    def __call__(self, reply: Reply) -> Reply | None:
        device, codec, simulation = reply.device, self.engine.codec, self.engine.inner
        if device.is_server:  # nothing travels
            return self.way(reply)
        before = simulation.memory.left_out(device)
        coded, after = codec.encode_up(self.task, self.told[device], reply.upload, before)
        arrived = self.way(replace(reply, upload=coded))
        if arrived is None:
            return None
        heard = codec.decode_up(arrived, self.task, self.inboxes[device], simulation.max_examples)
        if isinstance(heard, Refusal):
            simulation.on_refusal(self.round_number, heard)
            return None
        if after is not before:
            self.left[device] = after
        return heard


def _each(function: Callable[[Tensor], Tensor], parcel: Parcel) -> Parcel:
    return {bundle: combine(function, tensors) for bundle, tensors in parcel.items()}
