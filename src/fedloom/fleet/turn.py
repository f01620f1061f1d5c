"""All that a method may use in a round."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from ..footprints import Merge, coverage_mean
from ..seeds import generator
from ..tensors import Parcel, payload_bytes
from ..training import Task
from .device import Device, Engine, Reply
from .tiers import Fleet


@dataclass
class Traffic:
    """What a round moved, counted from the parcels themselves."""

    down: int = 0
    up: int = 0
    asked: int = 0
    replied: int = 0


@dataclass(frozen=True)
class Turn:
    number: int
    cohort: list[Device]
    fleet: Fleet
    engine: Engine
    merge: Merge = coverage_mean
    traffic: Traffic = field(default_factory=Traffic)
    _asked: Counter[str] = field(default_factory=Counter)

    def ask(self, task: Task, inboxes: Mapping[Device, Parcel]) -> list[Reply]:
        """Have devices carry out a task. Sorted by device, so that sums do not depend on who answered first."""
        replies = sorted(
            self.engine.ask(task, inboxes, self.number, self._asked[task.name]), key=lambda reply: reply.device.name
        )
        self._asked[task.name] += 1
        self.traffic.asked += len(inboxes)
        self.traffic.replied += len(replies)
        self.traffic.down += sum(payload_bytes(inbox) for inbox in inboxes.values())
        self.traffic.up += sum(payload_bytes(reply.sent) for reply in replies)
        return replies

    def draw(self, purpose: str) -> np.random.Generator:
        """This round's randomness on the server, a stream for each purpose."""
        return generator(self.fleet.seed, "server", purpose, self.number)
