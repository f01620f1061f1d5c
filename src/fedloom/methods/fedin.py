"""FedIN. Chan, Jiang, Deng & Ngai, Federated Intermediate Layers Learning, 2023, Algorithm 1.

All devices share extractor and classifier; the intermediate layers are each device's own. Devices upload pairs of what
enters and what leaves these, and each also fits its own to the pairs of others, as far as its labels allow.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import torch
from torch import Tensor

from ..client import (
    Batch,
    Client,
    ClientResult,
    Layout,
    fit,
    gradient,
    label_loss,
    like,
    on_device,
    with_batchnorm_statistics,
)
from ..fleet import Fleet, Reply, RoundContext
from ..models import Model, compute_cost
from ..seeds import FEATURE_PAIRS, generator
from ..settings import Count, NonNegative, SearchRange
from ..tensors import Parcel, Tensors, combine, inner, per_device
from ._net_parts import parts_problem, run_part
from ._personal import PartialSharing, split_shared
from .method import MethodInfo

PARTS = ("extractor", "intermediate", "classifier")
EXAMPLES_AT_ONCE = 64  # bounds memory


@dataclass(frozen=True)
class FedIN(PartialSharing):
    """FedIN: devices share extractor and classifier, and fit their intermediate layers to features of others.

    Parameters
    ----------
    middle : how the intermediate layers combine the gradients of labels and features: "sum" adds them (Eq. 16);
        "project" removes from the features' gradient what opposes the labels' (Eq. 15), tensor by tensor, "project_all"
        over all tensors; "sequential" makes two updates; "none" uses labels alone.
    local : the paper's lambda: "sum" adds lambda / 2 times the gradient of the labels.
    aggregation : whether extractor and classifier are shared; else every device keeps its own.
    pairs : how many of its examples a device uploads pairs of features for, or "all".
    buffer : how many pairs the server keeps.
    max_age : the rounds after which a pair is dropped.
    batch : how many random pairs the server sends to every device of a round.
    """

    info = MethodInfo(
        paper="Chan et al., 2023",
        uploads="weights of extractor and classifier, features of its examples (near-raw: see fedloom audit)",
        client_state="its intermediate layers",
        produces="personalized",
        heterogeneity="any",
        shares_features="extractor",
    )

    middle: Literal["sum", "project", "project_all", "sequential", "none"] = "sum"
    local: Annotated[NonNegative, SearchRange(0.5, 8.0, log=True)] = 2.0
    aggregation: bool = True
    pairs: Count | Literal["all"] = 128
    buffer: Count = 5000
    max_age: Count = 1
    batch: Count = 512

    @property
    def shared(self) -> tuple[str, ...]:
        return ("extractor", "classifier") if self.aggregation else ()

    def start(self, fleet: Fleet, seed: int, warm_start: Tensors | None = None) -> Parcel:
        return {**super().start(fleet, seed, warm_start), "pairs": empty_buffer(fleet.global_model)}

    def round(self, server: Parcel, context: RoundContext) -> Parcel:
        pairs = sample_pairs(server["pairs"], self.batch, context.number - self.max_age, context.draw(FEATURE_PAIRS))
        inboxes = {device: {**self.inbox(server, device), **pairs} for device in context.cohort}
        replies = context.ask(self.train, inboxes)
        buffer = update_buffer(server["pairs"], replies, context.number, self.buffer, self.max_age)
        return {"weights": self.aggregate_shared(server, context, replies, by_examples=False), "pairs": buffer}

    @on_device(sends={"weights": like("weights"), "pairs": "upload_layout"}, batch_across_runs=False)
    def train(self, client: Client, inbox: Parcel) -> ClientResult:
        labels = label_loss(client)

        def from_features(weights: Tensors, batch: Batch) -> Tensors:
            middle = {name: weight for name, weight in weights.items() if name.startswith("intermediate.")}
            return gradient(features_loss(client, inbox["pairs"]), middle, batch, all_weights=weights)

        def from_both(weights: Tensors, batch: Batch) -> Tensors:
            by_labels, by_features = gradient(labels, weights, batch), from_features(weights, batch)
            return {**by_labels, **self.combine_gradients({name: by_labels[name] for name in by_features}, by_features)}

        updates = (labels, from_features) if self.middle == "sequential" else (from_both,)
        weights = fit(client, self.full_weights(client, inbox), *(updates if "pairs" in inbox else (labels,)))
        shared, private = split_shared(weights, inbox)
        pairs = collect_pairs(client, weights, self._count(client.num_examples))
        return ClientResult(upload={"weights": shared, "pairs": pairs}, state={"weights": private})

    def combine_gradients(self, labels: Tensors, features: Tensors) -> Tensors:
        """The update direction of the intermediate layers."""
        if self.middle == "sum":
            return combine(lambda label, feature: feature + self.local / 2 * label, labels, features)
        if self.middle == "project":
            return {name: project({name: labels[name]}, {name: features[name]})[name] for name in labels}
        return project(labels, features)

    def upload_layout(self, model: Model, inbox: Parcel, examples: int) -> Layout:
        return pair_layout(model, self._count(examples))

    def _count(self, examples: int) -> int:
        return 0 if self.middle == "none" else examples if self.pairs == "all" else min(self.pairs, examples)

    def check_fleet(self, fleet: Fleet) -> str | None:
        return parts_problem("fedin", fleet, PARTS, ends=self.shared) or super().check_fleet(fleet)

    def device_macs(self, model: Model, examples: int, steps: int) -> float:
        on_pairs = 3.0 * compute_cost(model.submodel("intermediate")).macs * examples if self.middle != "none" else 0.0
        return super().device_macs(model, examples, steps) + on_pairs


def features_loss(client: Client, pairs: Tensors) -> Callable[[Tensors, Batch], Tensor]:
    """[K]: squared error of a device's intermediate layers on other devices' pairs, which are used in turn."""
    middle = client.model.submodel("intermediate")

    def loss(weights: Tensors, batch: Batch) -> Tensor:
        rows = batch.cyclic_rows(batch.y.shape[1], pairs["enter"].shape[1])
        middle_weights = client.model.submodel_weights("intermediate", weights)
        outputs = middle(middle_weights, pairs["enter"][:, rows], batch.step_seeds).logits
        return (outputs - pairs["leave"][:, rows]).square().flatten(1).mean(1)

    return loss


def project(labels: Tensors, features: Tensors) -> Tensors:
    """`features` without its component against `labels`."""
    size = inner(labels, labels)
    against = inner(labels, features).clamp_max(0) / size.clamp_min(torch.finfo(size.dtype).tiny)
    against = torch.where(size > 0, against, 0)
    return combine(lambda label, feature: feature - per_device(against, label) * label, labels, features)


@torch.no_grad()
def collect_pairs(client: Client, weights: Tensors, count: int) -> dict[str, Tensor]:
    """Pairs of `count` random examples of each device, in evaluation mode and without augmentation."""
    if not count:
        devices, empty = len(client.seen_labels), pair_layout(client.model, 0)
        place = client.seen_labels.device
        return {name: torch.zeros(devices, *shape, dtype=dtype, device=place) for name, (shape, dtype) in empty.items()}
    ready, pairs = with_batchnorm_statistics(client, weights), list[tuple[Tensor, Tensor]]()
    for rows in _sample_rows(client, count).split(EXAMPLES_AT_ONCE, 1):
        enter = run_part(client.model, "extractor", ready, client.preparation(client.examples.x[rows]))
        pairs.append((enter, run_part(client.model, "intermediate", ready, enter)))
    columns = (torch.cat(column, 1) for column in zip(*pairs, strict=True))
    return dict(zip(("enter", "leave"), columns, strict=True))


def _sample_rows(client: Client, count: int) -> Tensor:
    """[K, count]: random rows out of all training examples of a device, also those that its plan does not visit."""
    indices = client.train_indices
    assert indices is not None
    draws = (generator(seed, FEATURE_PAIRS) for seed in client.plan[0].step_seeds.per_device)
    chosen = [draw.permutation(length)[:count] for length, draw in zip(indices.lengths, draws, strict=True)]
    return indices.rows.gather(1, torch.from_numpy(np.stack(chosen)).to(indices.rows.device))


def pair_layout(model: Model, count: int) -> Layout:
    shapes = {"enter": model.submodel("intermediate").input_shape, "leave": model.submodel("classifier").input_shape}
    return {name: ((count, *shape), torch.get_default_dtype()) for name, shape in shapes.items()}


def empty_buffer(model: Model) -> dict[str, Tensor]:
    empty = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in pair_layout(model, 0).items()}
    return {**empty, "round": torch.zeros(0, dtype=torch.int64)}


def update_buffer(
    buffer: Tensors, replies: Sequence[Reply], round_number: int, size: int, max_age: int
) -> dict[str, Tensor]:
    """Append the uploaded pairs, drop those that will be too old next round, and keep the last `size`.

    If the uploads alone exceed `size`, each is cut to an equal share. Without replies the buffer stays as it is.
    """
    if not replies:
        return dict(buffer)
    total = sum(len(reply.upload["pairs"]["enter"]) for reply in replies)
    room = total if total <= size else -(-size // len(replies))
    new = {name: torch.cat([reply.upload["pairs"][name][:room] for reply in replies]) for name in ("enter", "leave")}
    new["round"] = torch.full((len(new["enter"]),), round_number)
    fresh = buffer["round"] > round_number - max_age
    joined = {name: torch.cat([old[fresh], new[name]]) for name, old in buffer.items()}
    return {name: pairs[max(0, len(pairs) - size) :].clone() for name, pairs in joined.items()}


def sample_pairs(buffer: Tensors, count: int, since: int, draw: np.random.Generator) -> Parcel:
    """At most `count` random pairs from round `since` on; empty if there are none."""
    fresh = torch.nonzero(buffer["round"] >= since).squeeze(1)
    rows = fresh[torch.from_numpy(draw.permutation(len(fresh))[:count])]
    return {"pairs": {name: buffer[name][rows] for name in ("enter", "leave")}} if len(rows) else {}
