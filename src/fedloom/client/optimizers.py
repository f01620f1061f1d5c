"""SGD and Adam for a block of devices: the same as torch's, with clipping and step counts for each device on its own.

`step` updates weights and state in place. A device whose `active` is 0 keeps both bit for bit, whatever its gradient.
Devices of experiments that differ only in numbers, such as the learning rate, share a block, each with its own.
Learning-rate schedules are factors by round.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, ClassVar, Protocol

import torch
from torch import Tensor

from ..registry import Registry
from ..settings import Count, Fraction, Natural, NonNegative, Positive, SearchRange, Share
from ..tensors import Parcel, Tensors, combine, per_device


class Optimizer(Protocol):
    """An optimizer for a block of devices. It is a frozen dataclass with a field `lr`, which schedules replace.

    Its attribute `per_device`, if it has one, names fields that may be a number for each device, [K], instead of one
    for all, so that experiments that differ only in these can share a block.
    """

    @property
    def lr(self) -> float:
        """The learning rate."""
        ...

    def start(self, weights: Tensors) -> Parcel:
        """The optimizer's state before the first step.

        Parameters
        ----------
        weights : the trainable weights, [K, ...].
        """
        ...

    def step(self, weights: Tensors, gradient: Tensors, state: Parcel, active: Tensor) -> None:
        """Update weights and state in place.

        Parameters
        ----------
        weights : the trainable weights, [K, ...].
        gradient : their gradient.
        state : what `start` returned, as the last step left it.
        active : [K]; a device with 0 keeps weights and state bit for bit.
        """
        ...


@dataclass(frozen=True)
class Sgd(Optimizer):
    """Stochastic gradient descent, as torch.optim.SGD; gradients are clipped for each device on its own.

    Parameters
    ----------
    lr : the learning rate.
    momentum : the factor of the velocity that is kept in each step; 0: no momentum.
    weight_decay : the weight of the L2 penalty.
    clip_norm : the largest L2 norm of a device's gradient, as in clip_grad_norm_; None: not clipped.
    clip_value : the largest magnitude of its entries, as in clip_grad_value_, before the norm; None: not clipped.
    decay_vectors : whether weight decay applies to biases and normalization layers too.
    """

    per_device: ClassVar[tuple[str, ...]] = ("lr", "momentum", "weight_decay", "clip_norm")

    lr: Annotated[Positive, SearchRange(0.01, 1.0, log=True)] = 0.1
    momentum: Annotated[Fraction, SearchRange(0.0, 0.95)] = 0.0
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
        torch._foreach_mul_(v, _for_each(1 - active * _coefficient(1 - self.momentum, active), v))
        torch._foreach_addcmul_(v, g, _for_each(active * clip, g))
        if _is_used(self.weight_decay):
            decayed = [n for n, tensor in enumerate(w) if self.decay_vectors or tensor.dim() > 2]  # [K, ...]
            vs, ws = [v[n] for n in decayed], [w[n] for n in decayed]
            torch._foreach_addcmul_(vs, ws, _for_each(active * _coefficient(self.weight_decay, active), ws))
        torch._foreach_addcmul_(w, v, _for_each(active * _coefficient(-self.lr, active), v))


@dataclass(frozen=True)
class Adam(Optimizer):
    """Adam, as torch.optim.Adam; gradients are clipped for each device on its own.

    Parameters
    ----------
    lr : the learning rate.
    beta1 : the decay of the running mean of gradients.
    beta2 : the decay of the running mean of squared gradients.
    epsilon : added to the denominator, so that it is never zero.
    weight_decay : the weight of the L2 penalty.
    clip_norm : the largest L2 norm of a device's gradient, as in clip_grad_norm_; None: not clipped.
    """

    per_device: ClassVar[tuple[str, ...]] = ("lr", "weight_decay", "clip_norm")

    lr: Annotated[Positive, SearchRange(0.0001, 0.03, log=True)] = 0.001
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
            g = g * per_device(clip, g) + _coefficient(self.weight_decay, w) * w
            on = per_device(active, w)
            mean.lerp_(g, (1 - self.beta1) * on.expand_as(mean))
            square.lerp_(g.square(), (1 - self.beta2) * on.expand_as(square))
            unbiased = mean / per_device(_zero_to_one(1 - self.beta1**steps), w)
            root = (square / per_device(_zero_to_one(1 - self.beta2**steps), w)).sqrt() + self.epsilon
            w.sub_(_coefficient(self.lr, w) * on * torch.where(on > 0, unbiased / root, 0))


OPTIMIZERS: Registry[Callable[..., Optimizer]] = Registry("optimizers", {"sgd": Sgd, "adam": Adam})


def _mask_inactive(gradients: list[Tensor], active: Tensor) -> list[Tensor]:
    if active.is_cpu and bool(active.all()):  # elsewhere the CPU would have to wait for the answer
        return gradients
    return [torch.where(per_device(active, g) > 0, g, 0) for g in gradients]  # where, since 0 * nan is nan


def _clip_values(gradients: list[Tensor], limit: float | None) -> list[Tensor]:
    if limit is None:
        return gradients
    limit = min(limit, torch.finfo(gradients[0].dtype).max)  # torch refuses a larger bound
    return [g.clamp(-limit, limit) for g in gradients]


def _clip_factor(gradients: Sequence[Tensor], limit: float | Tensor | None) -> Tensor:
    """[K]: what to multiply each device's gradient by, as clip_grad_norm_ does."""
    if limit is None:
        return gradients[0].new_ones(len(gradients[0]))
    each = torch.stack([torch.linalg.vector_norm(g.reshape(len(g), -1), dim=1) for g in gradients])
    norms: Tensor = torch.linalg.vector_norm(each, dim=0)
    # torch divides a number by a tensor in this way; dividing tensors rounds differently
    return ((norms + 1e-6).reciprocal() * _coefficient(limit, norms)).clamp_max(1)


def _coefficient(number: float | Tensor, tensor: Tensor) -> float | Tensor:
    """A number for all devices, or one for each, [K], to multiply a tensor [K, ...] by."""
    return per_device(number.to(tensor), tensor) if isinstance(number, Tensor) else number


def _is_used(number: float | Tensor) -> bool:
    """False for 0. Numbers per device are all used: `joining_key` keeps zeros apart."""
    return isinstance(number, Tensor) or bool(number)


def _for_each(numbers: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    return [per_device(numbers, tensor) for tensor in tensors]


def _zero_to_one(correction: Tensor) -> Tensor:
    """Avoids 0 / 0 on devices that have not made a step yet."""
    return torch.where(correction == 0, torch.ones_like(correction), correction)


class UnequalNumbersError(ValueError):
    """A task reads a setting of the optimizer as one number, but the devices of its block have different ones.

    The engine then runs devices of equal optimizers apart, which takes longer.
    """


@dataclass(frozen=True, eq=False)
class JoinedOptimizer:
    """The optimizer of a block whose devices have different learning rates or other numbers.

    Parameters
    ----------
    optimizer : one with numbers [K] where devices differ.
    learning_rates : the learning rate of each device, [K].
    rates : the same, known without reading a tensor.
    """

    optimizer: Optimizer
    learning_rates: Tensor
    rates: tuple[float, ...]

    @property
    def lr(self) -> float:
        """The learning rate, if all devices have the same."""
        if len(set(self.rates)) == 1:
            return self.rates[0]
        raise UnequalNumbersError(
            "the devices of this block have different learning rates: use client.learning_rates, [K], instead of "
            "client.optimizer.lr"
        )

    @property
    def start(self) -> Callable[[Tensors], Parcel]:
        """That of the optimizer."""
        return self.optimizer.start

    @property
    def step(self) -> Callable[[Tensors, Tensors, Parcel, Tensor], None]:
        """That of the optimizer."""
        return self.optimizer.step


def joining_key(optimizer: Optimizer) -> Hashable:
    """Optimizers of equal key can be joined: they are equal but for numbers that may differ between devices.

    Parameters
    ----------
    optimizer : the optimizer.
    """
    numbers = getattr(optimizer, "per_device", ())
    values = {field.name: getattr(optimizer, field.name) for field in fields(optimizer)}  # type: ignore[arg-type]
    # what is 0 or None is not computed at all, so it differs from any other number
    return type(optimizer), tuple((name, bool(own) if name in numbers else own) for name, own in values.items())


def join_optimizers(optimizers: Sequence[Optimizer]) -> Optimizer:
    """The optimizer of a block. If all devices have the same, it is that one.

    Parameters
    ----------
    optimizers : the optimizer of each device, of one `joining_key`.
    """
    first = optimizers[0]
    if all(one == first for one in optimizers):
        return first
    columns = {name: [getattr(one, name) for one in optimizers] for name in first.per_device}  # type: ignore[attr-defined]
    unequal = {name: torch.tensor(own, dtype=torch.float64) for name, own in columns.items() if len(set(own)) > 1}
    rates = tuple(one.lr for one in optimizers)
    joined: Optimizer = replace(first, **unequal)  # type: ignore[type-var]
    return JoinedOptimizer(joined, torch.tensor(rates, dtype=torch.float64), rates)


class LRSchedule(Protocol):
    """A factor on the optimizer's learning rate, by round.

    `fedloom tune` tries a schedule whose attribute `searchable` is true; if it has a setting `rounds`, with the
    recipe's rounds.
    """

    def factor(self, round_number: int) -> float: ...


@dataclass(frozen=True)
class Constant:
    """The same learning rate in every round."""

    searchable: ClassVar[bool] = True

    def factor(self, round_number: int) -> float:
        """The factor on the learning rate: 1.

        Parameters
        ----------
        round_number : the round, from 1.
        """
        return 1.0


@dataclass(frozen=True)
class Milestones:
    """Step decay: the learning rate is multiplied by a factor after each of some rounds.

    Parameters
    ----------
    rounds : these rounds, counted from 1.
    factor_each : the factor.
    """

    rounds: tuple[Natural, ...] = ()
    factor_each: Positive = 0.1

    def factor(self, round_number: int) -> float:
        """The factor on the learning rate.

        Parameters
        ----------
        round_number : the round, from 1.
        """
        passed = sum(round_number > milestone for milestone in self.rounds)
        try:
            return self.factor_each**passed
        except OverflowError:
            return math.inf


@dataclass(frozen=True)
class Cosine:
    """Cosine annealing to 0, after an optional linear warm-up (FedSup).

    Parameters
    ----------
    rounds : the number of rounds until 0 is reached.
    warmup : the number of rounds of the warm-up; 0: none.
    first : the factor in round 1, if there is a warm-up.
    """

    searchable: ClassVar[bool] = True

    rounds: Count
    warmup: Natural = 0
    first: Share = 0.001

    def factor(self, round_number: int) -> float:
        """The factor on the learning rate.

        Parameters
        ----------
        round_number : the round, from 1.
        """
        past = min(round_number - 1, self.rounds)
        risen = past / self.warmup if past < self.warmup else 1.0
        return (self.first * (1 - risen) + risen) * 0.5 * (1 + math.cos(math.pi * past / self.rounds))


LR_SCHEDULES: Registry[Callable[..., LRSchedule]] = Registry(
    "lr_schedules", {"constant": Constant, "milestones": Milestones, "cosine": Cosine}
)


def optimizer_at(optimizer: Optimizer, lr_schedule: LRSchedule, round_number: int) -> Optimizer:
    """The optimizer with its learning rate of one round.

    Parameters
    ----------
    optimizer : the optimizer of the recipe.
    lr_schedule : the schedule of its learning rate.
    round_number : the round, from 1.
    """
    lr = optimizer.lr * lr_schedule.factor(round_number)
    return replace(optimizer, lr=lr)  # type: ignore[type-var]
