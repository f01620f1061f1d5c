"""Ditto. Li et al., Fair and Robust Federated Learning Through Personalization, ICML 2021, Algorithm 1.

FedAvg and, beside it, a personal model on every device, trained on the same data and kept close to the global one.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from ..client import Batch, Client, ClientResult, distance, fit, label_loss, like, on_device
from ..fleet import DeviceModel, EvalTarget, RoundContext, tier_slices
from ..models import Model
from ..settings import NonNegative, SearchRange
from ..tensors import Parcel, Tensors
from ._personal import PersonalModels
from .method import MethodInfo, fedavg_round


@dataclass(frozen=True)
class Ditto(PersonalModels):
    """Ditto: FedAvg and, beside it, a personal model on every device that is kept close to the global one.

    Parameters
    ----------
    hold : how strongly the personal model is kept close to the global one, the paper's lambda.
    fedbabu_compat : as in FedBABU's code, the personal model starts from the global one each round, is kept close to
        the device's trained copy of it, and is what the server averages.
    """

    info = MethodInfo(
        paper="Li et al., ICML 2021",
        uploads="weights, example count",
        client_state="a personal model",
        produces="personalized",
        heterogeneity="one model",
    )

    hold: Annotated[NonNegative, SearchRange(0.01, 2.0, log=True)] = 0.75
    fedbabu_compat: bool = False

    def round(self, server: Parcel, context: RoundContext) -> Parcel:
        return fedavg_round(self.train, server, context)

    @on_device(sends={"weights": like("weights")})
    def train(self, client: Client, inbox: Parcel) -> ClientResult:
        labels, received = label_loss(client), inbox["weights"]
        trained = fit(client, received, labels)
        anchor, initial = (trained, received) if self.fedbabu_compat else (received, client.state["weights"])

        def personal_loss(weights: Tensors, batch: Batch) -> Tensor:
            return labels(weights, batch) + self.hold * distance(weights, anchor)

        personal = fit(client, initial, personal_loss)
        upload = personal if self.fedbabu_compat else trained
        return ClientResult(upload={"weights": upload}, state={"weights": personal})

    def eval_targets(self, server: Parcel) -> Mapping[str, EvalTarget]:
        return {"personal": DeviceModel(self.personal_model), "server": tier_slices(server["weights"])}

    def device_macs(self, model: Model, examples: int, steps: int) -> float:
        return 2 * super().device_macs(model, examples, steps)
