"""Learning-rate schedules: a factor on the optimizer's learning rate, by round."""

import math
from dataclasses import dataclass, replace
from typing import Protocol

from ..settings import Count, Natural, Positive, Share
from .optimizers import Optimizer


class LRSchedule(Protocol):
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
