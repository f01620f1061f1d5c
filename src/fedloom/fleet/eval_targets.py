"""Models that a method offers for evaluation: weights on the server, one model per tier, or personal models."""

from collections.abc import Callable
from dataclasses import dataclass

from ..client import Client
from ..footprints import read_submodel
from ..models import Model
from ..tensors import Parcel, Tensors
from .device import Device, Tier

ModelWeights = tuple[Model, Tensors]
"""A model and its weights for a block of devices. Usually the devices' own model, but a method may use another."""


@dataclass(frozen=True)
class ServerModel:
    """A model to evaluate whose weights are on the server, one per tier.

    Parameters
    ----------
    weights : the weights for a tier.
    unseen_logit : on a device: the logit of classes it has never seen; None: unchanged.
    tiers : the tiers that are evaluated; empty: all.
    """

    weights: Callable[[Tier], Tensors]
    unseen_logit: float | None = None
    tiers: tuple[str, ...] = ()


@dataclass(frozen=True)
class DeviceModel:
    """A personal model to evaluate, which is loaded on the device.

    Parameters
    ----------
    load : runs on the device: (client, inbox) -> model and weights. A method of the class.
    inbox : what the server sends for it.
    unseen_logit : the logit of classes that the device has never seen; None: unchanged.
    tiers : the tiers that are evaluated; empty: all.
    ref : the path by which another process finds `load` in the method; (): its name.
    """

    load: Callable[[Client, Parcel], ModelWeights]
    inbox: Callable[[Device], Parcel] = lambda device: {}
    unseen_logit: float | None = None
    tiers: tuple[str, ...] = ()
    ref: tuple[str, ...] = ()

    @property
    def load_ref(self) -> tuple[str, ...]:
        """The path by which another process finds `load` in the method."""
        return self.ref or (self.load.__name__,)


EvalTarget = ServerModel | DeviceModel


def tier_slices(weights: Tensors, unseen_logit: float | None = None) -> ServerModel:
    """One global model, of which every tier evaluates its own slice.

    Parameters
    ----------
    weights : the global weights.
    unseen_logit : on a device: the logit of classes it has never seen; None: unchanged.
    """
    return ServerModel(lambda tier: read_submodel(tier.model.shapes(), tier.footprint, weights), unseen_logit)
