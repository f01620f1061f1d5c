"""LG-FedAvg. Liang et al., Think Locally, Act Globally, 2020, Algorithm 1.

Every device trains a whole model, but only some of its layers are averaged; the others never leave the device.
"""

from dataclasses import dataclass

from ..client import Client, ClientResult, fit, label_loss, like, on_device
from ..fleet import RoundContext
from ..tensors import Parcel
from ._personal import PartialSharing, Shared, split_shared
from .method import MethodInfo


@dataclass(frozen=True)
class LGFedAvg(PartialSharing):
    """LG-FedAvg: every device trains a whole model, but only some of its layers are averaged.

    Parameters
    ----------
    shared : the layers that are averaged: "head", the last layer, as in FedBABU's and FedSup's comparisons; "body", all
        others; "all"; "none"; or the names of layers.
    """

    info = MethodInfo(
        paper="Liang et al., 2020",
        uploads="weights of the shared layers, example count",
        client_state="the other layers",
        produces="personalized",
    )

    shared: Shared = "head"

    def round(self, server: Parcel, context: RoundContext) -> Parcel:
        replies = context.ask(self.train, {device: self.inbox(server, device) for device in context.cohort})
        return {"weights": self.aggregate_shared(server, context, replies)}

    @on_device(sends={"weights": like("weights")})
    def train(self, client: Client, inbox: Parcel) -> ClientResult:
        weights = fit(client, self.full_weights(client, inbox), label_loss(client))
        shared, private = split_shared(weights, inbox)
        return ClientResult(upload={"weights": shared}, state={"weights": private})
