"""Mixed fleets: several methods in one round, each for its own tiers, and one agreement among all of them.

A part is trained as if it were alone. Every part contributes to the mean kernel of unlabelled examples (FedHeNN's), and
devices of parts that `align` are drawn to it: so nets that share no weight may still learn from each other.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ..fleet import DeviceModel, Reply, Turn
from ..settings import FixedTable
from ..tensors import Parcel
from ..training import Client, Outcome, Task
from .agreement import Agreement
from .parts import MadeOfParts, Part, PartEngine, apart, given, state_of


@dataclass(frozen=True)
class Mixed(Agreement, MadeOfParts):
    """`parts`: each with its `tiers`, its `method` with that method's settings, and `align`."""

    paper = "fedloom"
    leaves = "what the methods of its parts say, and how alike it finds examples that all know"
    keeps, gives, admits = "what the methods of its parts say", "personalised", "any models"

    sample = FixedTable(parts=[
        {"tiers": ["large", "medium"], "method": "heterofl"},
        {"tiers": ["small"], "method": "fedhenn", "align": True},
    ])  # fmt: skip

    parts: tuple[Any, ...] = ()

    @property
    def probes(self) -> bool:
        return self._aligns or any(part.method.probes for part in self.parts)

    @property
    def _aligns(self) -> bool:
        return self.strength > 0 and any(part.align for part in self.parts)

    def round(self, server: Parcel, turn: Turn) -> Parcel:
        target = self._mean_kernel(server, turn) if self._aligns else {}

        def played(number: int, part: Part) -> Parcel:
            engine = PartEngine(turn, number, partial(self.guided, part), target if part.align else {})
            return part.method.round(state_of(server, number), part.turn(turn, engine))

        return self.each(played)

    def _mean_kernel(self, server: Parcel, turn: Turn) -> Parcel:
        """What those who align are drawn to: the mean over the fleet as it is before the round."""
        shown = self.shown(turn)
        told = list(self._told(server, turn, shown)) if shown else []
        return self.aimed(shown, [reply for reply, _ in told], [share for _, share in told])

    def _told(self, server: Parcel, turn: Turn, shown: Parcel) -> Iterator[tuple[Reply, float]]:
        """Every part counts by its devices. Models that the server holds stand for all theirs; where devices have their
        own, the participants are asked and stand for the others."""
        for number, part in enumerate(self.parts):
            own, held = part.turn(turn, turn.engine), part.method.candidates(state_of(server, number))
            members, first = own.fleet.members(turn.number), next(iter(held.values()))
            if isinstance(first, DeviceModel):
                boxes = {device: {**shown, **first.inbox(device)} for device in own.cohort}
                told = turn.ask(self.find("describe", str(number), *first.found_at), boxes)
                yield from ((one, len(members) / len(told)) for one in told)
                continue
            weights = {tier.name: first.weights(tier) for tier in own.fleet.served}
            some = {device.tier: device for device in reversed(members)}
            boxes = {device: {**shown, "weights": weights[tier]} for tier, device in some.items()}
            for one in turn.compute(self.find("describe"), boxes):
                yield one, float(sum(device.tier == one.device.tier for device in members))

    def guided(self, part: Part, task: Task) -> Task:
        """By devices that are drawn to what the whole fleet sees, where they are told."""
        alone = super().guided(part, task)

        def run(client: Client, inbox: Parcel) -> Outcome:
            own, common = apart(inbox)
            return alone.run(self.drawn(client, common, {}), own)

        return replace(task, run=run)

    def find(self, *address: str) -> Any:
        if address[0] != "describe":
            return super().find(*address)
        carried = self.parts[int(address[1])].method.find(*address[2:]) if address[1:] else given
        return self.telling_task(carried, *address)
