"""FML. Shen et al., Federated Mutual Learning, 2020, Algorithm 1.

Every device has a model of its own, of any architecture, and a copy of a small shared net, the paper's meme. The two
learn from the labels and from each other's predictions; the shared nets are averaged.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from torch import Tensor

from ..client import Batch, Client, ClientResult, distillation_loss, fit, like, on_device, supervised_loss
from ..fleet import RoundContext
from ..settings import Fraction, SearchRange
from ..tensors import Parcel, Tensors
from ._joint_step import step_together
from ._shared_net import BOTH, SharedNet, join_nets, net_of, split_nets
from .method import MethodInfo


@dataclass(frozen=True)
class FML(SharedNet):
    """FML: a device's own model and a small shared net learn from each other, and the shared net is averaged.

    The nets' divergence is Kullback-Leibler's of their probabilities. For tasks without classes, which the paper does
    not have, it is what `distillation_loss` measures. The authors' program never averages the shared nets: the lines
    that would are commented out.

    Parameters
    ----------
    alpha : the weight of the labels in the loss of a device's own model; 1 - alpha is that of the shared net's
        predictions.
    beta : the same in the loss of the shared net.
    shared_tier : the tier whose model is the shared net; "": the smallest.
    weighting : the weight of a device in the average: the same for all, or the number of its examples.
    """

    info = MethodInfo(
        paper="Shen et al., 2020",
        uploads="weights of the shared net, example count",
        client_state="its model",
        produces="personalized",
        heterogeneity="any",
        example_nets="unrelated",
    )

    alpha: Annotated[Fraction, SearchRange(0.1, 0.9)] = 0.5
    beta: Annotated[Fraction, SearchRange(0.1, 0.9)] = 0.5
    shared_tier: str = ""
    weighting: Literal["uniform", "examples"] = "uniform"

    def round(self, server: Parcel, context: RoundContext) -> Parcel:
        replies = context.ask(self.train, dict.fromkeys(context.cohort, server))
        return {"weights": self.average_shared(server, context, replies)}

    @on_device(sends={"weights": like("weights")}, batch_across_runs=False)
    def train(self, client: Client, inbox: Parcel) -> ClientResult:
        shared_model = self.shared_model(client.tier_models)

        def loss(weights: Tensors, batch: Batch) -> Tensor:
            own, shared = split_nets(weights)
            local = client.model(own, batch.x, batch.step_seeds).logits
            meme = shared_model(shared, batch.x, batch.step_seeds).logits
            by_labels = self.alpha * supervised_loss(local, batch) + self.beta * supervised_loss(meme, batch)
            from_meme, from_local = (
                distillation_loss(student, teacher, client.task) for student, teacher in ((local, meme), (meme, local))
            )
            return by_labels + (1 - self.alpha) * from_meme + (1 - self.beta) * from_local

        trained = fit(client, join_nets(client.state["weights"], inbox["weights"]), *step_together(loss, net_of, BOTH))
        own, shared = split_nets(trained)
        return ClientResult(upload={"weights": shared}, state={"weights": own})
