"""What is judged: models the server holds, once per tier, or models the devices hold, each where it is."""

from collections.abc import Callable
from dataclasses import dataclass

from ..client import Client
from ..footprints import between
from ..models import Model
from ..tensors import Parcel, Tensors
from .device import Device, Tier


@dataclass(frozen=True)
class ServerModel:
    weights: Callable[[Tier], Tensors]
    unseen_logit: float | None = None  # where a device judges: the logit of classes it has never seen; None: as it is
    tiers: tuple[str, ...] = ()  # those it is for; empty: all


ModelWeights = tuple[Model, Tensors]
"""A model of a block of devices and its weights: mostly their own, but a method may have them judge another."""


@dataclass(frozen=True)
class DeviceModel:
    carried: Callable[[Client, Parcel], ModelWeights]
    inbox: Callable[[Device], Parcel] = lambda device: {}
    unseen_logit: float | None = None
    tiers: tuple[str, ...] = ()
    address: tuple[str, ...] = ()  # where a method's `find` finds `carried`; (): under its own name

    @property
    def found_at(self) -> tuple[str, ...]:
        return self.address or (self.carried.__name__,)


EvalTarget = ServerModel | DeviceModel


def slices(weights: Tensors, unseen_logit: float | None = None) -> ServerModel:
    """One global model, judged at every tier as the part of it that the tier's model is."""
    whole = {name: tensor.shape for name, tensor in weights.items()}
    return ServerModel(lambda tier: between(tier.model.shapes(), whole).read(weights), unseen_logit)
