"""All that a method may use in a round.

How far a device moved what it was given.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ..client import Task
from ..footprints import Aggregate, coverage_mean
from ..seeds import PUBLIC_BATCH, SERVER, generator
from ..tensors import Parcel, Tensors, payload_bytes
from .device import PLAIN, Coding, Device, Engine, Reply
from .tiers import Fleet


def update_norm(reply: Reply, inbox: Parcel) -> float | None:
    """Over all bundles that come back as they were given, but for their numbers; None if there are none. What the
    server computes is its own affair."""
    mirrored = [bundle for bundle, sent in reply.sent.items() if _mirrors(sent, inbox.get(bundle, {}))]
    if not mirrored or reply.device.is_server:
        return None
    return math.sqrt(sum(_square(reply.sent[b][name], given) for b in mirrored for name, given in inbox[b].items()))


def _mirrors(sent: Tensors, given: Tensors) -> bool:
    return (
        bool(sent)
        and sent.keys() == given.keys()
        and all(_mirrors_one(tensor, given[name]) for name, tensor in sent.items())
    )


def _mirrors_one(sent: Tensor, given: Tensor) -> bool:
    return sent.shape == given.shape and sent.is_floating_point() and not sent.is_meta  # a rehearsal has no numbers


def _square(sent: Tensor, given: Tensor) -> float:
    return float((sent.double() - given.double()).square().sum())


@dataclass
class Traffic:
    """What a round moved, counted from the parcels themselves."""

    down: int = 0
    up: int = 0
    asked: int = 0
    replied: int = 0
    moved: Counter[str] = field(default_factory=Counter)  # bytes both ways, device by device
    examples: dict[str, int] = field(default_factory=dict)  # that a device says it holds
    carriers: dict[str, Device] = field(default_factory=dict)  # the devices that were asked
    sent: dict[str, Counter[str]] = field(default_factory=dict)  # bytes up, device by device and bundle by bundle
    norms: dict[str, float] = field(default_factory=dict)  # how far a device moved what it was given, the last time
    coded_down: int = 0  # as it travels, where a codec makes that less
    coded_up: int = 0
    travelled: Counter[str] = field(default_factory=Counter)  # like `moved`, as it travels


@dataclass(frozen=True)
class RoundContext:
    number: int
    cohort: list[Device]
    fleet: Fleet
    engine: Engine
    aggregate: Aggregate = coverage_mean
    public: Tensor | None = None  # examples without labels, as they are stored, that the server has
    deployed: bool = False  # real devices, not simulated ones
    traffic: Traffic = field(default_factory=Traffic)
    coding: Coding = PLAIN
    _asked: Counter[str] = field(default_factory=Counter)

    def ask(self, task: Task, inboxes: Mapping[Device, Parcel]) -> list[Reply]:
        """Have devices carry out a task. Sorted by device, so that sums do not depend on who answered first."""
        replies = self._replies(task, inboxes)
        self.traffic.asked += len(inboxes)
        self.traffic.replied += len(replies)
        for device, inbox in inboxes.items():
            self.note_down(device, inbox)
            self.traffic.carriers[device.name] = device
        for reply in replies:
            self._note(task, reply, inboxes.get(reply.device, {}))
        return replies

    def note_down(self, device: Device, parcel: Parcel) -> None:
        """Count what goes to a device."""
        traffic, size, coded = self.traffic, payload_bytes(parcel), self.coding.down_bytes(parcel)
        traffic.down += size
        traffic.moved[device.name] += size
        traffic.coded_down += coded
        traffic.travelled[device.name] += coded

    def _note(self, task: Task, reply: Reply, inbox: Parcel) -> None:
        traffic, name = self.traffic, reply.device.name
        for bundle, tensors in reply.sent.items():
            traffic.sent.setdefault(name, Counter())[bundle] += payload_bytes({bundle: tensors})
        size, coded = payload_bytes(reply.sent), self.coding.up_bytes(task, reply.sent)
        traffic.up += size
        traffic.moved[name] += size
        traffic.coded_up += coded
        traffic.travelled[name] += coded
        traffic.examples[name] = reply.examples
        norm = update_norm(reply, inbox)
        if norm is not None:
            traffic.norms[name] = norm

    def compute(self, task: Task, inboxes: Mapping[Device, Parcel]) -> list[Reply]:
        """Have the server itself carry out a task, as often as there are inboxes: nothing travels."""
        return self._replies(task, {device.on_server(): inbox for device, inbox in inboxes.items()})

    def _replies(self, task: Task, inboxes: Mapping[Device, Parcel]) -> list[Reply]:
        said = self.engine.ask(task, inboxes, self.number, self._asked[task.stream])
        self._asked[task.stream] += 1
        return sorted(said, key=lambda reply: reply.device.name)

    def probe(self, count: int) -> Tensor:
        """So many of the server's examples, others every round; all it has, if those are fewer."""
        if self.public is None:
            raise ValueError("the server has no examples of its own; set data.public")
        rows = self.draw(PUBLIC_BATCH).permutation(len(self.public))[:count]
        return self.public[torch.from_numpy(rows)]

    def draw(self, purpose: str) -> np.random.Generator:
        """This round's randomness on the server, a stream for each purpose."""
        return generator(self.fleet.seed, SERVER, purpose, self.number)
