"""Devices with a model of their own, as in Standalone, Ditto, FedGKT and FedHeNN."""

from typing import Protocol

from ..client import Client
from ..fleet import Device, Fleet, ModelWeights
from ..tensors import Parcel, Tensors
from .method import Method, fixed_tiers_problem, init_weights


class PersonalModels(Method, Protocol):
    """Each device keeps its model in its state and is evaluated with it."""

    def init_client(self, device: Device, seed: int, warm_start: Tensors | None = None) -> Parcel:
        return {"weights": init_weights(device, seed, warm_start)}

    def personal_model(self, client: Client, inbox: Parcel) -> ModelWeights:
        return client.model, client.state["weights"]

    def check_fleet(self, fleet: Fleet) -> str | None:
        return fixed_tiers_problem(fleet)
