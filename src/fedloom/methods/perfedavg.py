"""Per-FedAvg. Fallah, Mokhtari & Ozdaglar, Personalized Federated Learning, NeurIPS 2020, Algorithm 1, first order.

FedAvg of a model that is good after one step on a device's own data: every training step takes one step on one batch
and uses the gradient, at that point, of another batch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from ..client import Batch, Client, ClientResult, fit, gradient, label_loss, like, on_device
from ..fleet import DeviceModel, EvalTarget, ModelWeights, RoundContext, tier_slices
from ..settings import NonNegative, SearchRange
from ..tensors import Parcel, Tensors, combine, per_device
from .method import Method, MethodInfo, fedavg_round


@dataclass(frozen=True)
class PerFedAvg(Method):
    """Per-FedAvg: FedAvg of a model that is good after one step on a device's own data (first order).

    Parameters
    ----------
    adaptation_rate : the learning rate of that step, the paper's alpha; None: the optimizer's, which is the paper's
        beta.
    """

    info = MethodInfo(
        paper="Fallah, Mokhtari & Ozdaglar, NeurIPS 2020",
        uploads="weights, example count",
        produces="personalized",
        heterogeneity="one model",
    )

    adaptation_rate: Annotated[NonNegative | None, SearchRange(0.001, 0.3, log=True)] = None

    def round(self, server: Parcel, context: RoundContext) -> Parcel:
        return fedavg_round(self.train, server, context)

    @on_device(sends={"weights": like("weights")})
    def train(self, client: Client, inbox: Parcel) -> ClientResult:
        def meta_gradient(weights: Tensors, first: Batch, second: Batch) -> Tensors:
            return gradient(label_loss(client), self._adapt(client, weights, first), second)

        return ClientResult(upload={"weights": fit(client, inbox["weights"], meta_gradient, batches_per_step=2)})

    def _adapt(self, client: Client, weights: Tensors, batch: Batch) -> dict[str, Tensor]:
        rate = client.learning_rates
        if self.adaptation_rate is not None:
            rate = torch.full_like(rate, self.adaptation_rate)
        gradients = gradient(label_loss(client), weights, batch)
        return combine(
            lambda weight, grad: weight.detach() - per_device(rate.to(grad), grad) * grad, weights, gradients
        )

    def eval_targets(self, server: Parcel) -> Mapping[str, EvalTarget]:
        personal = DeviceModel(self.personal_model, lambda device: server)
        return {"personal": personal, "server": tier_slices(server["weights"])}

    def personal_model(self, client: Client, inbox: Parcel) -> ModelWeights:
        """The global model after one step on the device's own training examples."""
        return client.model, self._adapt(client, inbox["weights"], client.batch(client.plan[0]))
