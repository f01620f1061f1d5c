"""LG-FedAvg. Liang et al., Think Locally, Act Globally, 2020, Algorithm 1.

Every device trains a whole model, but only some of its layers are averaged; the others never leave the device.
"""

from dataclasses import dataclass

from ..client import Client, ClientResult, fit, label_loss, like, on_device
from ..fleet import RoundContext
from ..tensors import Parcel
from ._partial_sharing import Shared, Sharing, parted


@dataclass(frozen=True)
class LGFedAvg(Sharing):
    """`shared`: the head (the last layer, as in FedBABU's and FedSup's comparisons), the body, all, none, or the names
    of layers."""

    paper = "Liang et al., 2020"
    leaves, keeps, gives = "weights of the shared layers, example count", "the other layers", "personalized"

    shared: Shared = "head"

    def round(self, server: Parcel, context: RoundContext) -> Parcel:
        replies = context.ask(self.train, {device: self.inbox(server, device) for device in context.cohort})
        return {"weights": self.averaged(server, context, replies)}

    @on_device(sends={"weights": like("weights")})
    def train(self, client: Client, inbox: Parcel) -> ClientResult:
        shared, private = parted(fit(client, self.whole(client, inbox), label_loss(client)), inbox)
        return ClientResult(upload={"weights": shared}, state={"weights": private})
