"""Simulate devices in this process: a task runs for one device after the other, or for many of a tier at once."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from ..fleet import Device, Reply
from ..seeds import generator, number
from ..tensors import split
from ..training import DevicePlan, Optimiser, Outcome, Rates, Schedule, Task, plan_for
from .admission import Refusal, refuse
from .holdings import Shelf, devices_at_once
from .memory import Memory
from .works import Errand, Parcels, Work, carry_out, works

Listener = Callable[[int, Refusal], None]
Carry = Callable[[Errand], Iterable[tuple[Work, Outcome]]]
"""How the pieces of an errand are carried out, and in whose company."""


def one_after_the_other(errand: Errand) -> Iterator[tuple[Work, Outcome]]:
    for work in works([errand]):
        yield work, carry_out(work)


@dataclass
class InProcess:
    shelf: Shelf
    memory: Memory
    schedule: Schedule
    optimiser: Optimiser
    rates: Rates
    seed: int
    label_smoothing: float = 0.0
    block: int | None = None  # devices at once; 1: device by device; None: as many as suits their model
    blocks: Mapping[str, int] = field(default_factory=dict)  # the same for single tiers, where it was measured
    on_refusal: Listener = field(default=lambda round_number, refusal: None)
    carry: Carry = one_after_the_other

    def ask(self, task: Task, inboxes: Parcels, round_number: int, repeat: int = 0) -> Iterator[Reply]:
        errand = Errand(self, task, inboxes, round_number, repeat)
        for work, outcome in self.carry(errand):
            yield from self._admitted(errand, work, outcome)

    def commit(self, round_number: int) -> None:
        self.memory.commit()

    def close(self) -> None:
        self.memory.close()

    def plan(self, task: Task, device: Device, round_number: int, repeat: int) -> DevicePlan:
        asked = (self.seed, "plan", round_number, task.name, repeat)
        draw, data = generator(*asked, device.name), self.shelf.dataset
        schedule = task.schedule or self.schedule
        return plan_for(self.shelf.rows(device), schedule, data.train, data.preparation, draw, number(*asked))

    def at_once(self, device: Device) -> int:
        return self.blocks.get(device.tier) or self.block or devices_at_once(device.model)

    def _admitted(self, errand: Errand, work: Work, outcome: Outcome) -> Iterator[Reply]:
        """The errand's replies, as far as they pass the gate; what their devices remember is kept."""
        for place, device in work.places(errand):
            reply = Reply(device, self.shelf.count(device), split(outcome.send, place))
            kept = None if outcome.remember is None else split(outcome.remember, place)
            refusal = refuse(reply, errand.task, errand.inboxes[device], kept)
            if refusal:
                self.on_refusal(errand.round_number, refusal)
                continue
            if kept is not None:
                self.memory.remember(device, kept)
            yield reply
