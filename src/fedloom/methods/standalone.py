"""Standalone: every device trains the model it can carry on its own data, and nothing is shared."""

from collections.abc import Mapping
from dataclasses import dataclass

from ..fleet import Candidate, Device, DeviceModel, Fleet, Turn
from ..tensors import Parcel, Tensors
from ..training import Client, Outcome, fit, label_loss, on_device
from .method import Method


@dataclass(frozen=True)
class Standalone(Method):
    paper = "the floor every paper compares with"
    leaves, keeps, gives = "nothing", "its model", "personalised"

    def start(self, fleet: Fleet, seed: int, warm: Tensors | None = None) -> Parcel:
        return {}

    def prepare(self, device: Device, seed: int) -> Parcel:
        return {"weights": device.model.initial(seed)}

    def round(self, server: Parcel, turn: Turn) -> Parcel:
        turn.ask(self.train, {device: {} for device in turn.cohort})
        return server

    @on_device(sends={})
    def train(self, client: Client, inbox: Parcel) -> Outcome:
        return Outcome(send={}, remember={"weights": fit(client, client.memory["weights"], label_loss(client))})

    def candidates(self, server: Parcel) -> Mapping[str, Candidate]:
        return {"personal": DeviceModel(self.own)}

    def own(self, client: Client, inbox: Parcel) -> Tensors:
        return client.memory["weights"]

    def refuses(self, fleet: Fleet) -> str | None:
        if fleet.assignment == "fixed":
            return None
        return "standalone keeps a model on each device, so a device's tier cannot be redrawn every round"
