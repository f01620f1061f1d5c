"""One tensor in fewer bytes, as tensors again: shorter numbers, whole ones with a scale, or the largest entries alone.

How much a code takes follows from shape and dtype, never from the numbers, so whoever reads it knows the layout before
it comes. Reading checks all that a layout does not say and allocates no more than the tensor that was declared.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from ..settings import Share
from ..tensors import Tensors
from ..training import Bounded, Layout

Shape = tuple[int, ...]
STEPS = 127  # to either side of zero


class Malformed(Exception):  # noqa: N818 - named for what is wrong
    """A tensor coded as no honest device would."""


class Code(Protocol):
    @property
    def of_updates(self) -> bool:
        """Whether it is for updates alone, and would spoil anything else."""

    @property
    def feedback(self) -> bool:
        """Whether what is lost is kept, and added to the next update."""

    def parts(self, shape: Shape, dtype: torch.dtype) -> Layout:
        """What takes the place of such a tensor, each part under its name."""

    def encode(self, tensor: Tensor) -> dict[str, Tensor]: ...

    def decode(self, parts: Tensors, shape: Shape, dtype: torch.dtype) -> Tensor:
        """Of parts that have the layout they should; raises `Malformed`."""


@dataclass(frozen=True)
class Whole:
    """An update as it is."""

    of_updates, feedback = True, False

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
    of_updates, feedback = False, False

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
    of_updates, feedback = False, False

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
    feedback: bool = True
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
