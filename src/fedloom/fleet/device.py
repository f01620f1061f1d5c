"""Tiers, devices and replies as the server sees them, and the interface of an engine."""

from dataclasses import dataclass, replace

from ..footprints import Footprint, subnet_footprint
from ..models import Model
from ..tensors import Parcel

SERVER_PREFIX = "server."  # of the name of a device that the server stands in for


@dataclass(frozen=True, eq=False)
class Tier:
    """A class of devices: the model they can train, and its footprint in the global model.

    Parameters
    ----------
    name : the name of the tier.
    model : its model.
    footprint : where the model lies in the global model.
    """

    name: str
    model: Model
    footprint: Footprint


@dataclass(frozen=True, eq=False)
class Device:
    """What the server knows of a device, which never includes its data.

    Parameters
    ----------
    name : the name of the device.
    tier : the name of its tier.
    model : the model that it trains.
    footprint : where the model lies in the global model.
    pooled_from : simulation only: it holds the data of these devices.
    is_server : whether it is the server itself, with the model of a device and no examples.
    part : which part of the work it does, and of how many (`in_parts`).
    """

    name: str
    tier: str
    model: Model
    footprint: Footprint
    pooled_from: tuple[str, ...] = ()
    is_server: bool = False
    part: tuple[int, int] = (0, 1)

    def with_model(self, model: Model, global_model: Model, tier: str | None = None) -> "Device":
        """The same device with another part of the global model, for one request.

        Parameters
        ----------
        model : the model that it trains.
        global_model : the model that contains it.
        tier : the tier that it is treated as; None: its own.
        """
        return replace(self, tier=tier or self.tier, model=model, footprint=subnet_footprint(model, global_model))

    def on_server(self) -> "Device":
        """The server, computing with what this device has uploaded."""
        return replace(self, name=SERVER_PREFIX + self.name, is_server=True)


@dataclass(frozen=True)
class Reply:
    """A device's reply. If it is admitted, the device keeps `state` and `residual`; methods never see them.

    Parameters
    ----------
    device : the device.
    examples : the number of its training examples.
    upload : the bundles that it sends.
    state : its new state; None: unchanged.
    residual : what compression left out.
    """

    device: Device
    examples: int
    upload: Parcel
    state: Parcel | None = None
    residual: Parcel | None = None
