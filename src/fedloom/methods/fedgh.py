"""FedGH. Yi et al., Heterogeneous Federated Learning with Generalized Global Header, MM 2023, Algorithm 1.

Devices with any models upload the mean features of each class. The server trains one last layer, the global header, on
all of them, and in the next round every device trains with it in place of its own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import nn

from ..client import Client, ClientResult, Layout, Schedule, Sgd, fit, label_loss, like, on_device
from ..fleet import DeviceModel, EvalTarget, Fleet, ModelWeights, RoundContext
from ..models import Model, build_model, compute_cost
from ..seeds import SERVER_ORDER, TEACH
from ..settings import Count, Positive, SearchRange
from ..tensors import Parcel, Tensors
from ._personal import PersonalModels
from ._prototypes import (
    compute_prototypes,
    features_problem,
    find_head,
    linear_head_problem,
    most_prototypes,
    prototype_examples,
    read_examples,
    uncounted_layout,
)
from ._server_training import server_client
from .method import MethodInfo


@dataclass(frozen=True)
class FedGH(PersonalModels):
    """FedGH: the server trains a last layer for all devices on the mean features of each class on each of them.

    The server takes one step for every device and class, as in the paper, in random order. The authors' program steps
    an optimizer of another net, so that its header stays as it was drawn.

    Parameters
    ----------
    server_rate : the learning rate of the server's SGD; the paper's is that of the devices, 0.01.
    server_batch : how many of the uploaded features the server uses in a step.
    server_epochs : how often it uses all of them in a round.
    """

    info = MethodInfo(
        paper="Yi et al., MM 2023",
        uploads="mean features of each class, the set of its labels",
        client_state="its model",
        produces="personalized",
        heterogeneity="any",
        example_nets="unrelated",
        needs="class_labels",
    )

    server_rate: Annotated[Positive, SearchRange(0.001, 0.1, log=True)] = 0.01
    server_batch: Count = 1
    server_epochs: Count = 1

    def start(self, fleet: Fleet, seed: int, warm_start: Tensors | None = None) -> Parcel:
        model = fleet.global_model
        weights = warm_start or model.initial_weights(seed)
        return {"header": {part: weights[name] for part, name in find_head(model).items()}}

    def round(self, server: Parcel, context: RoundContext) -> Parcel:
        replies = context.ask(self.train, dict.fromkeys(context.cohort, server))
        if not replies:
            return server
        seed = torch.tensor(int(context.draw(SERVER_ORDER).integers(2**62)))
        inbox = {**server, "examples": prototype_examples(replies), "draw": {"seed": seed}}
        for result in context.compute(self.train_header, {replies[0].device: inbox}):
            return result.upload
        return server  # the server's own training was refused, because it diverged

    @on_device(sends={"prototypes": "upload_layout"}, batch_across_runs=False)
    def train(self, client: Client, inbox: Parcel) -> ClientResult:
        _, start = self.headed_model(client, inbox)
        weights = fit(client, start, label_loss(client))
        mean, count = compute_prototypes(client, weights)
        return ClientResult({"prototypes": {"mean": mean, "seen": count > 0}}, state={"weights": weights})

    def upload_layout(self, model: Model, inbox: Parcel, examples: int) -> Layout:
        return uncounted_layout(model)

    @on_device(sends={"header": like("header")}, stream=TEACH, batch_across_runs=False, host_bundles=("draw",))
    def train_header(self, client: Client, inbox: Parcel) -> ClientResult:
        """The server's training, as a client whose examples are the devices' class means."""
        schedule = Schedule(self.server_batch, self.server_epochs)
        examples, seed = read_examples(inbox), int(inbox["draw"]["seed"])
        server = server_client(
            header_model(client.model), Sgd(self.server_rate), examples, schedule, seed, client.model.classes
        )
        return ClientResult(upload={"header": fit(server, inbox["header"], label_loss(server))})

    def eval_targets(self, server: Parcel) -> Mapping[str, EvalTarget]:
        return {**super().eval_targets(server), "header": DeviceModel(self.headed_model, lambda device: server)}

    def headed_model(self, client: Client, inbox: Parcel) -> ModelWeights:
        """A device's model with the global header in place of its last layer."""
        replaced = {name: inbox["header"][part] for part, name in find_head(client.model).items()}
        return client.model, {**client.state["weights"], **replaced}

    def check_fleet(self, fleet: Fleet) -> str | None:
        problem = features_problem("fedgh", fleet) or linear_head_problem("fedgh shares", fleet, "")
        return problem or super().check_fleet(fleet)

    def server_macs(self, model: Model, examples: Sequence[int]) -> float:
        macs = compute_cost(header_model(model)).macs
        return 3.0 * self.server_epochs * macs * most_prototypes(model, examples)


def header_model(model: Model) -> Model:
    """A net's last layer as a model of its own."""
    width = model.feature_width()
    return build_model(
        "header", nn.Linear, {"in_features": width, "out_features": model.classes}, (width,), model.classes
    )
