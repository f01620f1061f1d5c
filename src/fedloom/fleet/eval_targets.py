"""What is judged: models the server holds, once per tier, or models the devices hold, each where it is."""

from collections.abc import Callable
from dataclasses import dataclass

from ..client import Client
from ..footprints import find_footprint
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
    load: Callable[[Client, Parcel], ModelWeights]
    inbox: Callable[[Device], Parcel] = lambda device: {}
    unseen_logit: float | None = None
    tiers: tuple[str, ...] = ()
    ref: tuple[str, ...] = ()  # where a method's `find` finds `load`; (): under its own name

    @property
    def load_ref(self) -> tuple[str, ...]:
        return self.ref or (self.load.__name__,)


EvalTarget = ServerModel | DeviceModel


def tier_slices(weights: Tensors, unseen_logit: float | None = None) -> ServerModel:
    """One global model, judged at every tier as the part of it that the tier's model is."""
    whole = {name: tensor.shape for name, tensor in weights.items()}
    return ServerModel(lambda tier: find_footprint(tier.model.shapes(), whole).read(weights), unseen_logit)
