"""FedTGP. Zhang et al., Trainable Global Prototypes for Data and Model Heterogeneity, AAAI 2024, Algorithm 1.

As in FedProto devices with any models share the mean features of each class. But the server does not average them: it
trains global prototypes that are close to those of their class and, by a margin, far from those of all others.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from ..client import Batch, Client, ClientResult, Layout, Schedule, Sgd, fit, like, on_device, supervised_loss
from ..fleet import Fleet, RoundContext
from ..models import Model, build_model, compute_cost
from ..seeds import SERVER_ORDER, TEACH
from ..settings import Count, FrozenDict, Natural, NonNegative, Positive, SearchRange
from ..tensors import Parcel, Tensors
from ._prototypes import (
    PrototypeModels,
    compute_prototypes,
    feature_errors,
    most_prototypes,
    no_prototypes,
    prototype_distances,
    prototype_examples,
    prototype_layout,
    read_examples,
    read_features,
    uncounted_layout,
)
from ._server_training import server_client
from .method import MethodInfo


@dataclass(frozen=True)
class FedTGP(PrototypeModels):
    """FedTGP: devices with any models are pulled towards class prototypes that the server trains to be far apart.

    The margin is the largest distance between the mean prototypes of two classes (Eq. 9). The authors' program takes
    the largest distance of a class from its nearest other.

    Parameters
    ----------
    strength : the paper's lambda, the weight of the distance from the global prototypes. The authors' program has 10,
        for its mean squared error.
    distance : what is pulled: the mean features of a batch's classes, by the mean of their Euclidean distances
        ("prototypes", Eq. 11), or the features of each example, by the mean squared error ("features", as in the
        authors' program).
    max_margin : the paper's tau, the largest margin.
    server_epochs : how many epochs the server trains in a round, the paper's S.
    server_batch : its batch size.
    server_rate : the learning rate of its SGD.
    server_hidden : the width of the hidden layer of the server's net; 0: the length of the features.
    nearest : whether devices are also evaluated with the nearest global prototype instead of their last layer.
    """

    info = MethodInfo(
        paper="Zhang et al., AAAI 2024",
        uploads="mean features of each class, the set of its labels",
        client_state="its model",
        produces="personalized",
        heterogeneity="any",
        example_settings=FrozenDict(server_epochs=20),
        example_nets="unrelated",
        needs="class_labels",
    )

    strength: Annotated[NonNegative, SearchRange(0.01, 10.0, log=True)] = 0.1
    distance: Literal["prototypes", "features"] = "prototypes"
    max_margin: NonNegative = 100.0
    server_epochs: Count = 100
    server_batch: Count = 10
    server_rate: Annotated[Positive, SearchRange(0.001, 0.1, log=True)] = 0.01
    server_hidden: Natural = 0
    nearest: bool = True

    def start(self, fleet: Fleet, seed: int, warm_start: Tensors | None = None) -> Parcel:
        model = fleet.global_model
        return {"generator": self.generator(model).initial_weights(seed), "prototypes": no_prototypes(model)}

    def round(self, server: Parcel, context: RoundContext) -> Parcel:
        prototypes = {"prototypes": server["prototypes"]}
        replies = context.ask(self.train, dict.fromkeys(context.cohort, prototypes))
        if not replies:
            return server
        seed = torch.tensor(int(context.draw(SERVER_ORDER).integers(2**62)))
        inbox = {"generator": server["generator"], "examples": prototype_examples(replies), "draw": {"seed": seed}}
        for result in context.compute(self.train_prototypes, {replies[0].device: inbox}):
            return result.upload
        return server  # the server's own training was refused, because it diverged

    @on_device(sends={"prototypes": "upload_layout"}, batch_across_runs=False)
    def train(self, client: Client, inbox: Parcel) -> ClientResult:
        prototypes = inbox["prototypes"]

        def loss(weights: Tensors, batch: Batch) -> Tensor:
            outputs = client.model(weights, batch.x, batch.step_seeds)
            features = read_features(outputs)
            if self.distance == "features":
                distance = feature_errors(features, batch, prototypes)
            else:
                distances, counted = prototype_distances(features, batch, prototypes)
                distance = distances.sum(-1) / counted.sum(-1).clamp_min(1)
            return supervised_loss(outputs.logits, batch) + self.strength * distance

        weights = fit(client, client.state["weights"], loss)
        mean, count = compute_prototypes(client, weights)
        return ClientResult({"prototypes": {"mean": mean, "seen": count > 0}}, state={"weights": weights})

    def upload_layout(self, model: Model, inbox: Parcel, examples: int) -> Layout:
        return uncounted_layout(model)

    @on_device(
        sends={"generator": like("generator"), "prototypes": "server_layout"},
        stream=TEACH,
        batch_across_runs=False,
        host_bundles=("draw",),
    )
    def train_prototypes(self, client: Client, inbox: Parcel) -> ClientResult:
        """The server's training, as a client whose examples are the devices' prototypes."""
        schedule, seed = Schedule(self.server_batch, self.server_epochs), int(inbox["draw"]["seed"])
        generator, examples = self.generator(client.model), read_examples(inbox)
        classes = torch.eye(client.model.classes, device=examples.x.device).unsqueeze(0)
        server = server_client(generator, Sgd(self.server_rate), examples, schedule, seed, client.model.classes)
        margin = largest_margin(examples.x, examples.y, client.model.classes).clamp_max(self.max_margin)

        def loss(weights: Tensors, batch: Batch) -> Tensor:
            prototypes = generator(weights, classes, batch.step_seeds).logits
            distances = torch.linalg.vector_norm(batch.x.unsqueeze(2) - prototypes.unsqueeze(1), dim=-1)
            return supervised_loss(-(distances + margin * one_hot(batch.y, client.model.classes)), batch)

        weights = fit(server, inbox["generator"], loss)
        with torch.no_grad():
            mean = generator(weights, classes).logits
        return ClientResult(
            {"generator": weights, "prototypes": {"mean": mean, "count": mean.new_ones(mean.shape[:2])}}
        )

    def server_layout(self, model: Model, inbox: Parcel, examples: int) -> Layout:
        return prototype_layout(model)

    def generator(self, model: Model) -> Model:
        """The server's net, from the one-hot vector of a class to its prototype."""
        size = {"width": model.feature_width(), "hidden": self.server_hidden or model.feature_width()}
        shape = (model.classes,)
        return build_model("prototypes", prototype_generator, size | {"classes": model.classes}, shape, size["width"])

    def server_macs(self, model: Model, examples: Sequence[int]) -> float:
        """Every step generates the prototypes of all classes, and so does the server once it is trained."""
        steps = self.server_epochs * math.ceil(most_prototypes(model, examples) / self.server_batch)
        return (3.0 * steps + 1) * compute_cost(self.generator(model)).macs * model.classes


def prototype_generator(*, classes: int, width: int, hidden: int) -> nn.Module:
    """A trainable vector for each class, and two layers behind it that all classes share."""
    vectors = nn.Linear(classes, width, bias=False)
    nn.init.normal_(vectors.weight)
    return nn.Sequential(vectors, nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, width))


def largest_margin(prototypes: Tensor, labels: Tensor, classes: int) -> Tensor:
    """The largest distance between the means of two classes' prototypes; 0 without two classes."""
    members = one_hot(labels, classes).to(prototypes)
    count = members.sum(0)
    centers = (members.mT @ prototypes) / count.clamp_min(1).unsqueeze(-1)
    distances: Tensor = torch.linalg.vector_norm(centers.unsqueeze(0) - centers.unsqueeze(1), dim=-1)
    present = count > 0
    return torch.where(present.unsqueeze(0) & present.unsqueeze(1), distances, 0).max()
