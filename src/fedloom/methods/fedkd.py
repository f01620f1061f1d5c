"""FedKD. Wu et al., Communication-Efficient Federated Learning via Knowledge Distillation, Nat. Commun. 2022, Alg. 1.

As in FML a device's own model, the mentor, and a small shared net, the mentee, learn from each other: the more, the
better their predictions are. Of the shared net's updates only the main singular values are kept, in both directions.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..client import Batch, Client, ClientResult, fit, like, on_device, supervised_loss
from ..fleet import Fleet, RoundContext
from ..models import Model
from ..settings import Count, FrozenDict, NonNegative, Share
from ..tensors import Parcel, Tensors, combine
from ._joint_step import step_together
from ._prototypes import missing_features_problem, read_features
from ._shared_net import BOTH, SharedNet, join_nets, net_of, split_nets
from .method import MethodInfo

PROJECTION = "projection:weight"  # trained and kept beside the shared net, but not sent


@dataclass(frozen=True)
class FedKD(SharedNet):
    """FedKD: a device's own model and a small shared net distill each other; updates are cut to main singular values.

    Both distillation terms are divided by the sum of the nets' label losses, gradient included. So they grow without
    bound as these approach 0: clip gradients (`training.optimizer.clip_norm`). The hidden states that are compared are
    the inputs of the last layers; attention maps, which the paper's transformers also compare, are left out. A kernel
    of a convolution is cut as a matrix with one row per output channel. The authors' program has one loss, whose
    gradient reaches both nets through every term, divides the divergence by the number of classes as well (torch's
    reduction "mean"), sends nothing of a tensor whose energy only all of its singular values exceed, and multiplies the
    factors wrongly; this follows the paper.

    What travels: the size of a message must follow from shapes, and how many singular values are left follows from
    values. So devices cut their updates here, and `compression.uplink` of kind "low_rank" sends them as factors of a
    fixed rank, as in the recipe of `fedloom init`: an update of no higher rank arrives as it was cut. Without it
    updates are sent and counted in full. The server cuts its update too, but sends whole weights: a device may have
    missed earlier updates, where in the paper all take part in every round. Decompositions are not counted as
    multiply-adds.

    Parameters
    ----------
    distillation : the weight of the nets' divergence; 1 in the paper.
    hidden : the weight of the squared difference of their features; 1 in the paper.
    energy_start : the share of the squared singular values of an update that is kept at the start of the schedule.
    energy_end : the same in its last round and after it; in between it rises linearly. 1: all is kept.
    energy_rounds : the number of rounds of the schedule.
    shared_tier : the tier whose model is the shared net; "": the smallest.
    weighting : the weight of a device in the average: the same for all, or the number of its examples.
    """

    info = MethodInfo(
        paper="Wu et al., Nat. Commun. 2022",
        uploads="updates of the shared net, cut to main singular values, example count",
        client_state="its model, a projection of features",
        produces="personalized",
        heterogeneity="any",
        example_nets="unrelated",
        example_compression=FrozenDict(uplink=FrozenDict(kind="low_rank", share=0.5, error_feedback=False)),
        needs="class_labels",
    )

    distillation: NonNegative = 1.0
    hidden: NonNegative = 1.0
    energy_start: Share = 0.95
    energy_end: Share = 0.98
    energy_rounds: Count = 100
    shared_tier: str = ""
    weighting: Literal["uniform", "examples"] = "uniform"

    def energy(self, round_number: int) -> float:
        """The share of an update's energy that is kept in a round."""
        done = min(round_number, self.energy_rounds) / self.energy_rounds
        return self.energy_start + done * (self.energy_end - self.energy_start)

    def round(self, server: Parcel, context: RoundContext) -> Parcel:
        energy = torch.tensor(self.energy(context.number))
        inbox = {"weights": server["weights"], "energy": {"share": energy}}
        replies = context.ask(self.train, dict.fromkeys(context.cohort, inbox))
        if not replies:
            return server
        mean, old = (
            combine(lambda weight: weight.unsqueeze(0), one)
            for one in (self.average_shared(server, context, replies), server["weights"])
        )
        return {"weights": combine(lambda weight: weight[0].clone(), truncate(mean, old, energy.unsqueeze(0)))}

    @on_device(sends={"weights": like("weights")}, batch_across_runs=False)
    def train(self, client: Client, inbox: Parcel) -> ClientResult:
        mentee_model, received = self.shared_model(client.tier_models), inbox["weights"]

        def loss(weights: Tensors, batch: Batch) -> Tensor:
            own, shared = split_nets(weights)
            projection = shared.pop(PROJECTION)
            mentor = client.model(own, batch.x, batch.step_seeds)
            mentee = mentee_model(shared, batch.x, batch.step_seeds)
            of_mentor, of_mentee = (supervised_loss(net.logits, batch) for net in (mentor, mentee))
            features, projected = read_features(mentor), read_features(mentee) @ projection
            return self.adaptive_loss(  # what the other net computes is a constant in a net's own loss
                of_mentor, of_mentee, divergence(mentor.logits, mentee.logits), squared_error(features, projected)
            ) + self.adaptive_loss(
                of_mentee, of_mentor, divergence(mentee.logits, mentor.logits), squared_error(projected, features)
            )

        projection = initial_projection(client, mentee_model)
        start = join_nets(client.state["weights"], {**received, PROJECTION: projection})
        own, shared = split_nets(fit(client, start, *step_together(loss, net_of, BOTH)))
        kept = {"weights": own, "projection": {"weight": shared.pop(PROJECTION)}}
        return ClientResult({"weights": truncate(shared, received, inbox["energy"]["share"])}, state=kept)

    def adaptive_loss(self, labels: Tensor, other_labels: Tensor, divergence: Tensor, hidden: Tensor) -> Tensor:
        """[K]: a net's loss. It distills less while label losses are high and predictions poor."""
        distilled = self.distillation * divergence + self.hidden * hidden
        return labels + distilled / (labels + other_labels.detach())

    def check_fleet(self, fleet: Fleet) -> str | None:
        return missing_features_problem("fedkd", fleet) or super().check_fleet(fleet)


def divergence(logits: Tensor, teacher: Tensor) -> Tensor:
    """[K]: KL(teacher || student) of the probabilities; the teacher gets no gradient."""
    targets = teacher.detach().log_softmax(-1)
    return (targets.exp() * (targets - logits.log_softmax(-1))).sum(-1).mean(1)


def squared_error(features: Tensor, teacher: Tensor) -> Tensor:
    """[K]: the mean squared difference of features; the teacher's get no gradient."""
    return (features - teacher.detach()).square().flatten(1).mean(1)


def initial_projection(client: Client, mentee: Model) -> Tensor:
    """[K, width, width]: a device's map from the mentee's features to the mentor's, at first the identity."""
    if "projection" in client.state:
        return client.state["projection"]["weight"]
    rows, columns = (
        torch.arange(model.feature_width(), device=client.seen_labels.device) for model in (mentee, client.model)
    )
    identity = (rows.unsqueeze(1) == columns).to(torch.get_default_dtype())
    return identity.expand(len(client.seen_labels), *identity.shape)


def truncate(weights: Tensors, received: Tensors, energy: Tensor) -> dict[str, Tensor]:
    """`received` and the main part of the change since: matrices keep the fewest singular values above the energy.

    `energy`, [K], is a share of the sum of their squares. Vectors are left as they are.
    """

    def main_part(new: Tensor, old: Tensor) -> Tensor:
        if new.dim() < 3:
            return new
        left, values, right = torch.linalg.svd((new - old).flatten(2), full_matrices=False)
        total = values.square().cumsum(1)
        before = total - values.square()
        kept = torch.where(before <= energy.to(total).unsqueeze(1) * total[:, -1:], values, 0)
        main: Tensor = (left * kept.unsqueeze(1)) @ right
        return old + main.view_as(new)

    return combine(main_part, weights, received)
