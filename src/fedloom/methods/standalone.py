"""Standalone: every device trains the model it can carry on its own data, and nothing is shared."""

from collections.abc import Mapping
from dataclasses import dataclass

from ..client import Client, Outcome, fit, label_loss, on_device
from ..fleet import Candidate, DeviceModel, Fleet, Turn
from ..tensors import Parcel, Tensors
from ._personal import OwnModels


@dataclass(frozen=True)
class Standalone(OwnModels):
    paper = "the floor every paper compares with"
    leaves, keeps, gives = "nothing", "its model", "personalised"
    admits = "any models"
    unmerged = ""

    def start(self, fleet: Fleet, seed: int, warm: Tensors | None = None) -> Parcel:
        return {}

    def round(self, server: Parcel, turn: Turn) -> Parcel:
        turn.ask(self.train, {device: {} for device in turn.cohort})
        return server

    @on_device(sends={})
    def train(self, client: Client, inbox: Parcel) -> Outcome:
        return Outcome(send={}, remember={"weights": fit(client, client.memory["weights"], label_loss(client))})

    def candidates(self, server: Parcel) -> Mapping[str, Candidate]:
        return {"personal": DeviceModel(self.own)}
