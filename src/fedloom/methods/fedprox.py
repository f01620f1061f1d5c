"""FedProx. Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020, Algorithm 2.

FedAvg whose devices are held to the global model they started from.
"""

from dataclasses import dataclass

from torch import Tensor

from ..client import Batch, Client, ClientResult, distance, fit, label_loss, like, on_device
from ..fleet import RoundContext
from ..settings import NotNegative
from ..tensors import Parcel, Tensors
from .method import Method, averaged_by_examples


@dataclass(frozen=True)
class FedProx(Method):
    """`proximal` is the paper's mu."""

    paper = "Li et al., MLSys 2020"
    leaves, keeps, gives = "weights, example count", "nothing", "global"
    admits = "one model"

    proximal: NotNegative = 0.1

    def round(self, server: Parcel, context: RoundContext) -> Parcel:
        return averaged_by_examples(self.train, server, context)

    @on_device(sends={"weights": like("weights")})
    def train(self, client: Client, inbox: Parcel) -> ClientResult:
        labels = label_loss(client)

        def loss(weights: Tensors, batch: Batch) -> Tensor:
            return labels(weights, batch) + self.proximal * distance(weights, inbox["weights"])

        return ClientResult(upload={"weights": fit(client, inbox["weights"], loss)})
