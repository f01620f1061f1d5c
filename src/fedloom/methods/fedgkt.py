"""FedGKT. He, Annavaram & Avestimehr, Group Knowledge Transfer, NeurIPS 2020, Algorithm 1.

A device trains a small model and uploads features, logits and labels of its examples. The server trains a large model
on the features and sends its logits back. Each side learns from the labels and from the other side's logits.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ..client import (
    Adam,
    Batch,
    Bounded,
    Client,
    ClientResult,
    Layout,
    Schedule,
    fit,
    like,
    on_device,
    supervised_loss,
    with_batchnorm_statistics,
)
from ..data import Examples
from ..fleet import Device, DeviceModel, EvalTarget, Fleet, ModelWeights, Reply, RoundContext
from ..models import MODELS, Model, build_model, chain_models, compute_cost
from ..seeds import SERVER_ORDER, TEACH
from ..settings import Count, FrozenDict, NonNegative, Positive, SearchRange
from ..tensors import Parcel, Tensors
from ._net_parts import feature_shape, parts_problem, run_part
from ._personal import PersonalModels
from ._server_training import server_client
from .method import MethodInfo

EXAMPLES_AT_ONCE = 64  # bounds memory


@dataclass(frozen=True)
class FedGKT(PersonalModels):
    """FedGKT: devices train small models, and the server trains a large one on the features that they upload.

    Parameters
    ----------
    temperature : the temperature of the logits in the distillation losses, the paper's T.
    weight : the paper's alpha: the weight of the distillation loss on devices, and of the label loss on the server.
    server_epochs : how many epochs the server trains in a round.
    server_batch : the server's batch size.
    server_rate : the learning rate of the server's Adam.
    server_planes : the inner channels of each stage of the server's `bottleneck` model.
    server_blocks : the number of blocks of each stage.
    """

    info = MethodInfo(
        paper="He, Annavaram & Avestimehr, NeurIPS 2020",
        uploads="features (near-raw: see fedloom audit), logits and labels of all its examples",
        client_state="its small model",
        produces="personalized",
        heterogeneity="any",
        shares_features="extractor",
        example_settings=FrozenDict(server_epochs=2, server_planes=(8, 16), server_blocks=(1, 1)),
        needs="class_labels",
    )

    temperature: Annotated[Positive, SearchRange(1.0, 10.0, log=True)] = 3.0
    weight: Annotated[NonNegative, SearchRange(0.1, 10.0, log=True)] = 1.0
    server_epochs: Count = 20
    server_batch: Count = 64
    server_rate: Annotated[Positive, SearchRange(0.0001, 0.01, log=True)] = 0.001
    server_planes: tuple[Count, ...] = (16, 32, 64)
    server_blocks: tuple[Count, ...] = (6, 6, 6)

    def start(self, fleet: Fleet, seed: int, warm_start: Tensors | None = None) -> Parcel:
        small = fleet.global_model
        no_logits = {device.name: torch.zeros(0, small.classes) for device in fleet.eligible_devices(1)}
        return {"weights": self.server_model(small).initial_weights(seed), "answers": no_logits}

    def round(self, server: Parcel, context: RoundContext) -> Parcel:
        replies = context.ask(self.train, {device: teacher_inbox(server, device) for device in context.cohort})
        inboxes = gather_transfer(server["weights"], replies, context.draw(SERVER_ORDER))
        for result in context.compute(self.teach, inboxes):  # one, or none if no device replied
            server = {**result.upload, "answers": scatter_logits(server["answers"], result, replies)}
        return server

    @on_device(sends={"transfer": "transfer_layout"}, batch_across_runs=False)
    def train(self, client: Client, inbox: Parcel) -> ClientResult:
        def loss(weights: Tensors, batch: Batch) -> Tensor:
            logits = client.model(weights, batch.x, batch.step_seeds).logits
            if "teacher" not in inbox:
                return supervised_loss(logits, batch)
            teacher = inbox["teacher"]["logits"].take_along_dim(batch.example_positions.unsqueeze(-1), 1)
            return supervised_loss(logits, batch) + self.weight * distillation(logits, teacher, self.temperature)

        weights = fit(client, client.state["weights"], loss)
        return ClientResult(upload={"transfer": compute_transfer(client, weights)}, state={"weights": weights})

    def transfer_layout(self, model: Model, inbox: Parcel, examples: int) -> Layout:
        floats = torch.get_default_dtype()
        return {
            "features": ((examples, *feature_shape(model)), floats),
            "logits": ((examples, model.classes), floats),
            "labels": Bounded((examples,), torch.int64, below=model.classes),
        }

    @on_device(
        sends={"weights": like("weights"), "answers": "logits_layout"},
        stream=TEACH,
        batch_across_runs=False,
        host_bundles=("draw",),
    )
    def teach(self, client: Client, inbox: Parcel) -> ClientResult:
        """The server's training, as a client whose examples are the devices' transfer batches."""
        optimizer, schedule = Adam(self.server_rate, weight_decay=1e-4), Schedule(self.server_batch, self.server_epochs)
        features, teacher, labels = (inbox["transfer"][name][0] for name in ("features", "logits", "labels"))
        examples, seed = Examples(features, labels), int(inbox["draw"]["seed"])
        server = server_client(
            self.server_model(client.model), optimizer, examples, schedule, seed, client.model.classes
        )

        def loss(weights: Tensors, batch: Batch) -> Tensor:
            logits = server.model(weights, batch.x, batch.step_seeds).logits
            soft = distillation(logits, teacher[batch.example_positions], self.temperature)
            return soft + self.weight * supervised_loss(logits, batch)

        weights = fit(server, inbox["weights"], loss)
        return ClientResult(upload={"weights": weights, "answers": compute_logits(server, weights)})

    def logits_layout(self, model: Model, inbox: Parcel, examples: int) -> Layout:
        return {"logits": ((len(inbox["transfer"]["labels"]), model.classes), torch.get_default_dtype())}

    def server_model(self, small: Model) -> Model:
        size = {"stem": None, "planes": self.server_planes, "blocks": self.server_blocks}
        head = small.full_settings().get("head")
        size |= {"head": head} if head else {}  # both nets end alike
        return build_model("bottleneck", MODELS["bottleneck"], size, feature_shape(small), small.classes)

    def eval_targets(self, server: Parcel) -> Mapping[str, EvalTarget]:
        extended = DeviceModel(self.extended_model, lambda device: {"weights": server["weights"]})
        return {"clients": DeviceModel(self.personal_model), "server": extended}

    def extended_model(self, client: Client, inbox: Parcel) -> ModelWeights:
        """A device's extractor followed by the server's model."""
        extractor = client.model.submodel_weights("extractor", client.state["weights"])
        parts = {"first": extractor, "second": inbox["weights"]}
        weights = {f"{part}.{name}": weight for part, tensors in parts.items() for name, weight in tensors.items()}
        return chain_models(client.model.submodel("extractor"), self.server_model(client.model)), weights

    def check_fleet(self, fleet: Fleet) -> str | None:
        problem = parts_problem("fedgkt", fleet, ("extractor",))
        if problem:
            return problem
        shape = feature_shape(fleet.global_model)
        if len(shape) != 3:
            return f"fedgkt's server convolves feature maps; those of {fleet.global_model.family} have shape {shape}"
        if not self.server_planes or len(self.server_planes) != len(self.server_blocks):
            return (
                f"the server's model has {len(self.server_planes)} stages in method.server_planes and "
                f"{len(self.server_blocks)} in method.server_blocks; name at least one, and as many in both"
            )
        return super().check_fleet(fleet)

    def server_macs(self, model: Model, examples: Sequence[int]) -> float:
        return (3.0 * self.server_epochs + 1) * compute_cost(self.server_model(model)).macs * sum(examples)


def distillation(logits: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """[K]: T² · KL(teacher || student) of the softened distributions. No gradient flows to the teacher."""
    target = (teacher.detach() / temperature).softmax(-1) + 1e-7  # as in the authors' code
    losses = F.kl_div((logits / temperature).log_softmax(-1), target, reduction="none").sum(-1)
    return float(temperature) * temperature * losses.mean(1)


@torch.no_grad()
def compute_transfer(client: Client, weights: Tensors) -> dict[str, Tensor]:
    """Features, logits and labels of all examples of a device, in its own order and in evaluation mode."""
    model, ready, batches = client.model, _with_statistics(client, weights), list[tuple[Tensor, ...]]()
    for batch, _ in client.train_batches(EXAMPLES_AT_ONCE):
        batches.append((run_part(model, "extractor", ready, batch.x), model(ready, batch.x).logits, batch.y))
    columns = (torch.cat(column, 1) for column in zip(*batches, strict=True))
    return dict(zip(("features", "logits", "labels"), columns, strict=True))


@torch.no_grad()
def compute_logits(server: Client, weights: Tensors) -> dict[str, Tensor]:
    ready = _with_statistics(server, weights)
    logits = [server.model(ready, batch.x).logits for batch, _ in server.train_batches(EXAMPLES_AT_ONCE)]
    return {"logits": torch.cat(logits, 1)}


def _with_statistics(client: Client, weights: Tensors) -> dict[str, Tensor]:
    """Weights with batch norm statistics of one pass over the client's own examples."""
    one_epoch = tuple(step for step in client.plan if 0 in step.epochs)
    return with_batchnorm_statistics(replace(client, plan=one_epoch), weights)


def teacher_inbox(server: Parcel, device: Device) -> Parcel:
    """The server's logits for a device's examples; empty before the device's first upload."""
    logits = server["answers"][device.name]
    return {"teacher": {"logits": logits}} if len(logits) else {}


def gather_transfer(weights: Tensors, replies: Sequence[Reply], draw: np.random.Generator) -> dict[Device, Parcel]:
    """The server's own inbox: its weights, the concatenated transfer batches and a seed. Empty without replies."""
    if not replies:
        return {}
    names = replies[0].upload["transfer"]
    transfer = {name: torch.cat([reply.upload["transfer"][name] for reply in replies]) for name in names}
    seed = torch.tensor(int(draw.integers(2**62)))
    return {replies[0].device: {"weights": weights, "transfer": transfer, "draw": {"seed": seed}}}


def scatter_logits(before: Tensors, result: Reply, replies: Sequence[Reply]) -> dict[str, Tensor]:
    """The server's logits by device; devices that did not reply keep their earlier ones."""
    parts = result.upload["answers"]["logits"].split([reply.examples for reply in replies])
    return {**before, **{reply.device.name: part.clone() for reply, part in zip(replies, parts, strict=True)}}
