"""Devices that keep a model of their own: what Standalone, Ditto, FedGKT and FedHeNN have in common."""

from typing import Protocol

from ..client import Client
from ..fleet import Device, Fleet, ModelWeights
from ..tensors import Parcel, Tensors
from .method import Method, first_weights, fixed_tiers


class OwnModels(Method, Protocol):
    """Each device remembers its model, and is judged with it."""

    def prepare(self, device: Device, seed: int, warm: Tensors | None = None) -> Parcel:
        return {"weights": first_weights(device, seed, warm)}

    def own(self, client: Client, inbox: Parcel) -> ModelWeights:
        return client.model, client.state["weights"]

    def check_fleet(self, fleet: Fleet) -> str | None:
        return fixed_tiers(fleet)
