"""Simulate devices in this process: a task runs for one device after the other, or for many of a tier at once.

The composition of blocks depends on the recipe and the replies asked for, never on time or on the machine.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from ..fleet import Device, Reply
from ..seeds import generator
from ..tensors import Parcel, join, layout, split
from ..training import Client, DevicePlan, Optimiser, Outcome, Rates, Schedule, Task, at_round, plan_for, together
from .admission import Refusal, refuse
from .holdings import Shelf, devices_at_once
from .memory import Memory

Listener = Callable[[int, Refusal], None]
Parcels = Mapping[Device, Parcel]


@dataclass(frozen=True)
class Work:
    """A task for one block of devices, with all they bring."""

    task: Task
    devices: list[Device]
    company: list[Device]  # the same, or a device left over beside itself
    inbox: Parcel
    memory: Parcel
    round_number: int
    repeat: int
    plans: list[DevicePlan]  # of the company, in its order

    @property
    def visits(self) -> int:
        """Examples gone through, all devices together."""
        return sum(len(plan.rows) for plan in self.plans)


@dataclass
class InProcess:
    shelf: Shelf
    memory: Memory
    schedule: Schedule
    optimiser: Optimiser
    rates: Rates
    seed: int
    block: int | None = None  # devices at once; 1: device by device; None: as many as suits their model
    blocks: Mapping[str, int] = field(default_factory=dict)  # the same for single tiers, where it was measured
    on_refusal: Listener = field(default=lambda round_number, refusal: None)

    def ask(self, task: Task, inboxes: Parcels, round_number: int, repeat: int = 0) -> Iterator[Reply]:
        for work in self.works(task, inboxes, round_number, repeat):
            yield from self.admitted(work, inboxes, self.carry_out(work))

    def works(self, task: Task, inboxes: Parcels, round_number: int, repeat: int) -> list[Work]:
        """The task in pieces, each for one block of devices."""
        plans = {device: self.plan(task, device, round_number, repeat) for device in inboxes}
        memories = {device: self.memory.recall(device) for device in inboxes}
        works = []
        for devices in self._blocks(inboxes, memories, plans):
            company = self._company(devices)
            inbox, memory = (join([held[device] for device in company]) for held in (inboxes, memories))
            own_plans = [plans[device] for device in company]
            works.append(Work(task, devices, company, inbox, memory, round_number, repeat, own_plans))
        return works

    def carry_out(self, work: Work) -> Outcome:
        """What the devices of a block make of their task. Depends on nothing but the work and the recipe."""
        return work.task.run(self._client(work), work.inbox)

    def admitted(self, work: Work, inboxes: Parcels, outcome: Outcome) -> Iterator[Reply]:
        """The block's replies, as far as they pass the gate; what their devices remember is kept."""
        for number, device in enumerate(work.devices):
            reply = Reply(device, len(self.shelf.rows(device)), split(outcome.send, number))
            kept = None if outcome.remember is None else split(outcome.remember, number)
            refusal = refuse(reply, work.task, inboxes[device], kept)
            if refusal:
                self.on_refusal(work.round_number, refusal)
                continue
            if kept is not None:
                self.memory.remember(device, kept)
            yield reply

    def close(self) -> None:
        """Nothing to end."""

    def commit(self, round_number: int) -> None:
        self.memory.commit()

    def plan(self, task: Task, device: Device, round_number: int, repeat: int) -> DevicePlan:
        draw = generator(self.seed, "plan", round_number, task.name, repeat, device.name)
        data = self.shelf.dataset
        return plan_for(self.shelf.rows(device), task.schedule or self.schedule, data.train, data.preparation, draw)

    def _blocks(
        self, inboxes: Parcels, memories: Parcels, plans: Mapping[Device, DevicePlan]
    ) -> Iterator[list[Device]]:
        """Devices that can run as one: same model, same layout of parcels, same shape of plan; the longest first."""
        alike: defaultdict[object, list[Device]] = defaultdict(list)
        for device, inbox in inboxes.items():
            holds = layout(inbox), layout(memories[device])
            alike[device.model, device.tier, holds, plans[device].shape].append(device)
        for devices in alike.values():
            devices.sort(key=lambda device: (-len(plans[device].sizes), device.name))
            size = self._at_once(devices[0])
            for start in range(0, len(devices), size):
                yield devices[start : start + size]

    def _at_once(self, device: Device) -> int:
        return self.blocks.get(device.tier) or self.block or devices_at_once(device.model)

    def _company(self, devices: list[Device]) -> list[Device]:
        """A device left over runs beside itself: other kernels, and so other bits, would run for it alone."""
        lonely = len(devices) == 1 and self._at_once(devices[0]) > 1 and not devices[0].gathers
        return devices * 2 if lonely else devices

    def _client(self, work: Work) -> Client:
        data, devices = self.shelf.dataset, work.company
        return Client(
            model=devices[0].model,
            optimiser=at_round(self.optimiser, self.rates, work.round_number),
            examples=data.train,
            tests=data.test,
            test_holdings=self.shelf.tests(devices),
            preparation=data.preparation,
            plan=together(work.plans),
            seen_labels=torch.stack([self.shelf.seen_labels(device) for device in devices]),
            memory=work.memory,
        )
