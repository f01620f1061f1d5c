"""Tiers, devices and replies as the server sees them, and the interface of an engine."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from ..client import Task
from ..footprints import Footprint, subnet_footprint
from ..models import Model
from ..tensors import Parcel, payload_bytes

SERVER_PREFIX = "server."  # of the name of a device that the server stands in for


@dataclass(frozen=True, eq=False)
class Tier:
    """A class of devices: the model they can train, and its footprint in the global model."""

    name: str
    model: Model
    footprint: Footprint


@dataclass(frozen=True, eq=False)
class Device:
    """What the server knows of a device, which never includes its data."""

    name: str
    tier: str
    model: Model
    footprint: Footprint
    pooled_from: tuple[str, ...] = ()  # simulation only: it holds the data of these devices
    is_server: bool = False  # the server itself, with the model of a device and no examples

    def with_model(self, model: Model, global_model: Model, tier: str | None = None) -> "Device":
        """The same device with another part of the global model, for one request; optionally as if of another tier."""
        return replace(self, tier=tier or self.tier, model=model, footprint=subnet_footprint(model, global_model))

    def on_server(self) -> "Device":
        """The server, computing with what this device has uploaded."""
        return replace(self, name=SERVER_PREFIX + self.name, is_server=True)


@dataclass(frozen=True)
class Reply:
    device: Device
    examples: int
    upload: Parcel


Ask = Callable[[Task, Mapping[Device, Parcel]], Iterable[Reply]]
"""Have these devices carry out this task. Replies come in any order, and maybe fewer than asked."""


class Coding(Protocol):
    """What parcels weigh on their way."""

    def down_bytes(self, inbox: Parcel) -> int: ...

    def up_bytes(self, task: Task, sent: Parcel) -> int: ...


class Plain:
    """Of parcels that travel as they are."""

    def down_bytes(self, inbox: Parcel) -> int:
        return payload_bytes(inbox)

    def up_bytes(self, task: Task, sent: Parcel) -> int:
        return payload_bytes(sent)


PLAIN: Coding = Plain()


class Engine(Protocol):
    """Whatever carries tasks to devices and replies back."""

    def ask(
        self, task: Task, inboxes: Mapping[Device, Parcel], round_number: int, repeat: int = 0
    ) -> Iterable[Reply]: ...

    def commit(self, round_number: int) -> None:
        """The round counts: what devices chose to remember in it is theirs from now on."""

    def close(self) -> None:
        """The run is over: end whatever was started for it."""
