"""The devices as the server knows them, and the answers they give."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from ..client import Task
from ..footprints import Footprint, part_of
from ..models import Model
from ..tensors import Parcel, payload_bytes

SERVER_PREFIX = "server."  # before the name of a device for which the server computes


@dataclass(frozen=True, eq=False)
class Tier:
    """A class of devices: the model they can carry, and where it lies in the global one."""

    name: str
    model: Model
    footprint: Footprint


@dataclass(frozen=True, eq=False)
class Device:
    """What the server may know of a device: never its data."""

    name: str
    tier: str
    model: Model
    footprint: Footprint
    pooled_from: tuple[str, ...] = ()  # in simulation alone: a device that holds what these devices hold
    is_server: bool = False  # the server itself, which computes with a device's model and has no examples

    def with_model(self, model: Model, whole: Model, tier: str | None = None) -> "Device":
        """The same device with another part of the global model on it, for this question; as if of another tier."""
        return replace(self, tier=tier or self.tier, model=model, footprint=part_of(model, whole))

    def on_server(self) -> "Device":
        """Whoever computes for the server with what this device has sent."""
        return replace(self, name=SERVER_PREFIX + self.name, is_server=True)


@dataclass(frozen=True)
class Reply:
    device: Device
    examples: int
    sent: Parcel


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
