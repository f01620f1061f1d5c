"""SGD and Adam in one pass over weights that lie in memory as the lane kernels want them.

The same updates as in `optimizers.py`, rounded otherwise. A device's result does not depend on the others of its block:
the norm for clipping is summed in an order that is the same for every number of devices.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from ..models.lanes.layout import arrange, arranged_strides, disarrange, empty_layout
from ..tensors import Parcel, Tensors
from .optimizers import Adam, JoinedOptimizer, Optimizer, Sgd, UnequalNumbersError

Plain = TypeVar("Plain", bound=Optimizer)


def in_lanes(optimizer: Optimizer, weights: Tensors) -> Optimizer:
    """The optimizer with lane kernels; itself if there are none for it, or for the dtypes of the weights.

    Parameters
    ----------
    optimizer : the optimizer of the recipe.
    weights : what it updates, laid out by `lay_out`.
    """
    if isinstance(optimizer, JoinedOptimizer):
        return replace(optimizer, optimizer=in_lanes(optimizer.optimizer, weights))
    wrap, dtypes = LANE_OPTIMIZERS.get(type(optimizer)), {weight.dtype for weight in weights.values()}
    return wrap(optimizer) if wrap and dtypes in ({torch.float32}, {torch.float64}) else optimizer


@dataclass(frozen=True)
class LaneOptimizer(Optimizer, Generic[Plain]):
    """An optimizer in one pass over weights, gradient and state.

    Parameters
    ----------
    plain : the optimizer of the recipe, which has the settings.
    """

    plain: Plain

    @property
    def lr(self) -> float:
        return self.plain.lr


class LaneSgd(LaneOptimizer[Sgd]):
    """SGD in one pass."""

    def start(self, weights: Tensors) -> Parcel:
        return {"velocity": empty_layout(weights)}

    def step(self, weights: Tensors, gradient: Tensors, state: Parcel, active: Tensor) -> None:
        plain = self.plain
        block = _Block.of([weights, state["velocity"]], gradient, active, plain.clip_value)
        on = block.active
        clip = block.clip_factor(plain.clip_norm)
        numbers = (plain.momentum, -plain.lr, plain.weight_decay, 0.0)
        coefficients, row = block.repeated(on, clip, *(_of_each(number, on) for number in numbers))
        at_on, at_clip, at_keep, at_rate, at_decay, at_none = range(coefficients, coefficients + 6 * row, row)
        from ..models.lanes.updates import sgd

        kernel = sgd(block.lanes, block.bits)
        for piece in block.pieces(apart=not plain.decay_vectors):
            decay = at_decay if plain.decay_vectors or piece.axes > 2 else at_none
            w, velocity = piece.held
            kernel(w, piece.gradient, velocity, at_on, at_keep, at_clip, decay, at_rate, block.wide, piece.numbers)


class LaneAdam(LaneOptimizer[Adam]):
    """Adam in one pass."""

    def start(self, weights: Tensors) -> Parcel:
        return {**self.plain.start(weights), "mean": empty_layout(weights), "square": empty_layout(weights)}

    def step(self, weights: Tensors, gradient: Tensors, state: Parcel, active: Tensor) -> None:
        plain = self.plain
        if isinstance(plain.weight_decay, Tensor):  # the kernel takes one number
            raise UnequalNumbersError("the devices of this block have different weight decays")
        block = _Block.of([weights, state["mean"], state["square"]], gradient, active)
        steps = state["count"]["steps"].add_(block.active)
        clip = block.clip_factor(plain.clip_norm)
        # by Python, whose powers do not depend on how many devices there are
        unbias = [_unbias(beta, steps) for beta in (plain.beta1, plain.beta2)]
        coefficients, row = block.repeated(block.active, clip, *unbias, _of_each(-plain.lr, clip))
        addresses = range(coefficients, coefficients + 5 * row, row)
        from ..models.lanes.updates import adam

        kernel, numbers = adam(block.lanes, block.bits), (plain.beta1, plain.beta2, plain.weight_decay, plain.epsilon)
        for piece in block.pieces():
            w, mean, square = piece.held
            kernel(w, piece.gradient, mean, square, *addresses, block.wide, piece.numbers, *numbers)


LANE_OPTIMIZERS: dict[type[Any], Callable[[Any], Optimizer]] = {Sgd: LaneSgd, Adam: LaneAdam}


def _of_each(number: float | Tensor, like: Tensor) -> Tensor:
    """[K]: a number for each device, the same for all or its own (`JoinedOptimizer`)."""
    return number.to(like) if isinstance(number, Tensor) else torch.full_like(like, number)


def _unbias(beta: float, steps: Tensor) -> Tensor:
    """1 / (1 - beta ** steps) of each device; 1 before its first step."""
    return steps.new_tensor([1 / (1 - beta**step) if step else 1.0 for step in steps.tolist()])


@dataclass(frozen=True)
class Piece:
    """Numbers that an update goes through at once: addresses of the weights and the state, and of the gradient."""

    held: tuple[int, ...]
    gradient: int
    numbers: int
    axes: int


class _Block:
    """The gradients of a block as they lie in memory, and the vectors that the kernels use for it."""

    def __init__(self, held: list[list[Tensor]], gradients: list[Tensor], active: Tensor, bits: int, lanes: int):
        self.held, self.gradients, self.active, self.bits, self.lanes = held, gradients, active, bits, lanes
        self.devices = len(active)
        self.wide = math.lcm(self.devices, lanes)
        """Numbers after which the devices of vectors repeat."""
        self._coefficients = active

    @classmethod
    def of(cls, bundles: Sequence[Tensors], gradient: Tensors, active: Tensor, limit: float | None = None) -> "_Block":
        """Refuses weights or state that do not lie in memory as the kernels want them."""
        from ..models.lanes.convolution import lane_count

        names = sorted(bundles[0])
        held = [[bundle[name] for name in names] for bundle in bundles]
        first, strides = held[0][0], [arranged_strides(tuple(weight.shape)) for weight in held[0]]
        for tensors in held:
            if any(t.stride() != s or t.dtype != first.dtype for t, s in zip(tensors, strides, strict=True)):
                raise ValueError("weights and state for lane kernels must be laid out by `lay_out`")
        gradients = [gradient[name] for name in names]
        for number, stride in enumerate(strides):
            if gradients[number].stride() != stride:
                gradients[number] = disarrange(arrange(gradients[number]))
        if limit is not None:
            limit = min(limit, torch.finfo(first.dtype).max)  # torch refuses a larger bound
            gradients = [one.clamp(-limit, limit) for one in gradients]
        bits = 32 if first.dtype == torch.float32 else 64
        return cls(held, gradients, active.to(first), bits, lane_count(bits))

    def pieces(self, apart: bool = False) -> Iterator[Piece]:
        """Everything in one piece if it lies so in memory, or weight by weight."""
        rows = [*self.held, self.gradients]
        starts = [[tensor.data_ptr() for tensor in row] for row in rows]
        sizes = [tensor.numel() for tensor in self.gradients]
        bytes_before = [self.bits // 8 * before for before in accumulate(sizes, initial=0)][:-1]
        if not apart and all(
            start - row[0] == before for row in starts for start, before in zip(row, bytes_before, strict=True)
        ):
            first = [row[0] for row in starts]
            yield Piece(tuple(first[:-1]), first[-1], sum(sizes), 0)
            return
        for number, tensor in enumerate(self.gradients):
            yield Piece(tuple(row[number] for row in starts[:-1]), starts[-1][number], sizes[number], tensor.dim())

    def repeated(self, *coefficients: Tensor) -> tuple[int, int]:
        """One number per device, repeated to fill whole vectors: where the first ones are, and the bytes of each."""
        self._coefficients = torch.stack(coefficients).repeat(1, self.wide // self.devices)  # held while they are read
        return self._coefficients.data_ptr(), self.wide * self.bits // 8

    def clip_factor(self, limit: float | None) -> Tensor:
        """[K]: what to multiply each device's gradient by, as clip_grad_norm_ does.

        Weight by weight, or the order of sums would depend on how gradients lie in memory.
        """
        if limit is None:
            return torch.ones_like(self.active)
        from ..models.lanes.columns import column_sums
        from ..models.lanes.updates import PARTS, sum_squares

        parts, total = self.active.new_zeros(PARTS, self.devices), torch.empty_like(self.active)
        weights = torch.tensor([[one.data_ptr(), one.numel() // self.devices] for one in self.gradients])
        sum_squares(self.lanes, self.bits)(weights.data_ptr(), len(weights), parts.data_ptr(), self.devices)
        column_sums(self.lanes, self.bits)(parts.data_ptr(), total.data_ptr(), 1, PARTS, self.devices, 1.0)
        return (_of_each(limit, total) / (total.sqrt() + 1e-6)).clamp_max(1)
