"""FedGKT. He, Annavaram & Avestimehr, Group Knowledge Transfer, NeurIPS 2020, Algorithm 1.

A device trains a small net and sends the features, logits and labels of its examples. The server trains a large net on
them and sends back its own logits. Each learns from the labels and from the other's answers.

What passes between devices and a server that trains a net of its own: features, answers, and learning from them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

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
    Optimizer,
    PaddedIndices,
    Schedule,
    cross_entropy,
    fit,
    like,
    on_device,
    own_statistics,
    plan_for,
    together,
)
from ..data import Examples, Preparation
from ..fleet import Device, DeviceModel, EvalTarget, Fleet, ModelWeights, Reply, RoundContext
from ..models import MODELS, Model, chain_models, cost, model
from ..seeds import SERVER_BATCHES, SERVER_ORDER, TEACH, generator
from ..settings import Count, FixedTable, NotNegative, Positive
from ..tensors import Parcel, Tensors
from ._net_parts import feature_shape, parts_problem, run_part
from ._personal import OwnModels

AT_ONCE = 64  # examples, so that memory does not grow with their number


def distillation(logits: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """[K]: T² times the divergence of the student's softened answers from the teacher's, which learns nothing."""
    answers = (teacher.detach() / temperature).softmax(-1) + 1e-7  # as in the authors' code
    losses = F.kl_div((logits / temperature).log_softmax(-1), answers, reduction="none").sum(-1)
    return temperature**2 * losses.mean(1)


def pupil(model: Model, optimizer: Optimizer, examples: Examples, schedule: Schedule, seed: int) -> Client:
    """The server as one who trains: a block of one that holds all these examples."""
    rows = torch.arange(len(examples))
    plan = plan_for(rows, schedule, examples, Preparation(), generator(seed, SERVER_BATCHES))
    everything = PaddedIndices(rows.unsqueeze(0), torch.ones(1, len(rows), dtype=torch.bool))
    nothing = PaddedIndices(torch.zeros(1, 0, dtype=torch.int64), torch.zeros(1, 0, dtype=torch.bool))
    seen = torch.bincount(examples.y.flatten(), minlength=model.classes) > 0
    return Client(
        model, optimizer, examples, examples, nothing, Preparation(), together([plan]), seen.unsqueeze(0), {},
        holdings=everything,
    )  # fmt: skip


def received(model: Model, optimizer: Optimizer, schedule: Schedule, inbox: Parcel) -> tuple[Client, Tensor]:
    """The server with what the devices sent as its examples, and the logits they gave them."""
    features, logits, labels = (inbox["lesson"][name][0] for name in ("features", "logits", "labels"))
    return pupil(model, optimizer, Examples(features, labels), schedule, int(inbox["draw"]["seed"])), logits


def map_problem(fleet: Fleet) -> str | None:
    shape = feature_shape(fleet.global_model)
    if len(shape) == 3:
        return None
    return f"fedgkt's server convolves feature maps; those of {fleet.global_model.family} have shape {shape}"


def lesson_layout(model: Model, inbox: Parcel, examples: int) -> Layout:
    floats = torch.get_default_dtype()
    return {
        "features": ((examples, *feature_shape(model)), floats),
        "logits": ((examples, model.classes), floats),
        "labels": Bounded((examples,), torch.int64, below=model.classes),
    }


@torch.no_grad()
def lesson_of(client: Client, weights: Tensors) -> dict[str, Tensor]:
    """Features, logits and labels of all examples a device has, in its own order and as its net is judged."""
    model, judged, said = client.model, _ready(client, weights), list[tuple[Tensor, ...]]()
    for batch, _ in client.own_batches(AT_ONCE):
        said.append((run_part(model, "extractor", judged, batch.x), model(judged, batch.x).logits, batch.y))
    return dict(zip(("features", "logits", "labels"), (torch.cat(p, 1) for p in zip(*said, strict=True)), strict=True))


def no_answers(fleet: Fleet) -> dict[str, Tensor]:
    """What the server has answered before it was asked."""
    return {device.name: torch.zeros(0, fleet.global_model.classes) for device in fleet.members(1)}


def gathered(weights: Tensors, replies: Sequence[Reply], draw: np.random.Generator) -> dict[Device, Parcel]:
    """The server's net, what all devices sent, one after the other, and where its own draws come from: as an inbox of
    its own; none, if nobody sent anything."""
    if not replies:
        return {}
    lesson = {name: torch.cat([r.sent["lesson"][name] for r in replies]) for name in replies[0].sent["lesson"]}
    seed = torch.tensor(int(draw.integers(2**62)))
    return {replies[0].device: {"weights": weights, "lesson": lesson, "draw": {"seed": seed}}}


def dealt_back(before: Tensors, taught: Reply, replies: Sequence[Reply]) -> dict[str, Tensor]:
    """The server's logits, to each device those of its own examples; whoever sent nothing keeps what it had."""
    each = taught.sent["answers"]["logits"].split([reply.examples for reply in replies])
    return {**before, **{reply.device.name: own.clone() for reply, own in zip(replies, each, strict=True)}}


def teacher_of(server: Parcel, device: Device) -> Parcel:
    """What the server answered to a device's examples; nothing before it has seen them."""
    logits = server["answers"][device.name]
    return {"teacher": {"logits": logits}} if len(logits) else {}


def answer_layout(model: Model, inbox: Parcel, examples: int) -> Layout:
    return {"logits": ((len(inbox["lesson"]["labels"]), model.classes), torch.get_default_dtype())}


@torch.no_grad()
def answers_of(server: Client, weights: Tensors) -> dict[str, Tensor]:
    judged = _ready(server, weights)
    said = [server.model(judged, batch.x).logits for batch, _ in server.own_batches(AT_ONCE)]
    return {"logits": torch.cat(said, 1)}


def _ready(client: Client, weights: Tensors) -> dict[str, Tensor]:
    """Weights with the statistics of one pass over the client's own examples."""
    once = tuple(step for step in client.plan if bool((step.epoch == 0).any()))
    return own_statistics(replace(client, plan=once), weights)


def extended(client: Client, large: Model, weights: Tensors) -> ModelWeights:
    """A device's extractor and, behind it, the server's net."""
    extractor = client.model.submodel_weights("extractor", client.state["weights"])
    parts = {"first": extractor, "second": weights}
    held = {f"{part}.{name}": weight for part, one in parts.items() for name, weight in one.items()}
    return chain_models(client.model.submodel("extractor"), large), held


@dataclass(frozen=True)
class FedGKT(OwnModels):
    """`weight` is the paper's alpha: of the answers where devices learn, of the labels where the server does."""

    paper = "He, Annavaram & Avestimehr, NeurIPS 2020"
    leaves = "features (near-raw: see fedloom audit), logits and labels of all its examples"
    keeps, gives, admits, ships = "its small net", "personalized", "any models", "extractor"
    sample = FixedTable(server_epochs=2, server_planes=(8, 16), server_blocks=(1, 1))

    temperature: Positive = 3.0
    weight: NotNegative = 1.0
    server_epochs: Count = 20
    server_batch: Count = 64
    server_rate: Positive = 0.001
    server_planes: tuple[Count, ...] = (16, 32, 64)
    server_blocks: tuple[Count, ...] = (6, 6, 6)

    def start(self, fleet: Fleet, seed: int, warm: Tensors | None = None) -> Parcel:
        return {"weights": self.large(fleet.global_model).initial_weights(seed), "answers": no_answers(fleet)}

    def round(self, server: Parcel, context: RoundContext) -> Parcel:
        replies = context.ask(self.train, {device: teacher_of(server, device) for device in context.cohort})
        for taught in context.compute(self.teach, gathered(server["weights"], replies, context.draw(SERVER_ORDER))):
            server = {**taught.sent, "answers": dealt_back(server["answers"], taught, replies)}
        return server

    @on_device(sends={"lesson": lesson_layout}, mixes=False)
    def train(self, client: Client, inbox: Parcel) -> ClientResult:
        def loss(weights: Tensors, batch: Batch) -> Tensor:
            logits = client.model(weights, batch.x, batch.step_seeds).logits
            if "teacher" not in inbox:
                return cross_entropy(logits, batch)
            teacher = inbox["teacher"]["logits"].take_along_dim(batch.own_rows.unsqueeze(-1), 1)
            return cross_entropy(logits, batch) + self.weight * distillation(logits, teacher, self.temperature)

        weights = fit(client, client.state["weights"], loss)
        return ClientResult(upload={"lesson": lesson_of(client, weights)}, state={"weights": weights})

    @on_device(sends={"weights": like("weights"), "answers": answer_layout}, stream=TEACH, mixes=False)
    def teach(self, client: Client, inbox: Parcel) -> ClientResult:
        """What the server does, as a client that has what the devices sent."""
        optimizer, schedule = Adam(self.server_rate, weight_decay=1e-4), Schedule(self.server_batch, self.server_epochs)
        server, logits = received(self.large(client.model), optimizer, schedule, inbox)

        def loss(weights: Tensors, batch: Batch) -> Tensor:
            made = server.model(weights, batch.x, batch.step_seeds).logits
            answers = distillation(made, logits[batch.own_rows], self.temperature)
            return answers + self.weight * cross_entropy(made, batch)

        weights = fit(server, inbox["weights"], loss)
        return ClientResult(upload={"weights": weights, "answers": answers_of(server, weights)})

    def large(self, small: Model) -> Model:
        size = {"stem": None, "planes": self.server_planes, "blocks": self.server_blocks}
        return model("bottleneck", MODELS["bottleneck"], size, feature_shape(small), small.classes)

    def server_macs(self, model: Model, examples: int) -> float:
        return (3.0 * self.server_epochs + 1) * cost(self.large(model)).macs * examples

    def eval_targets(self, server: Parcel) -> Mapping[str, EvalTarget]:
        whole = DeviceModel(self.with_server, lambda device: {"weights": server["weights"]})
        return {"clients": DeviceModel(self.own), "server": whole}

    def with_server(self, client: Client, inbox: Parcel) -> ModelWeights:
        return extended(client, self.large(client.model), inbox["weights"])

    def check_fleet(self, fleet: Fleet) -> str | None:
        return parts_problem("fedgkt", fleet, ("extractor",)) or map_problem(fleet) or super().check_fleet(fleet)
