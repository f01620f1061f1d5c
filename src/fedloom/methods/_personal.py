"""Devices that keep a model of their own: what Standalone, Ditto, FedGKT and FedHeNN have in common."""

from typing import Protocol

from ..client import Client
from ..fleet import Carried, Device, Fleet
from ..tensors import Parcel, Tensors
from .method import Method, first_weights, fixed_tiers


class OwnModels(Method, Protocol):
    """Each device remembers its model, and is judged with it."""

    def prepare(self, device: Device, seed: int, warm: Tensors | None = None) -> Parcel:
        return {"weights": first_weights(device, seed, warm)}

    def own(self, client: Client, inbox: Parcel) -> Carried:
        return client.model, client.memory["weights"]

    def objection(self, fleet: Fleet) -> str | None:
        return fixed_tiers(fleet)
