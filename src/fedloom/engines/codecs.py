"""Parcels in fewer bytes, on their way to devices and back. What travels is a parcel again, so it is counted, sealed
and admitted like any other.

From a device comes what it changed: the server adds that to what it has, not to what rounding made of it on the way
down, so rounding does not add up from round to round. All of it are pure functions, the same for every engine.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..fleet import Reply
from ..models import Model
from ..tensors import Parcel, Tensors, outline_bytes
from ..training import Layout, Like, Sent, Task
from .admission import MOST_EXAMPLES, Refusal, declared, refuse
from .codes import Code, Malformed, Shape, Whole, is_coded

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

    def decode_up(self, reply: Reply, task: Task, inbox: Parcel, most_examples: int = MOST_EXAMPLES) -> Reply | Refusal:
        """What the server has of it. `inbox` is what it wanted to send. The gate is still to come: here only what
        travelled is checked, so that it can be read."""
        refusal = refuse(reply, self.asked(task), inbox, most_examples=most_examples)
        if refusal:
            return refusal
        layouts = declared(task, reply.device, inbox, reply.examples)
        try:
            made = {b: self._read_up(reply.sent[b], one, _base(task, b, inbox)) for b, one in layouts.items()}
        except Malformed as error:
            return Refusal(reply.device.name, "BAD_FORMAT", str(error))
        return replace(reply, sent=made)

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
        worth = self.up is not None and _size(self.up, *outline) <= outline_bytes(*outline)
        return self.up if worth else Whole() if update else None

    def _code_down(self, shape: Shape, dtype: torch.dtype) -> Code | None:
        if self.down is None or not is_coded(shape, dtype):
            return None
        return self.down if _size(self.down, shape, dtype) <= outline_bytes(shape, dtype) else None

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
            more = _like(whole, left, name) if code and code.feedback else None
            whole = whole if more is None else whole + more
            parts = code.encode(whole) if code else {"": whole}
            made |= _marked(name, tensor.dtype, parts)
            if code and code.feedback:
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
    sent: Sent

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
    return sum(outline_bytes(*one) for one in parts.values())


def _marked(name: str, dtype: torch.dtype, parts: Tensors) -> dict[str, Tensor]:
    return {_key(name, dtype, part): tensor for part, tensor in parts.items()}


def _key(name: str, dtype: torch.dtype, part: str) -> str:
    if MARK in name:
        raise ValueError(f"where a codec is on, no tensor can have a name with {MARK}, as {name} has")
    return f"{name}{MARK}{part}:{str(dtype).removeprefix('torch.')}" if part else name


def _dtype(said: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, said)
    return found
