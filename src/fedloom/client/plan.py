"""Which examples form which batch, drawn before training starts.

A device's plan depends on the seed, the round, the task and the device alone, so it is the same on every engine
and whoever shares the device's block.
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
from ..tensors import Tensors, combine


@dataclass(frozen=True)
class Schedule:
    """How a device goes through its examples; `last` says what becomes of a last batch that is not full."""

    batch_size: Count = 10
    epochs: Count = 1
    last: Literal["keep", "drop", "wrap"] = "keep"


@dataclass(frozen=True)
class Step:
    """One batch of a block of devices."""

    rows: Tensor  # [K, batch] row numbers in the store of examples
    working: Tensor  # [K], 1 while a device has steps left, then 0
    augmentation: Tensors  # [K, batch, ...] random numbers for the preparation
    step_seeds: StepSeeds
    positions: Tensor | None = None  # [K, batch] the rows as places in a device's own list of examples
    number: int = 0  # from 0 on
    epoch: Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.int64))  # [K], not always all in the same


@dataclass(frozen=True)
class DevicePlan:
    """One device's way through its own examples."""

    rows: Tensor  # [visits]
    positions: Tensor  # [visits]
    augmentation: Tensors  # [visits, ...]
    sizes: tuple[int, ...]  # of the batches, step by step
    seed: int
    common: int  # the same for all devices that were asked at once
    ragged: bool  # batches of different size: only plans of the very same sizes can share a block
    epoch_steps: int  # steps of one epoch

    @property
    def shape(self) -> tuple[int, ...]:
        """Plans of one shape can share a block."""
        return self.sizes if self.ragged else self.sizes[:1]


def plan_for(
    rows: Tensor,
    schedule: Schedule,
    examples: Examples,
    preparation: Preparation,
    draw: np.random.Generator,
    common: int = 0,
) -> DevicePlan:
    sizes = _sizes(len(rows), schedule)
    order = [_visits(draw.permutation(len(rows)), sum(sizes)) for _ in range(schedule.epochs)]
    positions = torch.from_numpy(np.concatenate(order))
    return DevicePlan(
        rows=rows[positions],
        positions=positions,
        augmentation=preparation.draw(draw, len(positions), *examples.x.shape[1:]),
        sizes=sizes * schedule.epochs,
        seed=int(draw.integers(2**62)),
        common=common,
        ragged=schedule.last == "keep",
        epoch_steps=len(sizes),
    )


def together(plans: Sequence[DevicePlan]) -> tuple[Step, ...]:
    """The plans of a block, step by step; a device that has finished looks at its own examples again, idle."""
    longest = max(plans, key=lambda plan: len(plan.sizes))
    steps, start = [], 0
    for number, size in enumerate(longest.sizes):
        at = [torch.arange(start, start + size) % len(plan.rows) for plan in plans]
        steps.append(
            Step(
                rows=torch.stack([plan.rows[here] for plan, here in zip(plans, at, strict=True)]),
                positions=torch.stack([plan.positions[here] for plan, here in zip(plans, at, strict=True)]),
                working=torch.tensor([number < len(plan.sizes) for plan in plans], dtype=torch.float32),
                augmentation={
                    name: torch.stack([plan.augmentation[name][here] for plan, here in zip(plans, at, strict=True)])
                    for name in longest.augmentation
                },
                step_seeds=StepSeeds(
                    tuple((plan.seed + number) % 2**62 for plan in plans), (plans[0].common + number) % 2**62
                ),
                number=number,
                epoch=torch.tensor([number // plan.epoch_steps for plan in plans]),
            )
        )
        start += size
    return tuple(steps)


def in_groups(plan: Sequence[Step], size: int) -> Iterator[tuple[Step, ...]]:
    """So many steps at a time; where a device has too few left for a group, its first stands in for the rest."""
    for start in range(0, len(plan), size):
        first, *others = plan[start : start + size]
        group = [_standing_in(first, other) for other in others]
        yield (first, *group, *[first] * (size - 1 - len(group)))


def _standing_in(first: Step, other: Step) -> Step:
    if bool((other.working >= first.working).all()):
        return other
    going = other.working > 0

    def chosen(mine: Tensor | None, instead: Tensor) -> Tensor:
        assert mine is not None
        return torch.where(going.view(-1, *[1] * (mine.dim() - 1)), mine, instead)

    seeds = (
        a if on else b
        for a, b, on in zip(other.step_seeds.per_device, first.step_seeds.per_device, going.tolist(), strict=True)
    )
    return replace(
        other,
        rows=chosen(other.rows, first.rows),
        positions=None
        if other.positions is None or first.positions is None
        else chosen(other.positions, first.positions),
        augmentation=combine(chosen, other.augmentation, first.augmentation) if other.augmentation else {},
        step_seeds=replace(other.step_seeds, per_device=tuple(seeds)),
    )


def _sizes(examples: int, schedule: Schedule) -> tuple[int, ...]:
    """Batch sizes of one epoch."""
    size = schedule.batch_size
    full, rest = divmod(examples, size)
    if rest == 0 or (schedule.last == "drop" and full > 0):
        return (size,) * full
    return (size,) * full + (size if schedule.last == "wrap" else rest,)


def _visits(order: np.ndarray, visits: int) -> np.ndarray:
    return np.resize(order, visits)
