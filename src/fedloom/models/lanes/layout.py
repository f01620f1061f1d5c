"""How weights of K devices lie in memory for the lane kernels: devices innermost, kernels outermost, all in one piece.

To everything else they are ordinary tensors [K, ...]; only their strides differ.
"""

import math
import weakref
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor


def arrange(weight: Tensor) -> Tensor:
    """[K, outputs, inputs, *kernel] -> [*kernel, inputs, outputs, K], contiguous; a view if it lies so already."""
    axes = weight.dim()
    order = (*range(3, axes), *reversed(range(min(3, axes))))
    return weight.permute(order).contiguous()


def disarrange(memory: Tensor) -> Tensor:
    """[*kernel, inputs, outputs, K] -> [K, outputs, inputs, *kernel], a view."""
    axes = memory.dim()
    kernel = max(0, axes - 3)
    return memory.permute(*reversed(range(kernel, axes)), *range(kernel))


class ArrangedWeights:
    """Weights as the kernels want them in memory; those of the last pass if they are the same.

    They are kept for as long as somebody else has the weights.
    """

    def __init__(self) -> None:
        self._clear()

    def _clear(self, _: Any = None) -> None:
        self._given: list[weakref.ref[Tensor]] = []
        self._versions: list[int] = []
        self._found: list[Tensor] = []
        self._derived: dict[Any, Tensor] = {}

    def find(
        self, weights: Sequence[Tensor], shapes: Sequence[Sequence[int]]
    ) -> tuple[list[Tensor], dict[Any, Tensor]]:
        """The weights as the kernels want them, and what was made of them before, to which more can be added.

        Parameters
        ----------
        weights : the weights of each device, [K, ...], or of one device for all.
        shapes : those of the weights of all devices.
        """
        arranged = [is_arranged(weight, shape) for weight, shape in zip(weights, shapes, strict=True)]
        if all(arranged):
            return list(weights), {}
        fixed = not any(weight.requires_grad or weight.is_inference() for weight in weights)
        versions = [weight._version for weight in weights] if fixed else []
        if fixed and versions == self._versions and all(a is b() for a, b in zip(weights, self._given, strict=True)):
            return self._found, self._derived
        found = [
            weight if done else disarrange(arrange(weight.expand(shape)))
            for weight, done, shape in zip(weights, arranged, shapes, strict=True)
        ]
        self._clear()
        if fixed:
            self._given = [weakref.ref(weight, self._clear) for weight in weights]
            self._versions, self._found = versions, found
        return found, self._derived


def is_arranged(weight: Tensor, shape: Sequence[int]) -> bool:
    """True if a weight of all devices lies in memory as the kernels want it: a part of a block may have its strides.

    Parameters
    ----------
    weight : the weight, [K, ...].
    shape : what its shape must be.
    """
    return weight.shape == tuple(shape) and weight.stride() == arranged_strides(shape)


@lru_cache(maxsize=4096)
def arranged_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a weight [K, outputs, inputs, *kernel] that lies in memory as the kernels want it."""
    axes, step = len(shape), 1
    strides = [0] * axes
    for axis in (*range(min(3, axes)), *reversed(range(3, axes))):
        strides[axis], step = step, step * shape[axis]
    return tuple(strides)


def offsets(shapes: Sequence[Sequence[int]]) -> tuple[list[int], int]:
    """Where weights of these shapes begin when they lie one after the other, and how many numbers they are."""
    found, total = list[int](), 0
    for shape in shapes:
        found.append(total)
        total += math.prod(shape)
    return found, total


def lay_out(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A copy of weights [K, ...] that lies in memory as the kernels want it, in the order of names.

    Parameters
    ----------
    weights : the weights of each device, of one dtype or several.
    """
    copies = empty_layout(weights)
    for name, copy in copies.items():
        copy.copy_(weights[name])
    return {name: copies[name] for name in weights}


def empty_layout(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors like these weights, of zeros, in one piece of memory for each dtype."""
    found: dict[str, Tensor] = {}
    for dtype in {weight.dtype for weight in weights.values()}:
        names = sorted(name for name, weight in weights.items() if weight.dtype == dtype)
        shapes = [tuple(weights[name].shape) for name in names]
        starts, total = offsets(shapes)
        flat = torch.zeros(total, dtype=dtype, device=weights[names[0]].device)
        for name, shape, start in zip(names, shapes, starts, strict=True):
            found[name] = flat.as_strided(shape, arranged_strides(shape), start)
    return found


def filled(devices: int) -> int:
    """The number of devices that fills vectors: a power of two, or a multiple of sixteen.

    Parameters
    ----------
    devices : how many there are.
    """
    return 1 << (devices - 1).bit_length() if devices <= 16 else -(-devices // 16) * 16
