"""Standalone: every device trains its own model on its own data, and nothing is shared. The papers' lower bound."""

from collections.abc import Mapping
from dataclasses import dataclass

from ..client import Client, ClientResult, fit, label_loss, on_device
from ..fleet import Device, EvalTarget, Fleet, RoundContext
from ..tensors import Parcel, Tensors
from ._last_uploads import KEPT_UPLOADS, full_model_layout, initial_models, mean_of_models, updated_uploads
from ._personal import PersonalModels
from .method import MethodInfo


@dataclass(frozen=True)
class Standalone(PersonalModels):
    """Standalone: every device trains its own model on its own data, and nothing is shared (the lower bound).

    Parameters
    ----------
    report : whether to evaluate also the model with the mean of all devices' weights, which HeteroFL's Tables 1 and 2
        quote as Standalone's Global. Devices then upload their models for it, and the server keeps them.
    """

    info = MethodInfo(
        paper="the lower bound every paper compares with",
        uploads="nothing; with report, its model",
        client_state="its model",
        produces="personalized",
        heterogeneity="any",
    )

    report: bool = False

    def start(self, fleet: Fleet, seed: int, warm_start: Tensors | None = None) -> Parcel:
        return initial_models(fleet, seed, warm_start) if self.report else {}

    def round(self, server: Parcel, context: RoundContext) -> Parcel:
        inboxes: dict[Device, Parcel] = {device: {} for device in context.cohort}
        replies = context.ask(self.train_and_send if self.report else self.train, inboxes)
        return {**server, **updated_uploads(server, replies)}

    @on_device(sends={})
    def train(self, client: Client, inbox: Parcel) -> ClientResult:
        return ClientResult(upload={}, state={"weights": self._fit(client)})

    @on_device(sends={"weights": full_model_layout})
    def train_and_send(self, client: Client, inbox: Parcel) -> ClientResult:
        weights = self._fit(client)
        return ClientResult(upload={"weights": weights}, state={"weights": weights})

    def _fit(self, client: Client) -> Tensors:
        return fit(client, client.state["weights"], label_loss(client))

    def eval_targets(self, server: Parcel) -> Mapping[str, EvalTarget]:
        return {**super().eval_targets(server), **mean_of_models(server)}

    @property
    def dp_uncovered(self) -> str:
        return KEPT_UPLOADS if self.report else ""
