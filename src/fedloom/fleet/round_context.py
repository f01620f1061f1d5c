"""What a method can use in a round: the cohort, requests to devices, aggregation, public data and randomness."""

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ..client import Task
from ..footprints import Aggregate, coverage_mean
from ..seeds import PUBLIC_BATCH, SERVER, generator
from ..tensors import Parcel, Tensors, payload_bytes
from .device import Device, Reply
from .engine import UNCOMPRESSED, ByteCounter, Engine, Inboxes, Request, Transport
from .tiers import Fleet


@dataclass
class Traffic:
    """Messages of a round and their sizes, counted from the parcels themselves.

    Parameters
    ----------
    bytes_down : bytes that devices received.
    bytes_up : bytes that they sent.
    asked : the number of messages to devices.
    replied : the number of replies.
    bytes_by_device : both directions, by device.
    examples : the number of examples that each device reported.
    devices : the devices that were asked, by name.
    uploaded : bytes by device and bundle.
    norms : `update_norm` of each device's last reply.
    compressed_bytes_down : bytes that devices received, as they travelled.
    compressed_bytes_up : bytes that they sent, as they travelled.
    compressed_by_device : both directions, by device.
    """

    bytes_down: int = 0
    bytes_up: int = 0
    asked: int = 0
    replied: int = 0
    bytes_by_device: Counter[str] = field(default_factory=Counter)
    examples: dict[str, int] = field(default_factory=dict)
    devices: dict[str, Device] = field(default_factory=dict)
    uploaded: dict[str, Counter[str]] = field(default_factory=dict)
    norms: dict[str, float] = field(default_factory=dict)
    compressed_bytes_down: int = 0
    compressed_bytes_up: int = 0
    compressed_by_device: Counter[str] = field(default_factory=Counter)


@dataclass
class Responses:
    """Which devices were asked in a round, and which of them answered everything they were asked.

    Parameters
    ----------
    asked : the devices that were asked, by name.
    missing : the names of those that missed a request.
    waited : seconds that the server waited.
    """

    asked: dict[str, Device] = field(default_factory=dict)
    missing: set[str] = field(default_factory=set)
    waited: float = 0.0

    def note(self, inboxes: Inboxes, replies: Sequence[Reply]) -> None:
        """Record a request and its replies.

        Parameters
        ----------
        inboxes : the devices that were asked.
        replies : the replies that came.
        """
        asked = {device.name: device for device in inboxes if not device.is_server}
        self.asked |= asked
        self.missing |= asked.keys() - {reply.device.name for reply in replies}

    def answered(self) -> list[Device]:
        """The devices that answered everything they were asked."""
        return [device for name, device in self.asked.items() if name not in self.missing]


@dataclass(frozen=True)
class RoundContext:
    """What a method can use in a round.

    Parameters
    ----------
    number : the number of the round, from 1.
    cohort : the devices of the round, in order of name.
    fleet : all devices, their tiers and the global model.
    engine : carries tasks to devices; methods use `ask`.
    aggregate : averages updates into the global model: the coverage mean, a robust rule, or one with differential
        privacy.
    public : unlabeled examples of the server, not prepared yet; methods use `public_batch`.
    deployed : whether the devices are real ones, not a simulation.
    traffic : the messages of the round.
    wire : how large parcels are as they travel.
    transports : what happens to messages, from the server to the devices.
    deadline : seconds from the start of the round.
    needed : the share of the asked devices whose replies are enough.
    responses : which devices answered.
    started : the time at which the round started, by `time.monotonic`.
    """

    number: int
    cohort: list[Device]
    fleet: Fleet
    engine: Engine
    aggregate: Aggregate = coverage_mean
    public: Tensor | None = None
    deployed: bool = False
    traffic: Traffic = field(default_factory=Traffic)
    wire: ByteCounter = UNCOMPRESSED
    transports: tuple[Transport, ...] = ()
    deadline: float = math.inf
    needed: float = 1.0
    responses: Responses = field(default_factory=Responses)
    started: float = field(default_factory=time.monotonic)
    _asked: Counter[str] = field(default_factory=Counter)

    def ask(self, task: Task, inboxes: Mapping[Device, Parcel]) -> list[Reply]:
        """Have devices carry out a task. A round may ask as often as the algorithm needs.

        Parameters
        ----------
        task : a method of the algorithm with the decorator `@on_device`.
        inboxes : what each device receives.

        Returns
        -------
        The replies, sorted by device, so that sums do not depend on who answered first. Some devices may not reply.

        Examples
        --------
        >>> inboxes = {device: {"weights": device.footprint.read(server["weights"])} for device in context.cohort}
        >>> replies = context.ask(self.train, inboxes)
        >>> replies[0].device, replies[0].examples, replies[0].upload["weights"]
        """
        replies = self._replies(task, inboxes)
        self.traffic.asked += len(inboxes)
        self.traffic.replied += len(replies)
        for device, inbox in inboxes.items():
            self.count_download(device, inbox)
            self.traffic.devices[device.name] = device
        for reply in replies:
            self._count_upload(task, reply, inboxes.get(reply.device, {}))
        return replies

    def count_download(self, device: Device, parcel: Parcel) -> None:
        """Record that a parcel is sent to a device.

        Parameters
        ----------
        device : the device.
        parcel : what is sent.
        """
        traffic, size, compressed = self.traffic, payload_bytes(parcel), self.wire.bytes_down(parcel)
        traffic.bytes_down += size
        traffic.bytes_by_device[device.name] += size
        traffic.compressed_bytes_down += compressed
        traffic.compressed_by_device[device.name] += compressed

    def _count_upload(self, task: Task, reply: Reply, inbox: Parcel) -> None:
        traffic, name = self.traffic, reply.device.name
        for bundle, tensors in reply.upload.items():
            traffic.uploaded.setdefault(name, Counter())[bundle] += payload_bytes({bundle: tensors})
        size, compressed = payload_bytes(reply.upload), self.wire.bytes_up(task, reply.upload)
        traffic.bytes_up += size
        traffic.bytes_by_device[name] += size
        traffic.compressed_bytes_up += compressed
        traffic.compressed_by_device[name] += compressed
        traffic.examples[name] = reply.examples
        norm = update_norm(reply, inbox)
        if norm is not None:
            traffic.norms[name] = norm

    def compute(self, task: Task, inboxes: Mapping[Device, Parcel]) -> list[Reply]:
        """Have the server itself run a task, once per inbox; no bytes are counted.

        Parameters
        ----------
        task : the task.
        inboxes : what the server uses in place of each device.
        """
        return self._replies(task, {device.on_server(): inbox for device, inbox in inboxes.items()})

    def _replies(self, task: Task, inboxes: Mapping[Device, Parcel]) -> list[Reply]:
        request = Request(
            task,
            inboxes,
            self.number,
            self._asked[task.stream],
            self.deadline,
            max(1, math.floor(self.needed * len(inboxes) + 1e-9)),
            self.transports,
            self.started,
        )
        self._asked[task.stream] += 1
        replies = sorted(self.engine.ask(request), key=lambda reply: reply.device.name)
        self.responses.note(inboxes, replies)
        return replies

    def public_batch(self, count: int) -> Tensor:
        """Some of the server's unlabeled examples, drawn anew every round.

        Parameters
        ----------
        count : how many, if there are so many.
        """
        if self.public is None:
            raise ValueError("the server has no examples of its own; set data.public")
        rows = self.draw(PUBLIC_BATCH).permutation(len(self.public))[:count]
        return self.public[torch.from_numpy(rows)]

    def draw(self, purpose: str) -> np.random.Generator:
        """The server's random generator for one purpose in this round.

        Parameters
        ----------
        purpose : a name for what is drawn; two purposes draw independently.
        """
        return generator(self.fleet.seed, SERVER, purpose, self.number)


def update_norm(reply: Reply, inbox: Parcel) -> float | None:
    """The L2 norm of a device's change over all bundles with the layout they have in the inbox; None without any."""
    updated = [bundle for bundle, tensors in reply.upload.items() if _is_update(tensors, inbox.get(bundle, {}))]
    if not updated or reply.device.is_server:
        return None
    squares = (_squared_distance(reply.upload[b][name], old) for b in updated for name, old in inbox[b].items())
    return math.sqrt(sum(squares))


def _is_update(new: Tensors, old: Tensors) -> bool:
    return (
        bool(new)
        and new.keys() == old.keys()
        and all(_is_updated_tensor(tensor, old[name]) for name, tensor in new.items())
    )


def _is_updated_tensor(new: Tensor, old: Tensor) -> bool:
    return new.shape == old.shape and new.is_floating_point() and not new.is_meta  # a dry run has no values


def _squared_distance(new: Tensor, old: Tensor) -> float:
    return float((new.double() - old.double()).square().sum())
