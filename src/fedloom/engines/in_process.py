"""Simulate devices in this process: a task runs for one device after the other, or for many of a tier at once."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from ..client import DevicePlan, Optimiser, Outcome, Rates, Schedule, Task, plan_for
from ..fleet import Device, Reply
from ..seeds import PLAN, generator, number
from ..tensors import Parcel, split
from .blocks import Errand, Parcels, Work, carry_out, works
from .client_data import Shelf, devices_at_once
from .client_state import Memory
from .gate import MOST_EXAMPLES, Refusal, refuse
from .norm_screening import Norms

Listener = Callable[[int, Refusal], None]
Carry = Callable[[Errand], Iterable[tuple[Work, Outcome]]]
"""How the pieces of an errand are carried out, and in whose company."""

Way = Callable[[Reply], Reply | None]
"""What becomes of a reply before it is at the gate; None: it never gets there, and its device does not remember."""

Passed = tuple[Reply, Parcel | None]
"""A reply, and what its device remembers if it is admitted."""


def straight(reply: Reply) -> Reply | None:
    return reply


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
    most_examples: int = MOST_EXAMPLES  # that a device may say it holds
    norms: Norms | None = None  # None: nobody minds how long updates are

    def ask(
        self,
        task: Task,
        inboxes: Parcels,
        round_number: int,
        repeat: int = 0,
        way: Way = straight,
        told: Parcels | None = None,
    ) -> Iterator[Reply]:
        """`told`: the inboxes as they reach the devices, where a codec makes them other numbers of the same layout."""
        errand = Errand(self, task, inboxes if told is None else told, round_number, repeat)
        passed = (one for work, outcome in self.carry(errand) for one in self._passed(errand, work, outcome, way))
        for reply, kept in self._of_usual_length(errand, inboxes, list(passed)) if self.norms else passed:
            if kept is not None:
                self.memory.remember(reply.device, kept)
            yield reply

    def commit(self, round_number: int) -> None:
        if self.norms:
            self.norms.commit()
        self.memory.commit()

    def close(self) -> None:
        self.memory.close()

    def plan(self, task: Task, device: Device, round_number: int, repeat: int) -> DevicePlan:
        asked = (self.seed, PLAN, round_number, task.stream, repeat)
        draw, data = generator(*asked, device.name), self.shelf.dataset
        schedule = task.schedule or self.schedule
        return plan_for(self.shelf.rows(device), schedule, data.train, data.preparation, draw, number(*asked))

    def at_once(self, device: Device) -> int:
        return self.blocks.get(device.tier) or self.block or devices_at_once(device.model)

    def _passed(self, errand: Errand, work: Work, outcome: Outcome, way: Way) -> Iterator[Passed]:
        """The errand's replies, as far as they pass the gate, with what their devices would remember."""
        for place, device in work.places(errand):
            reply = way(Reply(device, self.shelf.count(device), split(outcome.send, place)))
            if reply is None:
                continue
            kept = None if outcome.remember is None else split(outcome.remember, place)
            refusal = refuse(reply, errand.task, errand.inboxes[device], kept, self.most_examples)
            if refusal:
                self.on_refusal(errand.round_number, refusal)
            else:
                yield reply, kept

    def _of_usual_length(self, errand: Errand, inboxes: Parcels, passed: list[Passed]) -> Iterator[Passed]:
        """Once all are here, for at first there is nothing else to measure them by."""
        assert self.norms is not None
        refusals = self.norms.refusals(errand.task, errand.repeat, [reply for reply, _ in passed], inboxes)
        for reply, kept in sorted(passed, key=lambda one: one[0].device.name):
            if reply.device in refusals:
                self.on_refusal(errand.round_number, refusals[reply.device])
            else:
                yield reply, kept
