"""What a method lets the evaluator evaluate: models of the server, one per tier, or models on the devices."""

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
    weights: Callable[[Tier], Tensors]
    unseen_logit: float | None = None  # on a device: the logit of classes it has never seen; None: unchanged
    tiers: tuple[str, ...] = ()  # evaluated tiers; empty: all


@dataclass(frozen=True)
class DeviceModel:
    load: Callable[[Client, Parcel], ModelWeights]
    inbox: Callable[[Device], Parcel] = lambda device: {}
    unseen_logit: float | None = None
    tiers: tuple[str, ...] = ()
    ref: tuple[str, ...] = ()  # with which the method's `find` returns `load`; (): its name

    @property
    def load_ref(self) -> tuple[str, ...]:
        return self.ref or (self.load.__name__,)


EvalTarget = ServerModel | DeviceModel


def tier_slices(weights: Tensors, unseen_logit: float | None = None) -> ServerModel:
    """One global model, evaluated at every tier as the part of it that is the tier's model."""
    shapes = {name: tensor.shape for name, tensor in weights.items()}
    return ServerModel(lambda tier: find_footprint(tier.model.shapes(), shapes).read(weights), unseen_logit)
