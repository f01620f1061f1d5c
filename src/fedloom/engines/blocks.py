"""A question to devices, cut into blocks: devices that can run as one network, be they of one experiment or of several.

The composition of blocks depends on the recipe and the devices asked, never on time or on the machine. A device gets
the same bits in whatever company, where its layers allow it; where they do not, experiments keep to themselves.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..client import (
    Batch,
    Client,
    DevicePlan,
    Optimiser,
    Outcome,
    Task,
    at_round,
    gradient,
    together,
    towards_first_class,
)
from ..fleet import Device
from ..models import Draws, Model
from ..tensors import Parcel, join, layout
from .client_data import beside_each_other

if TYPE_CHECKING:
    from .in_process import InProcess


Parcels = Mapping[Device, Parcel]


@dataclass(frozen=True, eq=False)
class Errand:
    """What one engine was asked: a task for some of its devices."""

    engine: "InProcess"
    task: Task
    inboxes: Parcels
    round_number: int
    repeat: int = 0

    @property
    def optimiser(self) -> Optimiser:
        return at_round(self.engine.optimiser, self.engine.rates, self.round_number)

    def company(self) -> Hashable:
        """Errands of the same company can be carried out together."""
        task, engine = self.task, self.engine
        return task.same or id(self), task.schedule, self.optimiser, engine.label_smoothing, id(engine.shelf.dataset)


@dataclass(frozen=True)
class Seat:
    """A device in a block, and its way through its own examples."""

    errand: Errand
    device: Device
    plan: DevicePlan


@dataclass(frozen=True, eq=False)
class Work:
    """A task for one block of devices, with all they bring."""

    seats: list[Seat]  # the last may be there again, to fill the block
    devices: int  # seats without those
    inbox: Parcel
    memory: Parcel

    @property
    def task(self) -> Task:
        return self.seats[0].errand.task

    @property
    def model(self) -> Model:
        return self.seats[0].device.model

    @property
    def visits(self) -> int:
        """Examples gone through, all devices together."""
        return sum(len(seat.plan.rows) for seat in self.seats)

    def places(self, errand: Errand) -> Iterator[tuple[int, Device]]:
        """The devices of one errand, and where in the block they are."""
        for place, seat in enumerate(self.seats[: self.devices]):
            if seat.errand is errand:
                yield place, seat.device


def works(errands: Sequence[Errand]) -> list[Work]:
    """Questions in pieces: same task, same model, same layout of parcels, same shape of plan; the longest first."""
    alike: defaultdict[Hashable, list[tuple[Seat, Parcel]]] = defaultdict(list)
    for errand in errands:
        company, engine = errand.company(), errand.engine
        for device, inbox in errand.inboxes.items():
            memory = engine.memory.recall(device)
            seat = Seat(errand, device, engine.plan(errand.task, device, errand.round_number, errand.repeat))
            may_mix = not device.gathers and engine.at_once(device) > 1 and errand.task.same
            holds = (
                layout(inbox),
                layout(memory),
                _to_send(errand.task, device.model, inbox, engine.shelf.count(device)),
            )
            key = company if may_mix else id(errand), device.model, device.tier, holds, seat.plan.shape
            alike[key].append((seat, memory))
    made = []
    for everybody in alike.values():
        for group in _in_company(everybody):
            group.sort(key=lambda one: (-len(one[0].plan.sizes), errands.index(one[0].errand), one[0].device.name))
            size = group[0][0].errand.engine.at_once(group[0][0].device)
            made += [_work(group[start : start + size]) for start in range(0, len(group), size)]
    return made


def _in_company(group: list[tuple[Seat, Parcel]]) -> Iterable[list[tuple[Seat, Parcel]]]:
    """Those who sit together: everybody, or each experiment by itself where its devices mind others."""
    apart: defaultdict[Errand, list[tuple[Seat, Parcel]]] = defaultdict(list)
    for one in group:
        apart[one[0].errand].append(one)
    return [group] if len(apart) == 1 or _mixes(group[0][0]) else apart.values()


def _to_send(task: Task, model: Model, inbox: Parcel, examples: int) -> Hashable:
    """How much a device is to send, where that depends on how many examples it holds: a block sends alike."""
    said = {bundle: sent(model, inbox, examples) for bundle, sent in task.sends.items()}
    return tuple((bundle, name, shape) for bundle, one in said.items() for name, (shape, _) in one.items())


def carry_out(work: Work) -> Outcome:
    """What the devices of a block make of their task. Depends on nothing but the work and the recipe."""
    errand = work.seats[0].errand
    data = errand.engine.shelf.dataset
    client = Client(
        model=work.model,
        optimiser=errand.optimiser,
        examples=data.train,
        tests=data.test,
        test_holdings=beside_each_other([seat.errand.engine.shelf.tests(seat.device) for seat in work.seats]),
        holdings=beside_each_other([seat.errand.engine.shelf.rows(seat.device) for seat in work.seats]),
        preparation=data.preparation,
        plan=together([seat.plan for seat in work.seats]),
        seen_labels=torch.stack([seat.errand.engine.shelf.seen_labels(seat.device) for seat in work.seats]),
        memory=work.memory,
        label_smoothing=errand.engine.label_smoothing,
        sizes=errand.engine.shelf.sizes,
    )
    return work.task.run(client, work.inbox)


@lru_cache(maxsize=4096)
def at_ease(model: Model, batch: int) -> bool:
    """Whether a device gets the same bits in whatever company of one or more, and wherever it sits.

    Sums over a map run through whole vectors of channels, and what fills no vector is added up in another order. Which
    layers mind, and with how many examples in a batch, is tried out: the last of eight devices must get the same
    gradients among themselves.
    """
    all_of_them = _gradients(model, batch, 8)
    return all(_same(_gradients(model, batch, count), all_of_them) for count in (3, 7, 2, 5))


def _gradients(model: Model, batch_size: int, count: int) -> dict[str, Tensor]:
    """Of the last of eight made-up devices, each with weights and examples of its own whoever is beside it."""
    made: list[tuple[dict[str, Tensor], Tensor]] = []
    devices = range(8 - count, 8)
    for device in devices:
        draw = torch.Generator().manual_seed(device)
        weights = {name: torch.rand(shape, generator=draw) - 0.4 for name, shape in model.shapes().items()}
        made.append((weights, model.sample(draw, batch_size)))
    x, y = torch.stack([x for _, x in made]), torch.zeros(count, batch_size, dtype=torch.int64)
    block = {name: torch.stack([weights[name] for weights, _ in made]) for name in model.shapes()}
    batch = Batch(x, y, Draws(tuple(devices)))
    return dict(gradient(towards_first_class(model), block, batch))


def _same(fewer: dict[str, Tensor], all_of_them: dict[str, Tensor]) -> bool:
    count = len(next(iter(fewer.values())))
    return all(torch.equal(slope, all_of_them[name][-count:]) for name, slope in fewer.items())


def _work(group: list[tuple[Seat, Parcel]]) -> Work:
    full = group + [group[-1]] * (_size(group[0][0], len(group)) - len(group))
    seats = [seat for seat, _ in full]
    inbox = join([seat.errand.inboxes[seat.device] for seat in seats])
    return Work(seats, len(group), inbox, join([memory for _, memory in full]))


def _mixes(seat: Seat) -> bool:
    """Whether devices of other experiments may be beside it."""
    return all(at_ease(seat.device.model, size) for size in set(seat.plan.sizes))


def _size(seat: Seat, devices: int) -> int:
    """Whom nobody joins sits beside itself: other kernels, and so other bits, would run for it alone."""
    alone = seat.errand.engine.at_once(seat.device) == 1 or seat.device.gathers
    if alone or (seat.device.here and not seat.errand.task.same):  # whom nobody can join
        return devices
    return max(2, devices)
