"""Prototypes, the mean features of a class on a device, as in FedProto, FedGH and FedTGP.

Features are what the last layer receives. The nets may differ, but their features must have the same length.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from ..client import Batch, Client, Layout, evaluate_without_padding, with_batchnorm_statistics
from ..data import Examples
from ..fleet import DeviceModel, EvalTarget, Fleet, ModelWeights, Reply
from ..models import Model, Outputs
from ..tensors import Parcel, Tensors, per_device
from ._personal import PersonalModels
from .method import one_prediction_problem

EXAMPLES_AT_ONCE = 64  # bounds memory
NO_PROTOTYPE = -1e6  # the logit of a class without a prototype


class PrototypeModels(PersonalModels, Protocol):
    """A method whose devices keep their models, and get prototypes of all classes under "prototypes".

    With `nearest` its models are also evaluated as "prototypes": by the nearest one instead of their last layer.
    """

    @property
    def nearest(self) -> bool: ...

    def eval_targets(self, server: Parcel) -> Mapping[str, EvalTarget]:
        inbox = {"prototypes": server["prototypes"]}
        nearest = {"prototypes": DeviceModel(self.nearest_model, lambda device: inbox)} if self.nearest else {}
        return {**super().eval_targets(server), **nearest}

    def nearest_model(self, client: Client, inbox: Parcel) -> ModelWeights:
        """A device's model that classifies by the nearest global prototype."""
        return client.model, nearest_prototype(client.model, client.state["weights"], inbox["prototypes"])

    def check_fleet(self, fleet: Fleet) -> str | None:
        name = type(self).__name__.lower()
        problem = features_problem(name, fleet)
        if self.nearest and not problem:
            hint = "; set method.nearest = false"
            problem = linear_head_problem(f"{name} classifies by the nearest prototype, which needs", fleet, hint)
        return problem or super().check_fleet(fleet)


def read_features(outputs: Outputs) -> Tensor:
    """[K, batch, width]: what the last layer received."""
    return outputs.taps["features"].flatten(2)


def class_sums(values: Tensor, labels: Tensor, counted: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Sums over the examples of each class, [K, classes, width], and their numbers, [K, classes].

    `counted`, [K, batch] or [K, 1], is 0 for examples that are padding.
    """
    member = one_hot(labels, classes).to(values) * counted.to(values).unsqueeze(-1)
    return member.mT @ values, member.sum(1)


@torch.no_grad()
def compute_prototypes(client: Client, weights: Tensors) -> tuple[Tensor, Tensor]:
    """The mean features of each class over all examples of a device, 0 without any, and the numbers of examples.

    In evaluation mode and without augmentation.
    """
    model, ready = client.model, with_batchnorm_statistics(client, weights)
    sums, counts = zip(
        *(
            class_sums(evaluate_without_padding(model, ready, batch, read_features), batch.y, real, model.classes)
            for batch, real in client.train_batches(EXAMPLES_AT_ONCE)
        ),
        strict=True,
    )
    total, count = torch.stack(sums).sum(0), torch.stack(counts).sum(0)
    return total / count.clamp_min(1).unsqueeze(-1), count


def prototype_distances(features: Tensor, batch: Batch, prototypes: Tensors) -> tuple[Tensor, Tensor]:
    """The Euclidean distance of a batch's mean features from the prototype of each class, [K, classes].

    Also which of them count: those of classes that the batch has and whose prototype is known.
    """
    known, everyone = prototypes["count"] > 0, features.new_ones(len(features), 1)
    total, count = class_sums(features, batch.y, everyone, known.shape[1])
    local = total / count.clamp_min(1).unsqueeze(-1)
    counted = known & (count > 0)
    return torch.linalg.vector_norm(local - prototypes["mean"], dim=-1) * counted, counted


def feature_errors(features: Tensor, batch: Batch, prototypes: Tensors) -> Tensor:
    """[K]: mean squared error of each example's features with the prototype of its class, as in published programs."""
    row = torch.arange(len(features), device=features.device).unsqueeze(1)
    errors = (features - prototypes["mean"][row, batch.y]).square().mean(-1)
    return (errors * (prototypes["count"][row, batch.y] > 0)).mean(-1)


def prototype_layout(model: Model) -> Layout:
    """The layout of a device's prototypes."""
    floats = torch.get_default_dtype()
    return {"mean": ((model.classes, model.feature_width()), floats), "count": ((model.classes,), floats)}


def uncounted_layout(model: Model) -> Layout:
    """The layout of a device's prototypes without their numbers of examples, but with the set of its labels."""
    return {"mean": prototype_layout(model)["mean"], "seen": ((model.classes,), torch.bool)}


def no_prototypes(model: Model) -> dict[str, Tensor]:
    """Prototypes of which none is known yet."""
    return {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in prototype_layout(model).items()}


def gather_prototypes(replies: Sequence[Reply]) -> dict[str, Tensor]:
    """The uploaded prototypes of all replies, [replies, ...]."""
    uploads = [reply.upload["prototypes"] for reply in replies]
    return {name: torch.stack([upload[name] for upload in uploads]) for name in uploads[0]}


def prototype_examples(replies: Sequence[Reply]) -> dict[str, Tensor]:
    """The uploaded prototypes and their classes, as examples for the server's own training."""
    gathered = gather_prototypes(replies)
    seen = gathered["seen"]
    return {"x": gathered["mean"][seen], "y": torch.arange(seen.shape[1]).expand_as(seen)[seen]}


def most_prototypes(model: Model, examples: Sequence[int]) -> int:
    """How many prototypes devices with so many examples upload at most: one of each class, and of each example."""
    return sum(min(count, model.classes) for count in examples)


def read_examples(inbox: Parcel) -> Examples:
    """The server's examples, from its inbox in a block of one."""
    return Examples(inbox["examples"]["x"][0], inbox["examples"]["y"][0])


def nearest_prototype(model: Model, weights: Tensors, prototypes: Tensors) -> Tensors:
    """Weights with which a net classifies by the nearest prototype.

    argmin |f - p|² is argmax 2 p·f - |p|², which a linear last layer computes. While no prototype is known, the net
    keeps its own last layer.
    """
    head, mean, known = find_head(model), prototypes["mean"], prototypes["count"] > 0
    logits = torch.where(known, -mean.square().sum(-1), NO_PROTOTYPE)
    nearest, any_known = {"weight": 2 * mean, "bias": logits}, known.any(1)
    replaced = {
        name: torch.where(per_device(any_known, nearest[part]), nearest[part], weights[name])
        for part, name in head.items()
    }
    return {**weights, **replaced}


def find_head(model: Model) -> Mapping[str, str]:
    """The names of weight and bias of a linear last layer; empty if the last layer is another."""
    shapes = model.shapes()
    expected = {"weight": (model.classes, model.feature_width()), "bias": (model.classes,)}
    found = {part: [name for name in model.head() if tuple(shapes[name]) == shape] for part, shape in expected.items()}
    is_linear = len(model.head()) == 2 and all(len(names) == 1 for names in found.values())
    return {part: names[0] for part, names in found.items()} if is_linear else {}


def missing_features_problem(method: str, fleet: Fleet) -> str | None:
    """Why the tiers' models have no features of whole examples; None if they have."""
    problem = one_prediction_problem(method, fleet)
    if problem:
        return problem
    try:
        _feature_lengths(fleet)
    except ValueError as reason:
        return f"{method} compares the features of nets: {reason}"
    return None


def _feature_lengths(fleet: Fleet) -> dict[str, int]:
    return {tier.name: tier.model.feature_width() for tier in fleet.active_tiers}


def features_problem(method: str, fleet: Fleet) -> str | None:
    """Why the tiers' models have no features that can be compared; None if they have."""
    problem = missing_features_problem(method, fleet)
    lengths = {} if problem else _feature_lengths(fleet)
    if len(set(lengths.values())) <= 1:
        return problem
    each = ", ".join(f"{name} {length}" for name, length in lengths.items())
    return (
        f"{method} needs features of the same length in all tiers, and they have: {each}; give the last hidden layers "
        "the same width, or pool them to one"
    )


def linear_head_problem(purpose: str, fleet: Fleet, hint: str) -> str | None:
    """Why a last layer cannot be replaced by another of the same shape; None if it can."""
    for tier in fleet.active_tiers:
        if not find_head(tier.model):
            return f"{purpose} a last layer that is linear, with a bias; {tier.model.family} has another{hint}"
    return None
