"""Simulate devices in this process: a task runs for one device after the other, or for many of a tier at once."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from ..client import ClientResult, DevicePlan, LRSchedule, Optimizer, Schedule, Task, draw_plan
from ..fleet import Device, Reply
from ..seeds import PLAN, generator, number
from ..tensors import Parcel, split
from .blocks import Block, Parcels, Request, make_blocks, run_block
from .client_data import ClientData, DevicesPerBlock, block_size
from .client_state import ClientStateStore
from .gate import MAX_EXAMPLES, Refusal, refuse
from .norm_screening import Norms

Listener = Callable[[int, Refusal], None]
Carry = Callable[[Request], Iterable[tuple[Block, ClientResult]]]
"""How the pieces of an errand are carried out, and in whose company."""

Way = Callable[[Reply], Reply | None]
"""What becomes of a reply before it is at the gate; None: it never gets there, and its device does not remember."""

Passed = tuple[Reply, Parcel | None]
"""A reply, and what its device remembers if it is admitted."""


def straight(reply: Reply) -> Reply | None:
    return reply


def one_after_the_other(request: Request) -> Iterator[tuple[Block, ClientResult]]:
    for work in make_blocks([request]):
        yield work, run_block(work)


@dataclass
class InProcess:
    client_data: ClientData
    memory: ClientStateStore
    schedule: Schedule
    optimizer: Optimizer
    lr_schedule: LRSchedule
    seed: int
    label_smoothing: float = 0.0
    devices_per_block: DevicesPerBlock = None
    on_refusal: Listener = field(default=lambda round_number, refusal: None)
    carry: Carry = one_after_the_other
    max_examples: int = MAX_EXAMPLES  # that a device may say it holds
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
        request = Request(self, task, inboxes if told is None else told, round_number, repeat)
        passed = (one for work, outcome in self.carry(request) for one in self._passed(request, work, outcome, way))
        for reply, kept in self._of_usual_length(request, inboxes, list(passed)) if self.norms else passed:
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
        draw, data = generator(*asked, device.name), self.client_data.dataset
        schedule = task.schedule or self.schedule
        return draw_plan(self.client_data.rows(device), schedule, data.train, data.preparation, draw, number(*asked))

    def at_once(self, device: Device) -> int:
        return block_size(self.devices_per_block, device)

    def _passed(self, request: Request, work: Block, outcome: ClientResult, way: Way) -> Iterator[Passed]:
        """The errand's replies, as far as they pass the gate, with what their devices would remember."""
        for place, device in work.places(request):
            reply = way(Reply(device, self.client_data.count(device), split(outcome.upload, place)))
            if reply is None:
                continue
            kept = None if outcome.state is None else split(outcome.state, place)
            refusal = refuse(reply, request.task, request.inboxes[device], kept, self.max_examples)
            if refusal:
                self.on_refusal(request.round_number, refusal)
            else:
                yield reply, kept

    def _of_usual_length(self, request: Request, inboxes: Parcels, passed: list[Passed]) -> Iterator[Passed]:
        """Once all are here, for at first there is nothing else to measure them by."""
        assert self.norms is not None
        refusals = self.norms.refusals(request.task, request.repeat, [reply for reply, _ in passed], inboxes)
        for reply, kept in sorted(passed, key=lambda one: one[0].device.name):
            if reply.device in refusals:
                self.on_refusal(request.round_number, refusals[reply.device])
            else:
                yield reply, kept
