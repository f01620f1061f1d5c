"""FedProto. Tan et al., Federated Prototype Learning across Heterogeneous Clients, AAAI 2022, Algorithm 1.

Devices with any models share the mean features of each class. Every device's loss also pulls its own class means
towards the global ones, and an example can be classified by the nearest of them.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from ..client import Batch, Client, ClientResult, fit, like, on_device, supervised_loss
from ..fleet import Fleet, RoundContext
from ..settings import NonNegative, SearchRange
from ..tensors import Parcel, Tensors
from ._prototypes import (
    PrototypeModels,
    compute_prototypes,
    feature_errors,
    gather_prototypes,
    no_prototypes,
    prototype_distances,
    read_features,
)
from .method import MethodInfo


@dataclass(frozen=True)
class FedProto(PrototypeModels):
    """FedProto: devices with any models share the mean features of each class, and are pulled towards them.

    A global prototype is the mean over all examples of its class. Equation 6 divides it by the number of devices once
    more, which would only shrink it, and is left out; the authors' program takes the plain mean over devices.

    Parameters
    ----------
    strength : the paper's lambda, the weight of the distance.
    distance : what is pulled: the mean features of a batch's classes, by the sum of their Euclidean distances
        ("prototypes", Eq. 8), or the features of each example, by the mean squared error ("features", as in the
        authors' program and in HtFLlib).
    nearest : whether devices are also evaluated with the nearest prototype instead of their last layer (Eq. 4).
    """

    info = MethodInfo(
        paper="Tan et al., AAAI 2022",
        uploads="mean features and number of examples of each class",
        client_state="its model",
        produces="personalized",
        heterogeneity="any",
        example_nets="unrelated",
        needs="class_labels",
    )

    strength: Annotated[NonNegative, SearchRange(0.1, 10.0, log=True)] = 1.0
    distance: Literal["prototypes", "features"] = "prototypes"
    nearest: bool = True

    def start(self, fleet: Fleet, seed: int, warm_start: Tensors | None = None) -> Parcel:
        return {"prototypes": no_prototypes(fleet.global_model)}

    def round(self, server: Parcel, context: RoundContext) -> Parcel:
        replies = context.ask(self.train, dict.fromkeys(context.cohort, server))
        return (
            {"prototypes": average_prototypes(server["prototypes"], gather_prototypes(replies))} if replies else server
        )

    @on_device(sends={"prototypes": like("prototypes")}, batch_across_runs=False)
    def train(self, client: Client, inbox: Parcel) -> ClientResult:
        prototypes = inbox["prototypes"]

        def loss(weights: Tensors, batch: Batch) -> Tensor:
            outputs = client.model(weights, batch.x, batch.step_seeds)
            features = read_features(outputs)
            if self.distance == "features":
                distance = feature_errors(features, batch, prototypes)
            else:
                distance = prototype_distances(features, batch, prototypes)[0].sum(-1)
            return supervised_loss(outputs.logits, batch) + self.strength * distance

        weights = fit(client, client.state["weights"], loss)
        mean, count = compute_prototypes(client, weights)
        # of a class without examples it uploads what it received, so that compression has no change to send
        mean = torch.where(count.unsqueeze(-1) > 0, mean, prototypes["mean"])
        return ClientResult({"prototypes": {"mean": mean, "count": count}}, state={"weights": weights})


def average_prototypes(old: Tensors, local: Tensors) -> dict[str, Tensor]:
    """The mean over all examples of each class. A class that no device has keeps its prototype."""
    counts = local["count"].double()
    total, count = (counts.unsqueeze(-1) * local["mean"]).sum(0), counts.sum(0)
    mean = torch.where(count.unsqueeze(-1) > 0, total / count.clamp_min(1).unsqueeze(-1), old["mean"].double())
    return {"mean": mean.to(old["mean"]), "count": torch.where(count > 0, count, old["count"]).to(old["count"])}
