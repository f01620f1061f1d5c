"""What passes between devices and a server that trains a net of its own: features, answers, and learning from them."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ..data import Examples, Preparation
from ..fleet import Carried, Device, Fleet, Reply
from ..models import Model, chained
from ..seeds import SERVER_BATCHES, generator
from ..tensors import Parcel, Tensors
from ..training import Bounded, Client, Holdings, Layout, Optimiser, Schedule, own_statistics, plan_for, together
from .pairs import feature_shape, run_part

AT_ONCE = 64  # examples, so that memory does not grow with their number


def distillation(logits: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """[K]: T² times the divergence of the student's softened answers from the teacher's, which learns nothing."""
    answers = (teacher.detach() / temperature).softmax(-1) + 1e-7  # as in the authors' code
    losses = F.kl_div((logits / temperature).log_softmax(-1), answers, reduction="none").sum(-1)
    return temperature**2 * losses.mean(1)


def pupil(model: Model, optimiser: Optimiser, examples: Examples, schedule: Schedule, seed: int) -> Client:
    """The server as one who trains: a block of one that holds all these examples."""
    rows = torch.arange(len(examples))
    plan = plan_for(rows, schedule, examples, Preparation(), generator(seed, SERVER_BATCHES))
    everything = Holdings(rows.unsqueeze(0), torch.ones(1, len(rows), dtype=torch.bool))
    nothing = Holdings(torch.zeros(1, 0, dtype=torch.int64), torch.zeros(1, 0, dtype=torch.bool))
    seen = torch.bincount(examples.y.flatten(), minlength=model.classes) > 0
    return Client(
        model, optimiser, examples, examples, nothing, Preparation(), together([plan]), seen.unsqueeze(0), {},
        holdings=everything,
    )  # fmt: skip


def received(model: Model, optimiser: Optimiser, schedule: Schedule, inbox: Parcel) -> tuple[Client, Tensor]:
    """The server with what the devices sent as its examples, and the logits they gave them."""
    features, logits, labels = (inbox["lesson"][name][0] for name in ("features", "logits", "labels"))
    return pupil(model, optimiser, Examples(features, labels), schedule, int(inbox["draw"]["seed"])), logits


def map_problem(fleet: Fleet) -> str | None:
    shape = feature_shape(fleet.whole)
    if len(shape) == 3:
        return None
    return f"fedgkt's server convolves feature maps; those of {fleet.whole.family} have shape {shape}"


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
    return {device.name: torch.zeros(0, fleet.whole.classes) for device in fleet.members(1)}


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


def extended(client: Client, large: Model, weights: Tensors) -> Carried:
    """A device's extractor and, behind it, the server's net."""
    extractor = client.model.part_weights("extractor", client.memory["weights"])
    parts = {"first": extractor, "second": weights}
    held = {f"{part}.{name}": weight for part, one in parts.items() for name, weight in one.items()}
    return chained(client.model.part("extractor"), large), held
