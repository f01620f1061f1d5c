"""Per-FedAvg. Fallah, Mokhtari & Ozdaglar, Personalized Federated Learning, NeurIPS 2020, Algorithm 1, first order.

FedAvg of a model that is good not as it is, but after one step on a device's own data: every training step looks one
step ahead on one batch and learns, there, from another.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from ..client import Batch, Client, ClientResult, fit, gradient, label_loss, like, on_device
from ..fleet import DeviceModel, EvalTarget, ModelWeights, RoundContext, slices
from ..settings import NotNegative
from ..tensors import Parcel, Tensors, combine
from .method import Method, averaged_by_examples


@dataclass(frozen=True)
class PerFedAvg(Method):
    """`adaptation_rate` is the paper's alpha, by default the optimizer's own rate; that is its beta."""

    paper = "Fallah, Mokhtari & Ozdaglar, NeurIPS 2020"
    leaves, keeps, gives = "weights, example count", "nothing", "personalized"
    admits = "one model"

    adaptation_rate: NotNegative | None = None

    def round(self, server: Parcel, context: RoundContext) -> Parcel:
        return averaged_by_examples(self.train, server, context)

    @on_device(sends={"weights": like("weights")})
    def train(self, client: Client, inbox: Parcel) -> ClientResult:
        def ahead(weights: Tensors, first: Batch, second: Batch) -> Tensors:
            return gradient(label_loss(client), self._adapted(client, weights, first), second)

        return ClientResult(upload={"weights": fit(client, inbox["weights"], ahead, batches_per_step=2)})

    def _adapted(self, client: Client, weights: Tensors, batch: Batch) -> dict[str, Tensor]:
        rate = client.optimizer.learning_rate if self.adaptation_rate is None else self.adaptation_rate
        slope = gradient(label_loss(client), weights, batch)
        return combine(lambda weight, downhill: weight.detach() - rate * downhill, weights, slope)

    def eval_targets(self, server: Parcel) -> Mapping[str, EvalTarget]:
        return {"personal": DeviceModel(self.own, lambda device: server), "server": slices(server["weights"])}

    def own(self, client: Client, inbox: Parcel) -> ModelWeights:
        """The meta model after one step on the device's own training examples."""
        return client.model, self._adapted(client, inbox["weights"], client.batch(client.plan[0]))
