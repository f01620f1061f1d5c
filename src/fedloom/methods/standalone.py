"""Standalone: every device trains its own model on its own data, and nothing is shared. The papers' lower bound."""

from dataclasses import dataclass

from ..client import Client, ClientResult, fit, label_loss, on_device
from ..fleet import Fleet, RoundContext
from ..tensors import Parcel, Tensors
from ._personal import PersonalModels
from .method import MethodInfo


@dataclass(frozen=True)
class Standalone(PersonalModels):
    """Standalone: every device trains its own model on its own data, and nothing is shared (the lower bound)."""

    info = MethodInfo(
        paper="the lower bound every paper compares with",
        uploads="nothing",
        client_state="its model",
        produces="personalized",
        heterogeneity="any",
    )
    dp_uncovered = ""

    def start(self, fleet: Fleet, seed: int, warm_start: Tensors | None = None) -> Parcel:
        return {}

    def round(self, server: Parcel, context: RoundContext) -> Parcel:
        context.ask(self.train, {device: {} for device in context.cohort})
        return server

    @on_device(sends={})
    def train(self, client: Client, inbox: Parcel) -> ClientResult:
        return ClientResult(upload={}, state={"weights": fit(client, client.state["weights"], label_loss(client))})
