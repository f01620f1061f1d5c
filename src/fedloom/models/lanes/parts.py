"""Parts of a large model's weights as models of their own: copied out, and their gradients summed up, in one go.

As views of the large weights they would be copied one by one for the lane kernels, and each would have a gradient as
large as the whole.
"""

import math
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from .convolution import lane_count
from .copies import copy_blocks
from .layout import arranged_strides, offsets

Ranges = tuple[tuple[int, int], ...]
"""The first entry of each axis of a weight, and the one behind the last."""

MOST_AXES = 5
"""Of the weights of all devices; those of convolutions of volumes have six."""


class Place:
    """Where a model's weights [K, ...] lie in a large model, and in memory, one after the other as `lay_out` has them.

    Parameters
    ----------
    devices : how many devices there are.
    ranges : the entries of the large model's weights, by name and sorted, without the axis of the devices.
    """

    def __init__(self, devices: int, ranges: Mapping[str, Ranges]):
        self.devices, self.ranges = devices, ranges
        self.shapes = [(devices, *(stop - start for start, stop in one)) for one in ranges.values()]
        self.strides = [arranged_strides(shape) for shape in self.shapes]
        self.offsets, self.total = offsets(self.shapes)

    def address(self, tensors: Sequence[Tensor | None]) -> int | None:
        """Where the first tensor begins; None if they do not lie in memory like this."""
        first = tensors[0]
        if first is None:
            return None
        start, size = first.data_ptr(), first.element_size()
        for tensor, offset, strides in zip(tensors, self.offsets, self.strides, strict=True):
            if tensor is None or tensor.stride() != strides or tensor.data_ptr() != start + size * offset:
                return None
        return start

    def views(self, memory: Tensor) -> list[Tensor]:
        """The weights in memory that is like this."""
        places = zip(self.shapes, self.strides, self.offsets, strict=True)
        return [memory.as_strided(shape, strides, offset) for shape, strides, offset in places]

    def contains(self, other: "Place") -> bool:
        """True if all entries of the other are here too."""
        return all(
            name in self.ranges
            and all(a <= c and d <= b for (a, b), (c, d) in zip(self.ranges[name], inner, strict=True))
            for name, inner in other.ranges.items()
        )

    @cached_property
    def numbers(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.ranges)}


@lru_cache(maxsize=64)
def _blocks(inner: Place, outer: Place, size: int, outwards: bool) -> Tensor:
    """What `copy_blocks` has to know to copy a place to, or from, another that contains it.

    `size`: bytes of a number.
    """
    rows = []
    for own, (name, ranges) in enumerate(inner.ranges.items()):
        number = outer.numbers[name]
        steps = outer.strides[number]
        before = (a - c for (a, _), (c, _) in zip(ranges, outer.ranges[name], strict=True))
        start = outer.offsets[number] + sum(n * step for n, step in zip(before, steps[1:], strict=True))
        # devices and outputs lie together in both places; so do further axes that are complete
        axes = zip(inner.shapes[own], inner.strides[own], steps, strict=True)
        rest = sorted(list(axes)[2:], key=lambda axis: axis[1])
        run = math.prod(inner.shapes[own][:2])
        while rest and rest[0][1] == rest[0][2] == run:
            run *= rest.pop(0)[0]
        counts, from_inner, from_outer = zip(*[(1, 0, 0)] * (3 - len(rest)), *reversed(rest), strict=True)
        sides = [(inner.offsets[own], from_inner), (start, from_outer)]
        (x, x_steps), (y, y_steps) = sides if outwards else reversed(sides)
        x, y, *apart = (size * numbers for numbers in (x, y, *x_steps, *y_steps))
        rows.append([x, y, *counts, run, *apart])
    return torch.tensor(rows, dtype=torch.int64)


class Parts:
    """A large model's weights, and the parts that are models of their own.

    Parameters
    ----------
    whole : the large model.
    parts : its parts.
    dtype : of the weights.
    """

    def __init__(self, whole: Place, parts: Sequence[Place], dtype: torch.dtype):
        self.whole, self.parts, self.dtype = whole, parts, dtype
        bits = 32 if dtype == torch.float32 else 64
        self.size, self.kernel = bits // 8, copy_blocks(lane_count(bits), bits)

    def copy(self, source: int, target: int, inner: Place, outer: Place, outwards: bool, adds: bool = False) -> None:
        """Copy a place, given by its address, to another one."""
        blocks = _blocks(inner, outer, self.size, outwards)
        self.kernel(source, target, blocks.data_ptr(), len(blocks), int(adds))

    def read(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """The weights of all parts, one after the other."""
        found, start = list[Tensor](), weights[0].data_ptr()
        for part in self.parts:
            if part is self.whole:
                found += [weight.detach() for weight in weights]
                continue
            memory = torch.empty(part.total, dtype=self.dtype)
            self.copy(start, memory.data_ptr(), part, self.whole, outwards=False)
            found += part.views(memory)
        return found

    def sum(self, gradients: Sequence[Tensor | None]) -> list[Tensor]:
        """The sum of all parts' gradients, the last part's first. It is made in the memory of the first parts'."""
        ends = offsets([(len(part.ranges),) for part in self.parts])[0]
        each = [list(gradients[end : end + len(part.ranges)]) for part, end in zip(self.parts, ends, strict=True)]
        place, total = self.parts[-1], self._together(self.parts[-1], each[-1])
        for part, own in zip(reversed(self.parts[:-1]), reversed(each[:-1]), strict=True):
            larger, sums = part, self._together(part, own)
            if not part.contains(place):
                larger, sums = self.whole, self._spread(part, sums)
            self.copy(total[0].data_ptr(), sums[0].data_ptr(), place, larger, outwards=True, adds=True)
            place, total = larger, sums
        return total if place is self.whole else self._spread(place, total)

    def _together(self, place: Place, gradients: Sequence[Tensor | None]) -> list[Tensor]:
        """Gradients in one piece of memory; where there is none, zeros."""
        if place.address(gradients) is not None:
            return [gradient for gradient in gradients if gradient is not None]
        views = place.views(torch.zeros(place.total, dtype=self.dtype))
        for view, gradient in zip(views, gradients, strict=True):
            if gradient is not None:
                view.copy_(gradient)
        return views

    def _spread(self, place: Place, total: Sequence[Tensor]) -> list[Tensor]:
        """A part's gradients among zeros."""
        memory = torch.zeros(self.whole.total, dtype=self.dtype)
        self.copy(total[0].data_ptr(), memory.data_ptr(), place, self.whole, outwards=True)
        return self.whole.views(memory)


class _ReadParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: Parts, *weights: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.parts = parts
        return tuple(parts.read(weights))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        return None, *ctx.parts.sum(gradients)


def read_parts(weights: Mapping[str, Tensor], parts: Sequence[Mapping[str, Ranges]]) -> list[dict[str, Tensor]] | None:
    """The weights of each part, [K, ...], differentiable; None if those of the large model do not lie as `lay_out` has
    them.

    Only the parts' own models may use them: their gradients are overwritten.

    Parameters
    ----------
    weights : the weights of the large model, [K, ...].
    parts : the entries that each part has of them, by name.
    """
    names = sorted(weights)
    tensors = [weights[name] for name in names]
    all_entries = ((name, tuple((0, size) for size in weights[name].shape[1:])) for name in names)
    whole = _find_place(len(tensors[0]), tuple(all_entries))
    has_kernels = tensors[0].dtype in (torch.float32, torch.float64) and tensors[0].device.type == "cpu"
    if not has_kernels or any(len(shape) > MOST_AXES for shape in whole.shapes) or whole.address(tensors) is None:
        return None
    places = [_find_place(whole.devices, tuple((name, part[name]) for name in sorted(part))) for part in parts]
    found = iter(_ReadParts.apply(Parts(whole, places, tensors[0].dtype), *tensors))  # type: ignore[no-untyped-call]
    return [{name: next(found) for name in place.ranges} for place in places]


@lru_cache(maxsize=64)
def _find_place(devices: int, ranges: tuple[tuple[str, Ranges], ...]) -> Place:
    """The same object for equal places."""
    return Place(devices, dict(ranges))
