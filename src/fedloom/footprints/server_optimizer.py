"""Server optimizers (FedOpt). Reddi et al., Adaptive Federated Optimization, ICLR 2021, Algorithms 1 and 2.

The change from the global weights to the aggregate is a pseudo-gradient, with which an optimizer takes the server's
step: momentum (FedAvgM, Hsu et al., 2019), FedAdagrad, FedAdam or FedYogi. Whatever aggregates, and whichever entries
its updates cover: entries that are not updated keep weights and moments bit for bit.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from ..registry import Registry
from ..settings import Fraction, Positive
from ..tensors import Parcel, Tensors
from .coverage import Aggregate, ClientUpdate, updated_entries

MOMENTS = "server_optimizer:"
"""The prefix of bundles of moments, which are kept beside a method's own bundles."""


class ServerOptimizer(Protocol):
    """An optimizer of the server: a frozen dataclass of settings. It sees one tensor at a time, in float64.

    Examples
    --------
    >>> @dataclass(frozen=True)
    ... class SignStep:
    ...     lr: float = 0.01
    ...
    ...     def start(self, weight: Tensor) -> dict[str, Tensor]:
    ...         return {}
    ...
    ...     def move(self, change: Tensor, moments: Tensors) -> tuple[Tensor, Tensors]:
    ...         return self.lr * change.sign(), {}
    """

    def start(self, weight: Tensor) -> Tensors:
        """The moments before the first step, in the shape of the weight.

        Parameters
        ----------
        weight : a tensor of the global weights.
        """
        ...

    def move(self, change: Tensor, moments: Tensors) -> tuple[Tensor, Tensors]:
        """By how much a tensor moves, and its next moments.

        Parameters
        ----------
        change : from the old weights to the aggregate, the pseudo-gradient.
        moments : as the last step left them.
        """
        ...


@dataclass(frozen=True)
class FedAvgM(ServerOptimizer):
    """FedAvgM: gradient descent with momentum. With a momentum of 0 and a rate of 1 it is the average, bit for bit.

    Parameters
    ----------
    lr : the server's learning rate.
    momentum : the factor of the velocity that is kept from round to round.
    """

    lr: Positive = 1.0
    momentum: Fraction = 0.9

    def start(self, weight: Tensor) -> Tensors:
        return {"velocity": torch.zeros_like(weight)}

    def move(self, change: Tensor, moments: Tensors) -> tuple[Tensor, Tensors]:
        velocity = self.momentum * moments["velocity"] + change
        return self.lr * velocity, {"velocity": velocity}


@dataclass(frozen=True)
class FedAdagrad(ServerOptimizer):
    """FedAdagrad: a rate for each entry, which falls with the sum of its squared changes.

    Parameters
    ----------
    lr : the server's learning rate.
    beta1 : the decay of the running mean of changes; 0 in the paper's experiments.
    tau : added to the denominator, the degree of adaptivity; the mean of squares starts at its square.
    """

    lr: Positive = 0.01
    beta1: Fraction = 0.0
    tau: Positive = 1e-3

    def start(self, weight: Tensor) -> Tensors:
        return _first_moments(weight, self.tau)

    def move(self, change: Tensor, moments: Tensors) -> tuple[Tensor, Tensors]:
        square = moments["square"] + change.square()
        return _adaptive_step(self.lr, self.beta1, self.tau, change, moments, square)


@dataclass(frozen=True)
class FedAdam(ServerOptimizer):
    """FedAdam: running means of changes and of their squares, without a correction of their bias, as published.

    Flower's FedAdam corrects the bias and starts the mean of squares at 0.

    Parameters
    ----------
    lr : the server's learning rate.
    beta1 : the decay of the running mean of changes.
    beta2 : the decay of the running mean of squared changes.
    tau : added to the denominator, the degree of adaptivity; the mean of squares starts at its square.
    """

    lr: Positive = 0.01
    beta1: Fraction = 0.9
    beta2: Fraction = 0.99
    tau: Positive = 1e-3

    def start(self, weight: Tensor) -> Tensors:
        return _first_moments(weight, self.tau)

    def move(self, change: Tensor, moments: Tensors) -> tuple[Tensor, Tensors]:
        square = self.beta2 * moments["square"] + (1 - self.beta2) * change.square()
        return _adaptive_step(self.lr, self.beta1, self.tau, change, moments, square)


@dataclass(frozen=True)
class FedYogi(FedAdam):
    """FedYogi: FedAdam whose mean of squares moves by the squared change alone, so that it cannot fall quickly."""

    def move(self, change: Tensor, moments: Tensors) -> tuple[Tensor, Tensors]:
        squared, before = change.square(), moments["square"]
        square = before - (1 - self.beta2) * squared * (before - squared).sign()
        return _adaptive_step(self.lr, self.beta1, self.tau, change, moments, square)


SERVER_OPTIMIZERS: Registry[Callable[..., ServerOptimizer]] = Registry(
    "server_optimizers", {"momentum": FedAvgM, "adagrad": FedAdagrad, "adam": FedAdam, "yogi": FedYogi}
)


def _first_moments(weight: Tensor, tau: float) -> Tensors:
    """The algorithm asks for a mean of squares of at least tau²."""
    return {"mean": torch.zeros_like(weight), "square": torch.full_like(weight, tau**2)}


def _adaptive_step(
    lr: float, beta1: float, tau: float, change: Tensor, moments: Tensors, square: Tensor
) -> tuple[Tensor, Tensors]:
    mean = beta1 * moments["mean"] + (1 - beta1) * change
    return lr * mean / (square.sqrt() + tau), {"mean": mean, "square": square}


@dataclass(frozen=True)
class ServerStep:
    """The `Aggregate` of one round with a server optimizer: it aggregates, then takes the optimizer's step.

    Parameters
    ----------
    optimizer : the optimizer.
    aggregate : makes the average that the pseudo-gradient leads to.
    server : the method's state before the round: a bundle that is aggregated is found in it, and has its own moments.
    moments : bundles of moments before the round; as the round goes, those after it.
    """

    optimizer: ServerOptimizer
    aggregate: Aggregate
    server: Parcel
    moments: dict[str, Tensors] = field(default_factory=dict)

    def __call__(self, weights: Tensors, updates: Iterable[ClientUpdate]) -> dict[str, Tensor]:
        updates, bundle = list(updates), self._bundle(weights)
        aggregate = self.aggregate(weights, updates)
        updated = updated_entries(self.aggregate, weights, updates)
        result: dict[str, Tensor] = {}
        moments: dict[str, dict[str, Tensor]] = {}
        for name, old in weights.items():
            before = self._moments(bundle, name, old)
            result[name], after = self._step(old, aggregate[name], updated[name], before)
            for kind, tensor in after.items():
                moments.setdefault(f"{MOMENTS}{kind}:{bundle}", {})[name] = tensor
        self.moments.update(moments)
        return result

    def updated_entries(self, weights: Tensors, updates: list[ClientUpdate]) -> dict[str, Tensor]:
        """What the wrapped aggregation updates.

        Parameters
        ----------
        weights : the global weights.
        updates : what devices returned.
        """
        return updated_entries(self.aggregate, weights, updates)

    def _bundle(self, weights: Tensors) -> str:
        """The name of the bundle that is aggregated, by which its moments are found in the next round."""
        for name, tensors in self.server.items():
            if tensors is weights:
                return name
        raise ValueError(
            "a server optimizer keeps moments of what a method aggregates, which must be a bundle of its server state: "
            'context.aggregate(server["weights"], updates)'
        )

    def _moments(self, bundle: str, name: str, old: Tensor) -> Tensors:
        start = self.optimizer.start(old)
        return {kind: self.moments.get(f"{MOMENTS}{kind}:{bundle}", {}).get(name, one) for kind, one in start.items()}

    def _step(
        self, old: Tensor, aggregate: Tensor, updated: Tensor, before: Tensors
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        if not bool(updated.any()):
            return aggregate, before
        change = aggregate.double() - old.double()
        step, after = self.optimizer.move(change, {kind: one.double() for kind, one in before.items()})
        # where the step is the change itself the result is the aggregate, with no rounding in between
        result = torch.where(updated & (step != change), (old.double() + step).to(old.dtype), aggregate)
        kept = {kind: torch.where(updated, after[kind].to(one.dtype), one) for kind, one in before.items()}
        return result, kept


def split_moments(server: Parcel) -> tuple[Parcel, dict[str, Tensors]]:
    """A method's own server state, and the bundles of moments that a server optimizer keeps beside it.

    Parameters
    ----------
    server : the server state of a run.
    """
    moments = {name: tensors for name, tensors in server.items() if name.startswith(MOMENTS)}
    return ({name: one for name, one in server.items() if name not in moments} if moments else server), moments
