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
    ClientResult,
    DevicePlan,
    Optimizer,
    Task,
    optimizer_at,
    dummy_loss,
    gradient,
    merge_plans,
)
from ..fleet import Device
from ..models import Model, StepSeeds
from ..tensors import Parcel, join, layout
from .client_data import pad_indices

if TYPE_CHECKING:
    from .in_process import InProcess


Parcels = Mapping[Device, Parcel]


@dataclass(frozen=True, eq=False)
class Request:
    """What one engine was asked: a task for some of its devices."""

    engine: "InProcess"
    task: Task
    inboxes: Parcels
    round_number: int
    repeat: int = 0

    @property
    def optimizer(self) -> Optimizer:
        return optimizer_at(self.engine.optimizer, self.engine.lr_schedule, self.round_number)

    def company(self) -> Hashable:
        """Errands of the same company can be carried out together."""
        task, engine = self.task, self.engine
        return (
            task.batch_key or id(self),
            task.schedule,
            self.optimizer,
            engine.label_smoothing,
            id(engine.client_data.dataset),
        )


@dataclass(frozen=True)
class BlockMember:
    """A device in a block, and its way through its own examples."""

    request: Request
    device: Device
    plan: DevicePlan


@dataclass(frozen=True, eq=False)
class Block:
    """A task for one block of devices, with all they bring."""

    seats: list[BlockMember]  # the last may be there again, to fill the block
    devices: int  # seats without those
    inbox: Parcel
    memory: Parcel

    @property
    def task(self) -> Task:
        return self.seats[0].request.task

    @property
    def model(self) -> Model:
        return self.seats[0].device.model

    @property
    def visits(self) -> int:
        """Examples gone through, all devices together."""
        return sum(len(seat.plan.rows) for seat in self.seats)

    def places(self, request: Request) -> Iterator[tuple[int, Device]]:
        """The devices of one errand, and where in the block they are."""
        for place, seat in enumerate(self.seats[: self.devices]):
            if seat.request is request:
                yield place, seat.device


def make_blocks(requests: Sequence[Request]) -> list[Block]:
    """Questions in pieces: same task, same model, same layout of parcels, same shape of plan; the longest first."""
    alike: defaultdict[Hashable, list[tuple[BlockMember, Parcel]]] = defaultdict(list)
    for request in requests:
        company, engine = request.company(), request.engine
        for device, inbox in request.inboxes.items():
            memory = engine.memory.recall(device)
            seat = BlockMember(request, device, engine.plan(request.task, device, request.round_number, request.repeat))
            may_mix = not device.pooled_from and engine.at_once(device) > 1 and request.task.batch_key
            holds = (
                layout(inbox),
                layout(memory),
                _to_send(request.task, device.model, inbox, engine.client_data.count(device)),
            )
            key = company if may_mix else id(request), device.model, device.tier, holds, seat.plan.shape
            alike[key].append((seat, memory))
    made = []
    for everybody in alike.values():
        for group in _in_company(everybody):
            group.sort(key=lambda one: (-len(one[0].plan.sizes), requests.index(one[0].request), one[0].device.name))
            size = group[0][0].request.engine.at_once(group[0][0].device)
            made += [_work(group[start : start + size]) for start in range(0, len(group), size)]
    return made


def _in_company(group: list[tuple[BlockMember, Parcel]]) -> Iterable[list[tuple[BlockMember, Parcel]]]:
    """Those who sit together: everybody, or each experiment by itself where its devices mind others."""
    apart: defaultdict[Request, list[tuple[BlockMember, Parcel]]] = defaultdict(list)
    for one in group:
        apart[one[0].request].append(one)
    return [group] if len(apart) == 1 or _mixes(group[0][0]) else apart.values()


def _to_send(task: Task, model: Model, inbox: Parcel, examples: int) -> Hashable:
    """How much a device is to send, where that depends on how many examples it holds: a block sends alike."""
    said = {bundle: sent(model, inbox, examples) for bundle, sent in task.sends.items()}
    return tuple((bundle, name, shape) for bundle, one in said.items() for name, (shape, _) in one.items())


def run_block(work: Block) -> ClientResult:
    """What the devices of a block make of their task. Depends on nothing but the work and the recipe."""
    request = work.seats[0].request
    data = request.engine.client_data.dataset
    client = Client(
        model=work.model,
        optimizer=request.optimizer,
        examples=data.train,
        tests=data.test,
        test_indices=pad_indices([seat.request.engine.client_data.tests(seat.device) for seat in work.seats]),
        train_indices=pad_indices([seat.request.engine.client_data.rows(seat.device) for seat in work.seats]),
        preparation=data.preparation,
        plan=merge_plans([seat.plan for seat in work.seats]),
        seen_labels=torch.stack([seat.request.engine.client_data.seen_labels(seat.device) for seat in work.seats]),
        state=work.memory,
        label_smoothing=request.engine.label_smoothing,
        tier_models=request.engine.client_data.sizes,
    )
    return work.task.run(client, work.inbox)


@lru_cache(maxsize=4096)
def is_block_invariant(model: Model, batch: int) -> bool:
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
        made.append((weights, model.random_inputs(draw, batch_size)))
    x, y = torch.stack([x for _, x in made]), torch.zeros(count, batch_size, dtype=torch.int64)
    block = {name: torch.stack([weights[name] for weights, _ in made]) for name in model.shapes()}
    batch = Batch(x, y, StepSeeds(tuple(devices)))
    return dict(gradient(dummy_loss(model), block, batch))


def _same(fewer: dict[str, Tensor], all_of_them: dict[str, Tensor]) -> bool:
    count = len(next(iter(fewer.values())))
    return all(torch.equal(slope, all_of_them[name][-count:]) for name, slope in fewer.items())


def _work(group: list[tuple[BlockMember, Parcel]]) -> Block:
    full = group + [group[-1]] * (_size(group[0][0], len(group)) - len(group))
    seats = [seat for seat, _ in full]
    inbox = join([seat.request.inboxes[seat.device] for seat in seats])
    return Block(seats, len(group), inbox, join([memory for _, memory in full]))


def _mixes(seat: BlockMember) -> bool:
    """Whether devices of other experiments may be beside it."""
    return all(is_block_invariant(seat.device.model, size) for size in set(seat.plan.sizes))


def _size(seat: BlockMember, devices: int) -> int:
    """Whom nobody joins sits beside itself: other kernels, and so other bits, would run for it alone."""
    alone = seat.request.engine.at_once(seat.device) == 1 or seat.device.pooled_from
    if alone or (seat.device.is_server and not seat.request.task.batch_key):  # whom nobody can join
        return devices
    return max(2, devices)
