"""What a device sees while it carries out a task, and what comes of it.

Every tensor carries the devices in front: a task is written once and runs for one device or for a whole tier.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, overload

import torch
from torch import Tensor

from ..data import Examples, Preparation
from ..models import Model, StepSeeds
from ..seeds import TRAIN
from ..tensors import Parcel, Tensors
from .optimizers import Optimizer
from .plan import Schedule, Step


@dataclass(frozen=True)
class Batch:
    x: Tensor  # [K, batch, ...]
    y: Tensor  # [K, batch]
    step_seeds: StepSeeds | None = None  # given: training mode
    label_smoothing: float = 0.0
    positions: Tensor | None = None
    number: int = 0  # of the step

    @property
    def own_rows(self) -> Tensor:
        """[K, batch]: which of the devices' own examples these are."""
        assert self.positions is not None
        return self.positions

    def cyclic_rows(self, count: int, of: int) -> Tensor:
        """The next `count` of `of` things that are gone through again and again, step by step."""
        return (self.number * count + torch.arange(count)) % of


AuxiliaryLoss = Callable[[Tensors, Batch], Tensor]
"""(weights, batch) -> a loss, [K], beside whatever a task trains for."""


@dataclass(frozen=True)
class PaddedIndices:
    """The examples of a block of devices: ragged, so the shorter lists are padded."""

    rows: Tensor  # [K, longest]
    real: Tensor  # [K, longest] truth values: what is not padding


@dataclass(frozen=True)
class Client:
    """What a block of devices sees while it carries out a task."""

    model: Model
    optimizer: Optimizer
    examples: Examples  # the whole store: reach it through `batch`, a plan names only a device's own rows
    tests: Examples
    test_holdings: PaddedIndices
    preparation: Preparation
    plan: tuple[Step, ...]
    seen_labels: Tensor  # [K, classes] truth values
    state: Parcel  # what the devices keep from round to round
    label_smoothing: float = 0.0
    sizes: Mapping[str, Model] = field(default_factory=dict)  # the models of the fleet's tiers
    holdings: PaddedIndices | None = None  # all training examples, in the devices' own order
    auxiliary_loss: AuxiliaryLoss | None = None  # what else the devices are drawn to while they train

    def batch(self, step: Step) -> Batch:
        x = self.preparation(self.examples.x[step.rows], step.augmentation or None)
        y = self.examples.y[step.rows]
        return Batch(x, y, step.step_seeds, self.label_smoothing, step.positions, step.number)

    @property
    def held(self) -> int:
        """How many training examples a device has: the fewest in the block, all where they send as many rows."""
        return 0 if self.holdings is None else int(self.holdings.real.sum(1).min())

    def own_batches(self, size: int) -> Iterator[tuple[Batch, Tensor]]:
        """The devices' own training examples in order and as they are, and which of them are real."""
        assert self.holdings is not None
        yield from self._in_order(self.examples, self.holdings, size)

    def test_batches(self, size: int) -> Iterator[tuple[Batch, Tensor]]:
        """The devices' own test examples in order, and which of them are real; none if no device holds any."""
        yield from self._in_order(self.tests, self.test_holdings, size)

    def _in_order(self, store: Examples, held: PaddedIndices, size: int) -> Iterator[tuple[Batch, Tensor]]:
        for start in range(0, held.rows.shape[1], size):
            rows, real = held.rows[:, start : start + size], held.real[:, start : start + size]
            yield Batch(self.preparation(store.x[rows]), store.y[rows]), real


@dataclass(frozen=True)
class ClientResult:
    """What a device sends back, and what it keeps for its next task."""

    upload: Parcel
    state: Parcel | None = None


Layout = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
Sent = Callable[[Model, Parcel, int], Layout]
"""(device's model, its inbox, how many examples it holds) -> names, shapes and dtypes of a bundle. All that admission
needs to know of a task."""


class Bounded(tuple[tuple[int, ...], torch.dtype]):
    """Shape and dtype of whole numbers that are from 0 to below something: a label that no class has is no label."""

    below: int

    def __new__(cls, shape: tuple[int, ...], dtype: torch.dtype, below: int) -> "Bounded":
        made = super().__new__(cls, (shape, dtype))
        made.below = below
        return made


Sends = Mapping[str, Sent | str]
"""Bundle by bundle; by name, where a method's settings decide and one of its own functions says."""


@dataclass(frozen=True)
class Like:
    """The same tensors as a bundle of the inbox, with other values: what changed is an update of it."""

    bundle: str

    def __call__(self, model: Model, inbox: Parcel, examples: int) -> Layout:
        return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in inbox[self.bundle].items()}


def like(bundle: str) -> Sent:
    return Like(bundle)


def shaped(**layout: tuple[tuple[int | Literal["classes", "examples"], ...], torch.dtype]) -> Sent:
    """Tensors of these shapes; an axis may be as long as there are classes, or examples on the device."""

    def sent(model: Model, inbox: Parcel, examples: int) -> Layout:
        known = {"classes": model.classes, "examples": examples}
        return {
            name: (tuple(known[size] if isinstance(size, str) else size for size in sizes), dtype)
            for name, (sizes, dtype) in layout.items()
        }

    return sent


@dataclass(frozen=True)
class Task:
    """A part of a method that runs on the devices."""

    name: str
    run: Callable[[Client, Parcel], ClientResult]
    sends: Mapping[str, Sent]
    stream: str = TRAIN  # of random numbers: which batches devices see; tasks may share one and never draw alike
    schedule: Schedule | None = None  # None: as the recipe trains
    address: tuple[str, ...] = ()  # where another process finds it; (): the method's own, under its name
    same: Hashable = None  # tasks of the same value do the same, also those of different experiments; None: unknown

    def silent(self, *address: str) -> "Task":
        """The same on the same batches, which the stream decides; but nothing is sent."""

        def run(client: Client, inbox: Parcel) -> ClientResult:
            return replace(self.run(client, inbox), upload={})

        return replace(self, run=run, sends={}, address=address, same=self.same and ("silent", self.same))


class OnDevice:
    """A function that, taken from an instance of the class it stands in, is a `Task`."""

    def __init__(self, function: Callable[..., ClientResult], sends: Sends, stream: str, mixes: bool, of_method: bool):
        self.function, self.sends, self.stream = function, sends, stream
        self.mixes, self.of_method = mixes, of_method
        self.name = function.__name__
        self.__doc__ = function.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name  # by which a worker finds it

    @overload
    def __get__(self, instance: None, owner: type) -> "OnDevice": ...
    @overload
    def __get__(self, instance: object, owner: type) -> Task: ...
    def __get__(self, instance: object | None, owner: type) -> "OnDevice | Task":
        if instance is None:
            return self
        function = self.function
        sends = {
            bundle: getattr(instance, sent) if isinstance(sent, str) else sent for bundle, sent in self.sends.items()
        }
        if not self.of_method:
            return Task(self.name, function, sends, self.stream, same=function)
        same = (function, instance) if self.mixes and _has_value(instance) else None
        return Task(self.name, function.__get__(instance), sends, self.stream, same=same)


def _has_value(instance: object) -> bool:
    try:
        hash(instance)
    except TypeError:  # such as a setting that is a dictionary
        return False
    return True


def on_device(
    sends: Sends, stream: str = TRAIN, mixes: bool = True
) -> Callable[[Callable[[Any, Client, Parcel], ClientResult]], OnDevice]:
    """Mark a part of a method that runs on the devices, and declare every bundle it sends back. `mixes`: devices of
    several experiments may share a block; not where a task draws once for a whole block, nor where it sends other
    things through the model than its batches, of which it is not known in which company they keep their bits."""
    return lambda function: OnDevice(function, sends, stream, mixes, of_method=True)


def on_any_device(sends: Sends) -> Callable[[Callable[[Client, Parcel], ClientResult]], OnDevice]:
    """The same for a function that takes nothing from a method, so that several methods can have it."""
    return lambda function: OnDevice(function, sends, TRAIN, mixes=True, of_method=False)
