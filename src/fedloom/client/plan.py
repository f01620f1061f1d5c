"""Training plans: which examples form which batch, drawn before training starts.

A plan depends only on the seed, the round, the task and the device, so it is the same on every engine and in every
block.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from ..data import Examples, Preparation
from ..models import StepSeeds
from ..settings import Count
from ..tensors import Tensors, combine, per_device


@dataclass(frozen=True)
class Schedule:
    """How long devices train in a round.

    Parameters
    ----------
    batch_size : the batch size.
    epochs : the number of passes over the device's examples.
    last : what happens to an incomplete last batch: it is used as it is ("keep"), left out ("drop"), or filled up with
        examples of the same epoch ("wrap").
    """

    batch_size: Count = 10
    epochs: Count = 1
    last: Literal["keep", "drop", "wrap"] = "keep"


@dataclass(frozen=True)
class Step:
    """One training step of a block of devices.

    Parameters
    ----------
    rows : row numbers in the store of examples, [K, batch].
    active : [K], 1 while a device has steps left, then 0.
    augmentation : random numbers for the preparation, [K, batch, ...].
    step_seeds : the seeds of the model's random layers.
    positions : the rows as positions in the device's own list of examples, [K, batch].
    number : the number of the step, from 0.
    epoch : the epoch of each device, [K].
    is_active, epochs : the same as `active` and `epoch`, known without reading tensors, which may be on an accelerator.
    """

    rows: Tensor
    active: Tensor
    augmentation: Tensors
    step_seeds: StepSeeds
    positions: Tensor | None = None
    number: int = 0
    epoch: Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.int64))
    is_active: tuple[bool, ...] = ()
    epochs: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.is_active:
            object.__setattr__(self, "is_active", tuple((self.active > 0).tolist()))
        if not self.epochs:
            object.__setattr__(self, "epochs", tuple(self.epoch.expand(len(self.is_active)).tolist()))


@dataclass(frozen=True)
class DevicePlan:
    """The training steps of one device; a visit is one use of an example.

    Parameters
    ----------
    rows : row numbers in the store of examples, [visits].
    positions : the rows as positions in the device's own list of examples, [visits].
    augmentation : random numbers for the preparation, [visits, ...].
    sizes : the batch size of each step.
    seed : the seed of the model's random layers.
    shared_seed : the same for all devices of one request.
    ragged : whether batch sizes differ, so that only plans with the same sizes can share a block.
    steps_per_epoch : the number of steps of an epoch.
    """

    rows: Tensor
    positions: Tensor
    augmentation: Tensors
    sizes: tuple[int, ...]
    seed: int
    shared_seed: int
    ragged: bool
    steps_per_epoch: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Plans of one shape can share a block."""
        return self.sizes if self.ragged else self.sizes[:1]


def draw_plan(
    rows: Tensor,
    schedule: Schedule,
    examples: Examples,
    preparation: Preparation,
    draw: np.random.Generator,
    shared_seed: int = 0,
) -> DevicePlan:
    """Draw the training plan of a device.

    Parameters
    ----------
    rows : the device's row numbers in the store of examples.
    schedule : batch size and epochs.
    examples : the store of examples.
    preparation : draws the augmentation.
    draw : the source of randomness.
    shared_seed : a seed that is the same for all devices of one request.
    """
    sizes = _epoch_sizes(len(rows), schedule)
    order = [np.resize(draw.permutation(len(rows)), sum(sizes)) for _ in range(schedule.epochs)]
    positions = torch.from_numpy(np.concatenate(order))
    return DevicePlan(
        rows=rows[positions],
        positions=positions,
        augmentation=preparation.draw_augmentation(draw, len(positions), *examples.x.shape[1:]),
        sizes=sizes * schedule.epochs,
        seed=int(draw.integers(2**62)),
        shared_seed=shared_seed,
        ragged=schedule.last == "keep",
        steps_per_epoch=len(sizes),
    )


def _epoch_sizes(examples: int, schedule: Schedule) -> tuple[int, ...]:
    size = schedule.batch_size
    full, rest = divmod(examples, size)
    if rest == 0 or (schedule.last == "drop" and full > 0):
        return (size,) * full
    return (size,) * full + (size if schedule.last == "wrap" else rest,)


def merge_plans(plans: Sequence[DevicePlan]) -> tuple[Step, ...]:
    """The steps of a block. A device that has finished is inactive and sees its own examples again.

    Parameters
    ----------
    plans : the plan of each device.
    """
    longest = max(plans, key=lambda plan: len(plan.sizes))
    steps, start = [], 0
    for number, size in enumerate(longest.sizes):
        visits = [torch.arange(start, start + size) % len(plan.rows) for plan in plans]
        pairs = list(zip(plans, visits, strict=True))
        is_active = tuple(number < len(plan.sizes) for plan in plans)
        epochs = tuple(number // plan.steps_per_epoch for plan in plans)
        steps.append(
            Step(
                rows=torch.stack([plan.rows[indices] for plan, indices in pairs]),
                positions=torch.stack([plan.positions[indices] for plan, indices in pairs]),
                active=torch.tensor(is_active, dtype=torch.float32),
                augmentation={
                    name: torch.stack([plan.augmentation[name][indices] for plan, indices in pairs])
                    for name in longest.augmentation
                },
                step_seeds=StepSeeds(
                    tuple((plan.seed + number) % 2**62 for plan in plans), (plans[0].shared_seed + number) % 2**62
                ),
                number=number,
                epoch=torch.tensor(epochs),
                is_active=is_active,
                epochs=epochs,
            )
        )
        start += size
    return tuple(steps)


def group_steps(plan: Sequence[Step], size: int) -> Iterator[tuple[Step, ...]]:
    """Groups of `size` steps. If a device has too few steps left, the group's first one is repeated for it."""
    for start in range(0, len(plan), size):
        first, *others = plan[start : start + size]
        group = [_replace_inactive(first, other) for other in others]
        yield (first, *group, *[first] * (size - 1 - len(group)))


def _replace_inactive(first: Step, other: Step) -> Step:
    if all(own or not begun for own, begun in zip(other.is_active, first.is_active, strict=True)):
        return other
    active = other.active > 0

    def choose(own: Tensor | None, instead: Tensor) -> Tensor:
        assert own is not None
        return torch.where(per_device(active, own), own, instead)

    seeds = (
        own if on else instead
        for own, instead, on in zip(
            other.step_seeds.per_device, first.step_seeds.per_device, other.is_active, strict=True
        )
    )
    return replace(
        other,
        rows=choose(other.rows, first.rows),
        positions=None
        if other.positions is None or first.positions is None
        else choose(other.positions, first.positions),
        augmentation=combine(choose, other.augmentation, first.augmentation) if other.augmentation else {},
        step_seeds=replace(other.step_seeds, per_device=tuple(seeds)),
    )
