"""Training plans: which examples form which batch, drawn before training starts.

A plan depends only on the seed, the round, the task and the device, so it is the same on every engine and in every
block. Devices with unequal numbers of examples share their full batches; incomplete ones are steps of their own.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from ..data import Examples, Preparation
from ..models import StepSeeds
from ..settings import Count
from ..tensors import Tensors


@dataclass(frozen=True)
class Schedule:
    """How long devices train in a round.

    Parameters
    ----------
    batch_size : the batch size.
    epochs : the number of passes over the device's examples.
    last : what happens to an incomplete last batch: it is used as it is ("keep"), left out unless it is the only one
        ("drop"), or filled up with examples of the same epoch ("wrap").
    shuffle : whether the examples are visited in a random order, a new one in every epoch; else as the device has them.
    """

    batch_size: Count = 10
    epochs: Count = 1
    last: Literal["keep", "drop", "wrap"] = "keep"
    shuffle: bool = True


@dataclass(frozen=True)
class Step:
    """One training step of a block of devices.

    Parameters
    ----------
    rows : row numbers in the store of examples, [K, batch].
    active : [K], 1 for devices that take this step, else 0: they are done, or their batch has another size.
    augmentation : random numbers for the preparation, [K, batch, ...].
    step_seeds : the seeds of the model's random layers, and which devices the model has to run.
    positions : the rows as positions in the device's own list of examples, [K, batch].
    number : the number of the step, from 0, the same for every active device. Where batch sizes differ, several steps
        of a plan have one number.
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


STEPS_OF_PART = 50
"""A plan is divided into parts of at least so many steps."""


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
    steps_per_epoch : the number of steps of an epoch.
    """

    rows: Tensor
    positions: Tensor
    augmentation: Tensors
    sizes: tuple[int, ...]
    seed: int
    shared_seed: int
    steps_per_epoch: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Plans of one shape can share a block: those whose first batches are equally large."""
        return self.sizes[:1]

    def part(self, index: int, count: int) -> "DevicePlan":
        """Some of the steps of a single epoch, with the batches and seeds that they have in the whole.

        Parameters
        ----------
        index : which of the parts.
        count : the number of parts; the last ones are empty if there are too few steps for all.
        """
        if count == 1:
            return self
        filled = max(1, min(count, len(self.sizes) // STEPS_OF_PART))
        first, last = (len(self.sizes) * min(number, filled) // filled for number in (index, index + 1))
        visits = slice(sum(self.sizes[:first]), sum(self.sizes[:last]))
        return replace(
            self,
            rows=self.rows[visits],
            positions=self.positions[visits],
            augmentation={name: numbers[visits] for name, numbers in self.augmentation.items()},
            sizes=self.sizes[first:last],
            seed=self.seed + first,
            shared_seed=self.shared_seed + first,
        )


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
    visit = draw.permutation if schedule.shuffle else np.arange
    order = [np.resize(visit(len(rows)), sum(sizes)) for _ in range(schedule.epochs)]
    positions = torch.from_numpy(np.concatenate(order))
    return DevicePlan(
        rows=rows[positions],
        positions=positions,
        augmentation=preparation.draw_augmentation(draw, len(positions), *examples.x.shape[1:]),
        sizes=sizes * schedule.epochs,
        seed=int(draw.integers(2**62)),
        shared_seed=shared_seed,
        steps_per_epoch=len(sizes),
    )


def _epoch_sizes(examples: int, schedule: Schedule) -> tuple[int, ...]:
    size = schedule.batch_size
    full, rest = divmod(examples, size)
    if rest == 0 or (schedule.last == "drop" and full > 0):
        return (size,) * full
    return (size,) * full + (size if schedule.last == "wrap" else rest,)


def merge_plans(plans: Sequence[DevicePlan]) -> tuple[Step, ...]:
    """The steps of a block: for each number, one step per batch size that devices have at that number.

    A batch is never padded, since batch norm would see the padding. A device whose batch has another size, or that has
    finished, is inactive in a step and sees its own examples again.

    Parameters
    ----------
    plans : the plan of each device.
    """
    steps, starts = [], [0] * len(plans)
    for number in range(max(len(plan.sizes) for plan in plans)):
        sizes = [plan.sizes[number] if number < len(plan.sizes) else 0 for plan in plans]
        steps += [_merge_step(plans, number, starts, sizes, size) for size in sorted({*sizes} - {0}, reverse=True)]
        starts = [start + size for start, size in zip(starts, sizes, strict=True)]
    return tuple(steps)


def _merge_step(
    plans: Sequence[DevicePlan], number: int, starts: Sequence[int], sizes: Sequence[int], size: int
) -> Step:
    """The step of the devices whose batch with this number has this size."""
    pairs = [(plan, _visit(start, size, len(plan.rows))) for plan, start in zip(plans, starts, strict=True)]
    active = tuple(own == size for own in sizes)
    epochs = tuple(number // plan.steps_per_epoch for plan in plans)
    return Step(
        rows=torch.stack([plan.rows[indices] for plan, indices in pairs]),
        positions=torch.stack([plan.positions[indices] for plan, indices in pairs]),
        active=torch.tensor(active, dtype=torch.float32),
        augmentation={
            name: torch.stack([plan.augmentation[name][indices] for plan, indices in pairs])
            for name in plans[0].augmentation
        },
        step_seeds=StepSeeds(
            tuple((plan.seed + number) % 2**62 for plan in plans),
            (plans[0].shared_seed + number) % 2**62,
            _running(active),
        ),
        number=number,
        epoch=torch.tensor(epochs),
        is_active=active,
        epochs=epochs,
    )


def _visit(start: int, size: int, examples: int) -> slice | Tensor:
    """The examples from `start` on, from the first one again after the last."""
    if start + size <= examples:
        return slice(start, start + size)
    return torch.arange(start, start + size) % examples


def _running(active: Sequence[bool]) -> tuple[int, ...] | None:
    return None if all(active) else tuple(device for device, on in enumerate(active) if on)


def group_steps(plan: Sequence[Step], size: int) -> Iterator[tuple[Step, ...]]:
    """Groups of `size` successive steps of each device, with the devices that are active in the group's first step.

    Devices share a group if its steps have the same numbers and batch sizes for them. If a device has too few steps
    left, its first step of the group is repeated for it.
    """
    if size == 1:
        yield from ((step,) for step in plan)
        return
    groups: dict[tuple[int, tuple[int, ...], tuple[int, ...]], dict[int, list[Step]]] = {}
    for device in range(len(plan[0].is_active) if plan else 0):
        places = [place for place, step in enumerate(plan) if step.is_active[device]]
        for start in range(0, len(places), size):
            own = [plan[place] for place in places[start : start + size]]
            numbers = [step.number for step in own] + [own[0].number + place for place in range(len(own), size)]
            own += [own[0]] * (size - len(own))
            key = places[start], tuple(numbers), tuple(step.rows.shape[1] for step in own)
            groups.setdefault(key, {})[device] = own
    for _, members in sorted(groups.items(), key=lambda group: group[0]):
        yield tuple(_select_steps({device: chunk[place] for device, chunk in members.items()}) for place in range(size))


def _positions(step: Step) -> Tensor:
    assert step.positions is not None
    return step.positions


def _select_steps(own: Mapping[int, Step]) -> Step:
    """The step in which each of these devices is given its own, and all others are inactive."""
    step = max(own.values(), key=lambda one: one.number)  # not one that is repeated for a device
    active = tuple(device in own for device in range(len(step.is_active)))
    if all(one is step for one in own.values()) and active == step.is_active:
        return step
    sources = [own.get(device, step) for device in range(len(active))]

    def choose(read: Callable[[Step], Tensor]) -> Tensor:
        return torch.stack([read(one)[device] for device, one in enumerate(sources)])

    seeds = tuple(one.step_seeds.per_device[device] for device, one in enumerate(sources))
    return replace(
        step,
        rows=choose(lambda one: one.rows),
        active=torch.stack([one.active[k] if k in own else one.active.new_zeros(()) for k, one in enumerate(sources)]),
        is_active=active,
        augmentation={name: choose(lambda one: one.augmentation[name]) for name in step.augmentation},  # noqa: B023
        step_seeds=replace(step.step_seeds, per_device=seeds, running=_running(active)),
        positions=None if step.positions is None else choose(_positions),
    )
