"""SGD and Adam in one pass over weights that lie in memory as the lane kernels want them.

The same updates as in `optimizers.py`, rounded otherwise. A device's result does not depend on the others of its block:
the norm for clipping is summed in an order that is the same for every number of devices.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..models.lanes.layout import arrange
from ..tensors import Parcel, Tensors
from .optimizers import Adam, Optimizer, Sgd


def in_lanes(optimizer: Optimizer) -> Optimizer:
    """The optimizer with lane kernels; itself if there are none for it.

    Parameters
    ----------
    optimizer : the optimizer of the recipe.
    """
    wrap = LANE_OPTIMIZERS.get(type(optimizer))
    return optimizer if wrap is None else wrap(optimizer)


@dataclass(frozen=True)
class LaneSgd:
    """SGD in one pass over weights, gradient and velocity.

    Parameters
    ----------
    plain : the optimizer of the recipe.
    """

    plain: Sgd

    @property
    def lr(self) -> float:
        """The learning rate."""
        return self.plain.lr

    def start(self, weights: Tensors) -> Parcel:
        """The optimizer's state before the first step.

        Parameters
        ----------
        weights : the trainable weights, [K, ...].
        """
        return self.plain.start(weights)

    def step(self, weights: Tensors, gradient: Tensors, state: Parcel, active: Tensor) -> None:
        """Update weights and state in place.

        Parameters
        ----------
        weights : the trainable weights, [K, ...].
        gradient : their gradient.
        state : what `start` returned, as the last step left it.
        active : [K]; a device with 0 keeps weights and state bit for bit.
        """
        plain, names = self.plain, sorted(weights)
        block = _Block.of(weights, gradient, active, names, plain.clip_value)
        if block is None:
            plain.step(weights, gradient, state, active)
            return
        on = block.active
        clip = block.clip_factor(plain.clip_norm)
        keep, rate = torch.full_like(on, plain.momentum), torch.full_like(on, -plain.lr)
        decays = (torch.full_like(on, plain.weight_decay), torch.zeros_like(on))
        coefficients = block.repeated(on, keep, clip, rate, *decays)
        at_on, at_keep, at_clip, at_rate, at_decay, at_none = (row.data_ptr() for row in coefficients)
        from ..models.lanes.updates import sgd

        kernel = sgd(block.lanes, block.bits)
        for name, g in zip(names, block.gradients, strict=True):
            w, velocity = weights[name], state["velocity"][name]
            decay = at_decay if plain.decay_vectors or w.dim() > 2 else at_none
            kernel(
                w.data_ptr(), g.data_ptr(), velocity.data_ptr(), at_on, at_keep, at_clip, decay, at_rate, block.wide,
                w.numel(),
            )  # fmt: skip


@dataclass(frozen=True)
class LaneAdam:
    """Adam in one pass over weights, gradient and state.

    Parameters
    ----------
    plain : the optimizer of the recipe.
    """

    plain: Adam

    @property
    def lr(self) -> float:
        """The learning rate."""
        return self.plain.lr

    def start(self, weights: Tensors) -> Parcel:
        """The optimizer's state before the first step.

        Parameters
        ----------
        weights : the trainable weights, [K, ...].
        """
        return self.plain.start(weights)

    def step(self, weights: Tensors, gradient: Tensors, state: Parcel, active: Tensor) -> None:
        """Update weights and state in place.

        Parameters
        ----------
        weights : the trainable weights, [K, ...].
        gradient : their gradient.
        state : what `start` returned, as the last step left it.
        active : [K]; a device with 0 keeps weights and state bit for bit.
        """
        plain, names = self.plain, sorted(weights)
        block = _Block.of(weights, gradient, active, names)
        if block is None:
            plain.step(weights, gradient, state, active)
            return
        steps = state["count"]["steps"].add_(block.active)
        clip = block.clip_factor(plain.clip_norm)
        # by Python, whose powers do not depend on how many devices there are
        unbias = [_unbias(beta, steps) for beta in (plain.beta1, plain.beta2)]
        rows = block.repeated(block.active, clip, *unbias, torch.full_like(clip, -plain.lr))
        addresses = [row.data_ptr() for row in rows]
        from ..models.lanes.updates import adam

        kernel, numbers = adam(block.lanes, block.bits), (plain.beta1, plain.beta2, plain.weight_decay, plain.epsilon)
        for name, g in zip(names, block.gradients, strict=True):
            w, mean, square = weights[name], state["mean"][name], state["square"][name]
            pointers = (tensor.data_ptr() for tensor in (w, g, mean, square))
            kernel(*pointers, *addresses, block.wide, w.numel(), *numbers)


LANE_OPTIMIZERS: dict[type[Any], Callable[[Any], Optimizer]] = {Sgd: LaneSgd, Adam: LaneAdam}


def _unbias(beta: float, steps: Tensor) -> Tensor:
    """1 / (1 - beta ** steps) of each device; 1 before its first step."""
    return steps.new_tensor([1 / (1 - beta**step) if step else 1.0 for step in steps.tolist()])


@dataclass(frozen=True)
class _Block:
    """The gradients of a block as they lie in memory, and the vectors that the kernels use for it."""

    gradients: Sequence[Tensor]
    active: Tensor
    devices: int
    bits: int
    lanes: int

    @classmethod
    def of(
        cls, weights: Tensors, gradient: Tensors, active: Tensor, names: Sequence[str], limit: float | None = None
    ) -> "_Block | None":
        """None if the weights do not lie in memory as the kernels want them."""
        from ..models.lanes.convolution import lane_count

        first = weights[names[0]]
        if first.dtype not in (torch.float32, torch.float64):
            return None
        if any(arrange(weights[name]).data_ptr() != weights[name].data_ptr() for name in names):
            return None
        gradients = [arrange(gradient[name]) for name in names]
        if limit is not None:
            limit = min(limit, torch.finfo(first.dtype).max)  # torch refuses a larger bound
            gradients = [one.clamp(-limit, limit) for one in gradients]
        bits = 32 if first.dtype == torch.float32 else 64
        return cls(gradients, active.to(first), len(first), bits, lane_count(bits))

    @property
    def wide(self) -> int:
        """Numbers after which the devices of vectors repeat."""
        return math.lcm(self.devices, self.lanes)

    def repeated(self, *coefficients: Tensor) -> Tensor:
        """One number per device, repeated to fill whole vectors."""
        return torch.stack(coefficients).repeat(1, self.wide // self.devices)

    def clip_factor(self, limit: float | None) -> Tensor:
        """[K]: what to multiply each device's gradient by, as clip_grad_norm_ does."""
        if limit is None:
            return torch.ones_like(self.active)
        from ..models.lanes.columns import column_sums
        from ..models.lanes.updates import PARTS, sum_squares

        parts, total = self.active.new_zeros(PARTS, self.devices), torch.empty_like(self.active)
        kernel = sum_squares(self.lanes, self.bits)
        for one in self.gradients:
            kernel(one.data_ptr(), parts.data_ptr(), one.numel() // self.devices, self.devices)
        column_sums(self.lanes, self.bits)(parts.data_ptr(), total.data_ptr(), 1, PARTS, self.devices, 1.0)
        return (limit / (total.sqrt() + 1e-6)).clamp_max(1)
