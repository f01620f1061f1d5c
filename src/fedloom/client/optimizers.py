"""SGD and Adam for a block of devices: the same as torch's, with clipping and step counts for each device on its own.

`step` updates weights and state in place. A device whose `active` is 0 keeps both bit for bit, whatever its gradient.
Learning-rate schedules are factors by round.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from ..settings import Count, Fraction, Natural, NonNegative, Positive, Share
from ..tensors import Parcel, Tensors, combine, per_device


class Optimizer(Protocol):
    @property
    def learning_rate(self) -> float: ...
    def start(self, weights: Tensors) -> Parcel: ...
    def step(self, weights: Tensors, gradient: Tensors, state: Parcel, active: Tensor) -> None: ...


@dataclass(frozen=True)
class Sgd:
    """torch.optim.SGD after clip_grad_value_ and clip_grad_norm_.

    `decay_vectors`: apply weight decay to biases and normalization layers too.
    """

    learning_rate: Positive = 0.1
    momentum: Fraction = 0.0
    weight_decay: NonNegative = 0.0
    clip_norm: Positive | None = None
    clip_value: Positive | None = None
    decay_vectors: bool = True

    def start(self, weights: Tensors) -> Parcel:
        return {"velocity": combine(torch.zeros_like, weights)}

    def step(self, weights: Tensors, gradient: Tensors, state: Parcel, active: Tensor) -> None:
        names = sorted(weights)  # so that a norm does not depend on the order of layers
        w, v = [weights[name] for name in names], [state["velocity"][name] for name in names]
        active = active.to(w[0])
        g = _clip_values(_mask_inactive([gradient[name] for name in names], active), self.clip_value)
        clip = _clip_factor(g, self.clip_norm)
        torch._foreach_mul_(v, _for_each(1 - active * (1 - self.momentum), v))
        torch._foreach_addcmul_(v, g, _for_each(active * clip, g))
        if self.weight_decay:
            decayed = [n for n, tensor in enumerate(w) if self.decay_vectors or tensor.dim() > 2]  # [K, ...]
            vs, ws = [v[n] for n in decayed], [w[n] for n in decayed]
            torch._foreach_addcmul_(vs, ws, _for_each(active * self.weight_decay, ws))
        torch._foreach_addcmul_(w, v, _for_each(active * -self.learning_rate, v))


@dataclass(frozen=True)
class Adam:
    """torch.optim.Adam after clip_grad_norm_."""

    learning_rate: Positive = 0.001
    beta1: Fraction = 0.9
    beta2: Fraction = 0.999
    epsilon: Positive = 1e-8
    weight_decay: NonNegative = 0.0
    clip_norm: Positive | None = None

    def start(self, weights: Tensors) -> Parcel:
        first = next(iter(weights.values()))
        return {
            "mean": combine(torch.zeros_like, weights),
            "square": combine(torch.zeros_like, weights),
            "count": {"steps": first.new_zeros(len(first))},
        }

    def step(self, weights: Tensors, gradient: Tensors, state: Parcel, active: Tensor) -> None:
        names = sorted(weights)
        active = active.to(weights[names[0]])
        steps = state["count"]["steps"].add_(active)
        gradients = _mask_inactive([gradient[name] for name in names], active)
        clip = _clip_factor(gradients, self.clip_norm)
        for name, g in zip(names, gradients, strict=True):
            w, mean, square = weights[name], state["mean"][name], state["square"][name]
            g = g * per_device(clip, g) + self.weight_decay * w
            on = per_device(active, w)
            mean.lerp_(g, (1 - self.beta1) * on.expand_as(mean))
            square.lerp_(g.square(), (1 - self.beta2) * on.expand_as(square))
            unbiased = mean / per_device(_zero_to_one(1 - self.beta1**steps), w)
            root = (square / per_device(_zero_to_one(1 - self.beta2**steps), w)).sqrt() + self.epsilon
            w.sub_(self.learning_rate * on * torch.where(on > 0, unbiased / root, 0))


OPTIMIZERS: dict[str, type[Sgd] | type[Adam]] = {"sgd": Sgd, "adam": Adam}


def _mask_inactive(gradients: list[Tensor], active: Tensor) -> list[Tensor]:
    if bool(active.all()):
        return gradients
    return [torch.where(per_device(active, g) > 0, g, 0) for g in gradients]  # where, since 0 * nan is nan


def _clip_values(gradients: list[Tensor], limit: float | None) -> list[Tensor]:
    return gradients if limit is None else [g.clamp(-limit, limit) for g in gradients]


def _clip_factor(gradients: Sequence[Tensor], limit: float | None) -> Tensor:
    """[K]: what to multiply each device's gradient by, as clip_grad_norm_ does."""
    if limit is None:
        return gradients[0].new_ones(len(gradients[0]))
    each = torch.stack([torch.linalg.vector_norm(g.reshape(len(g), -1), dim=1) for g in gradients])
    norms: Tensor = torch.linalg.vector_norm(each, dim=0)
    return (limit / (norms + 1e-6)).clamp_max(1)


def _for_each(numbers: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    return [per_device(numbers, tensor) for tensor in tensors]


def _zero_to_one(correction: Tensor) -> Tensor:
    """Avoids 0 / 0 on devices that have not made a step yet."""
    return torch.where(correction == 0, torch.ones_like(correction), correction)


class LRSchedule(Protocol):
    """A factor on the optimizer's learning rate, by round."""

    def factor(self, round_number: int) -> float: ...


@dataclass(frozen=True)
class Constant:
    def factor(self, round_number: int) -> float:
        return 1.0


@dataclass(frozen=True)
class Milestones:
    """Multiply by `factor_each` after each of these rounds; rounds count from 1."""

    rounds: tuple[Natural, ...] = ()
    factor_each: Positive = 0.1

    def factor(self, round_number: int) -> float:
        return self.factor_each ** sum(round_number > milestone for milestone in self.rounds)


@dataclass(frozen=True)
class Cosine:
    """Cosine annealing to 0 over `rounds`, after a linear warm-up from `first` over `warmup` rounds (FedSup)."""

    rounds: Count
    warmup: Natural = 0
    first: Share = 0.001  # the factor in round 1, if there is a warm-up

    def factor(self, round_number: int) -> float:
        past = min(round_number - 1, self.rounds)
        risen = past / self.warmup if past < self.warmup else 1.0
        return (self.first * (1 - risen) + risen) * 0.5 * (1 + math.cos(math.pi * past / self.rounds))


LR_SCHEDULES: dict[str, type[Constant] | type[Milestones] | type[Cosine]] = {
    "constant": Constant,
    "milestones": Milestones,
    "cosine": Cosine,
}


def optimizer_at(optimizer: Optimizer, lr_schedule: LRSchedule, round_number: int) -> Optimizer:
    """The optimizer with its learning rate of one round."""
    learning_rate = optimizer.learning_rate * lr_schedule.factor(round_number)
    return replace(optimizer, learning_rate=learning_rate)  # type: ignore[type-var]
