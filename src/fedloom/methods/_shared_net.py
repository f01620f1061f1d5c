"""A small net that all devices share, beside a private one of any architecture on each, as in FML and FedKD.

Both train together on a device, each with an optimizer of its own; only the shared net is sent and averaged.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

from torch import Tensor

from ..client import Client
from ..fleet import DeviceModel, EvalTarget, Fleet, ModelWeights, Reply, RoundContext, count_parameters
from ..footprints import ClientUpdate, find_footprint, read_submodel
from ..models import Model
from ..tensors import Parcel, Tensors
from ._personal import PersonalModels

SHARED = "shared:"  # before the names of the shared net's weights, where both nets train together
BOTH = ("", SHARED)
"""What `net_of` returns for the own net and for the shared one."""


class SharedNet(PersonalModels, Protocol):
    """A method whose devices keep a model, and share a smaller net by which they learn from each other."""

    @property
    def shared_tier(self) -> str: ...
    @property
    def weighting(self) -> Literal["uniform", "examples"]: ...

    def start(self, fleet: Fleet, seed: int, warm_start: Tensors | None = None) -> Parcel:
        model = self.shared_model(fleet.tier_models)
        footprint = find_footprint(model.shapes(), fleet.global_model.shapes())
        found = read_submodel(model.shapes(), footprint, warm_start) if warm_start else {}
        return {"weights": found if found.keys() == model.shapes().keys() else model.initial_weights(seed)}

    def shared_model(self, models: Mapping[str, Model]) -> Model:
        """The shared net, out of the models of all tiers: that of `shared_tier`, else the smallest."""
        if self.shared_tier:
            return models[self.shared_tier]
        return min(models.values(), key=lambda model: count_parameters(model.shapes()))

    def trained_beside(self, model: Model, tier_models: Mapping[str, Model]) -> tuple[Model, ...]:
        return (self.shared_model(tier_models),)

    def average_shared(self, server: Parcel, context: RoundContext, replies: Sequence[Reply]) -> dict[str, Tensor]:
        old = server["weights"]
        shapes = {name: weight.shape for name, weight in old.items()}
        whole, by_examples = find_footprint(shapes, shapes), self.weighting == "examples"
        updates = (ClientUpdate(whole, r.upload["weights"], r.examples if by_examples else 1.0) for r in replies)
        return context.aggregate(old, updates)

    def eval_targets(self, server: Parcel) -> Mapping[str, EvalTarget]:
        shared = DeviceModel(self.load_shared, lambda device: {"weights": server["weights"]})
        return {**super().eval_targets(server), "shared": shared}

    def load_shared(self, client: Client, inbox: Parcel) -> ModelWeights:
        """The shared net, to evaluate it on a device."""
        return self.shared_model(client.tier_models), inbox["weights"]

    def check_fleet(self, fleet: Fleet) -> str | None:
        names = [tier.name for tier in fleet.active_tiers]
        if self.shared_tier and self.shared_tier not in names:
            return f"method.shared_tier is {self.shared_tier!r}, which is no tier that takes part: {', '.join(names)}"
        return super().check_fleet(fleet)


def join_nets(own: Tensors, shared: Tensors) -> dict[str, Tensor]:
    """The weights of both nets in one bundle, for `fit`."""
    return {**own, **{SHARED + name: weight for name, weight in shared.items()}}


def split_nets(weights: Tensors) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The weights of a device's own net and of the shared one."""
    shared = {name.removeprefix(SHARED): weight for name, weight in weights.items() if name.startswith(SHARED)}
    return {name: weight for name, weight in weights.items() if not name.startswith(SHARED)}, shared


def net_of(name: str) -> str:
    """The net that a weight of both nets' bundle belongs to."""
    return SHARED if name.startswith(SHARED) else ""
