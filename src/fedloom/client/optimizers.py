"""Optimizers with one coefficient per device: clipping, freezing and learning rate are one path.

They change `fit`'s own copy of the weights in place. A device whose `working` is 0 keeps weights and state to the
bit, whatever its gradient.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from ..settings import Count, Fraction, Natural, NotNegative, Positive, Share
from ..tensors import Parcel, Tensors, combine, per_device


class Optimizer(Protocol):
    @property
    def learning_rate(self) -> float: ...
    def start(self, weights: Tensors) -> Parcel: ...
    def step(self, weights: Tensors, gradient: Tensors, state: Parcel, working: Tensor) -> None: ...


@dataclass(frozen=True)
class Sgd:
    """torch.optim.SGD after clip_grad_value_ and clip_grad_norm_, for each device on its own. `decay_vectors`: whether
    weight decay acts on biases and normalizations too."""

    learning_rate: Positive = 0.1
    momentum: Fraction = 0.0
    weight_decay: NotNegative = 0.0
    clip_norm: Positive | None = None
    clip_value: Positive | None = None
    decay_vectors: bool = True

    def start(self, weights: Tensors) -> Parcel:
        return {"velocity": combine(torch.zeros_like, weights)}

    def step(self, weights: Tensors, gradient: Tensors, state: Parcel, working: Tensor) -> None:
        names = sorted(weights)  # so that a norm does not depend on the order of layers
        w, v = [weights[name] for name in names], [state["velocity"][name] for name in names]
        working = working.to(w[0])
        g = _clipped(_of_working([gradient[name] for name in names], working), self.clip_value)
        clip = _clip_factor(g, self.clip_norm)
        torch._foreach_mul_(v, _beside(1 - working * (1 - self.momentum), v))
        torch._foreach_addcmul_(v, g, _beside(working * clip, g))
        if self.weight_decay:
            decayed = [n for n, tensor in enumerate(w) if self.decay_vectors or tensor.dim() > 2]  # [K, ...]
            vs, ws = [v[n] for n in decayed], [w[n] for n in decayed]
            torch._foreach_addcmul_(vs, ws, _beside(working * self.weight_decay, ws))
        torch._foreach_addcmul_(w, v, _beside(working * -self.learning_rate, v))


@dataclass(frozen=True)
class Adam:
    """torch.optim.Adam after clip_grad_norm_, for each device on its own."""

    learning_rate: Positive = 0.001
    beta1: Fraction = 0.9
    beta2: Fraction = 0.999
    epsilon: Positive = 1e-8
    weight_decay: NotNegative = 0.0
    clip_norm: Positive | None = None

    def start(self, weights: Tensors) -> Parcel:
        first = next(iter(weights.values()))
        return {
            "mean": combine(torch.zeros_like, weights),
            "square": combine(torch.zeros_like, weights),
            "count": {"steps": first.new_zeros(len(first))},
        }

    def step(self, weights: Tensors, gradient: Tensors, state: Parcel, working: Tensor) -> None:
        names = sorted(weights)
        working = working.to(weights[names[0]])
        steps = state["count"]["steps"].add_(working)
        g = _of_working([gradient[name] for name in names], working)
        clip = _clip_factor(g, self.clip_norm)
        for name, slope in zip(names, g, strict=True):
            w, mean, square = weights[name], state["mean"][name], state["square"][name]
            slope = slope * per_device(clip, slope) + self.weight_decay * w
            on = per_device(working, w)
            mean.lerp_(slope, (1 - self.beta1) * on.expand_as(mean))
            square.lerp_(slope.square(), (1 - self.beta2) * on.expand_as(square))
            unbiased = mean / per_device(_at_least_one(1 - self.beta1**steps), w)
            root = (square / per_device(_at_least_one(1 - self.beta2**steps), w)).sqrt() + self.epsilon
            w.sub_(self.learning_rate * on * torch.where(on > 0, unbiased / root, 0))


OPTIMIZERS: dict[str, type[Sgd] | type[Adam]] = {"sgd": Sgd, "adam": Adam}


class LRSchedule(Protocol):
    """How the learning rate moves from round to round."""

    def factor(self, round_number: int) -> float: ...


@dataclass(frozen=True)
class Constant:
    def factor(self, round_number: int) -> float:
        return 1.0


@dataclass(frozen=True)
class Milestones:
    """Multiply by `factor_each` once each of these rounds is over; rounds count from 1."""

    rounds: tuple[Natural, ...] = ()
    factor_each: Positive = 0.1

    def factor(self, round_number: int) -> float:
        return self.factor_each ** sum(round_number > milestone for milestone in self.rounds)


@dataclass(frozen=True)
class Cosine:
    """Half a cosine down to nothing over `rounds`, after a linear rise through the first `warmup` of them (FedSup)."""

    rounds: Count
    warmup: Natural = 0
    first: Share = 0.001  # the factor of the very first round, where there is a warm-up

    def factor(self, round_number: int) -> float:
        past = min(round_number - 1, self.rounds)
        risen = past / self.warmup if past < self.warmup else 1.0
        return (self.first * (1 - risen) + risen) * 0.5 * (1 + math.cos(math.pi * past / self.rounds))


LR_SCHEDULES: dict[str, type[Constant] | type[Milestones] | type[Cosine]] = {
    "constant": Constant,
    "milestones": Milestones,
    "cosine": Cosine,
}


def at_round(optimizer: Optimizer, rates: LRSchedule, round_number: int) -> Optimizer:
    """The optimizer as it is in one round."""
    return replace(optimizer, learning_rate=optimizer.learning_rate * rates.factor(round_number))  # type: ignore[type-var]


def _of_working(gradients: list[Tensor], working: Tensor) -> list[Tensor]:
    if bool(working.all()):
        return gradients
    return [torch.where(per_device(working, slope) > 0, slope, 0) for slope in gradients]  # 0 * nan is nan


def _clipped(gradients: list[Tensor], limit: float | None) -> list[Tensor]:
    return gradients if limit is None else [slope.clamp(-limit, limit) for slope in gradients]


def _clip_factor(gradients: Sequence[Tensor], limit: float | None) -> Tensor:
    """What to multiply each device's gradient by: torch's own formula, device by device."""
    if limit is None:
        return gradients[0].new_ones(len(gradients[0]))
    each = torch.stack([torch.linalg.vector_norm(slope.reshape(len(slope), -1), dim=1) for slope in gradients])
    norms: Tensor = torch.linalg.vector_norm(each, dim=0)
    return (limit / (norms + 1e-6)).clamp_max(1)


def _beside(numbers: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    return [per_device(numbers, tensor) for tensor in tensors]


def _at_least_one(correction: Tensor) -> Tensor:
    return torch.where(correction == 0, torch.ones_like(correction), correction)
