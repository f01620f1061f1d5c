"""Standalone: every device trains the model it can carry on its own data, and nothing is shared."""

from collections.abc import Mapping
from dataclasses import dataclass

from ..client import Client, ClientResult, fit, label_loss, on_device
from ..fleet import DeviceModel, EvalTarget, Fleet, RoundContext
from ..tensors import Parcel, Tensors
from ._personal import OwnModels


@dataclass(frozen=True)
class Standalone(OwnModels):
    paper = "the floor every paper compares with"
    leaves, keeps, gives = "nothing", "its model", "personalized"
    admits = "any models"
    dp_uncovered = ""

    def start(self, fleet: Fleet, seed: int, warm: Tensors | None = None) -> Parcel:
        return {}

    def round(self, server: Parcel, context: RoundContext) -> Parcel:
        context.ask(self.train, {device: {} for device in context.cohort})
        return server

    @on_device(sends={})
    def train(self, client: Client, inbox: Parcel) -> ClientResult:
        return ClientResult(upload={}, state={"weights": fit(client, client.state["weights"], label_loss(client))})

    def eval_targets(self, server: Parcel) -> Mapping[str, EvalTarget]:
        return {"personal": DeviceModel(self.own)}
