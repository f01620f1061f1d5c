"""FedProx. Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020, Algorithm 2.

FedAvg with a proximal term that keeps a device's weights close to the global model it received.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from torch import Tensor

from ..client import Batch, Client, ClientResult, distance, fit, label_loss, like, on_device
from ..fleet import RoundContext
from ..settings import NonNegative, SearchRange
from ..tensors import Parcel, Tensors
from .method import Method, MethodInfo, fedavg_round


@dataclass(frozen=True)
class FedProx(Method):
    """FedProx: FedAvg with a proximal term that keeps local training close to the global model.

    Parameters
    ----------
    proximal : the strength of the proximal term, the paper's mu; 0 is FedAvg.
    """

    per_device: ClassVar[tuple[str, ...]] = ("proximal",)

    info = MethodInfo(paper="Li et al., MLSys 2020", uploads="weights, example count", heterogeneity="one model")

    proximal: Annotated[NonNegative, SearchRange(0.001, 1.0, log=True)] = 0.1

    def round(self, server: Parcel, context: RoundContext) -> Parcel:
        return fedavg_round(self.train, server, context)

    @on_device(sends={"weights": like("weights")})
    def train(self, client: Client, inbox: Parcel) -> ClientResult:
        labels = label_loss(client)

        def loss(weights: Tensors, batch: Batch) -> Tensor:
            return labels(weights, batch) + self.proximal * distance(weights, inbox["weights"])

        return ClientResult(upload={"weights": fit(client, inbox["weights"], loss)})
