"""Models that a method offers for evaluation: weights on the server, one model per tier, or personal models."""

from collections.abc import Callable
from dataclasses import dataclass

from ..client import Client
from ..footprints import find_footprint
from ..models import Model
from ..tensors import Parcel, Tensors
from .device import Device, Tier

ModelWeights = tuple[Model, Tensors]
"""A model and its weights for a block of devices. Usually the devices' own model, but a method may use another."""


@dataclass(frozen=True)
class ServerModel:
    """Weights on the server, one model per tier."""

    weights: Callable[[Tier], Tensors]
    unseen_logit: float | None = None  # on a device: the logit of classes it has never seen; None: unchanged
    tiers: tuple[str, ...] = ()  # evaluated tiers; empty: all


@dataclass(frozen=True)
class DeviceModel:
    """A personal model: `load` runs on the device, `inbox` is what the server sends for it."""

    load: Callable[[Client, Parcel], ModelWeights]
    inbox: Callable[[Device], Parcel] = lambda device: {}
    unseen_logit: float | None = None
    tiers: tuple[str, ...] = ()
    ref: tuple[str, ...] = ()  # path by which another process finds `load` in the method; (): its name

    @property
    def load_ref(self) -> tuple[str, ...]:
        return self.ref or (self.load.__name__,)


EvalTarget = ServerModel | DeviceModel


def tier_slices(weights: Tensors, unseen_logit: float | None = None) -> ServerModel:
    """One global model, of which every tier evaluates its own slice."""
    shapes = {name: tensor.shape for name, tensor in weights.items()}
    return ServerModel(lambda tier: find_footprint(tier.model.shapes(), shapes).read(weights), unseen_logit)
