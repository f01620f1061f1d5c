"""Ditto. Li et al., Fair and Robust Federated Learning Through Personalization, ICML 2021, Algorithm 1.

FedAvg, and beside it a model of its own on every device, trained on the same data and held to the global one.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from ..client import Batch, Client, ClientResult, distance, fit, label_loss, like, on_device
from ..fleet import DeviceModel, EvalTarget, RoundContext, slices
from ..models import Model
from ..settings import NotNegative
from ..tensors import Parcel, Tensors
from ._personal import OwnModels
from .method import averaged_by_examples


@dataclass(frozen=True)
class Ditto(OwnModels):
    """`hold` is the paper's lambda. `fedbabu_compat` is what FedBABU's code does instead: the personal model starts
    anew from the global one, is held to the device's own trained copy of it, and is what the server averages."""

    paper = "Li et al., ICML 2021"
    leaves, keeps, gives = "weights, example count", "a personal model", "personalized"
    admits = "one model"

    hold: NotNegative = 0.75
    fedbabu_compat: bool = False

    def round(self, server: Parcel, context: RoundContext) -> Parcel:
        return averaged_by_examples(self.train, server, context)

    @on_device(sends={"weights": like("weights")})
    def train(self, client: Client, inbox: Parcel) -> ClientResult:
        labels, given = label_loss(client), inbox["weights"]
        trained = fit(client, given, labels)
        anchor, first = (trained, given) if self.fedbabu_compat else (given, client.state["weights"])

        def held(weights: Tensors, batch: Batch) -> Tensor:
            return labels(weights, batch) + self.hold * distance(weights, anchor)

        personal = fit(client, first, held)
        sent = personal if self.fedbabu_compat else trained
        return ClientResult(upload={"weights": sent}, state={"weights": personal})

    def device_macs(self, model: Model, examples: int, steps: int) -> float:
        return 2 * super().device_macs(model, examples, steps)

    def eval_targets(self, server: Parcel) -> Mapping[str, EvalTarget]:
        return {"personal": DeviceModel(self.own), "server": slices(server["weights"])}
