"""What is judged: models the server holds, once per tier, or models the devices hold, each where it is."""

from collections.abc import Callable
from dataclasses import dataclass

from ..tensors import Parcel, Tensors
from ..training import Client
from .device import Device, Tier


@dataclass(frozen=True)
class ServerModel:
    weights: Callable[[Tier], Tensors]
    unseen_logit: float | None = None  # where a device judges: the logit of classes it has never seen; None: as it is


@dataclass(frozen=True)
class DeviceModel:
    weights: Callable[[Client, Parcel], Tensors]  # a function of the method itself, so that devices find it by its name
    inbox: Callable[[Device], Parcel] = lambda device: {}
    unseen_logit: float | None = None


Candidate = ServerModel | DeviceModel


def slices(weights: Tensors, unseen_logit: float | None = None) -> ServerModel:
    """One global model, judged at every tier through its footprint."""
    return ServerModel(lambda tier: tier.footprint.read(weights), unseen_logit)
