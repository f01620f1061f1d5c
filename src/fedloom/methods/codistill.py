"""Co-distillation across tiers: each device trains every tier's net that it can run, and small nets teach larger ones.

A method of fedloom's own, made of known parts: larger devices train small nets too (FedHeN, Acar & Saligrama, 2022),
and nets learn from each other's predictions (deep mutual learning, Zhang et al., CVPR 2018; FML, Shen et al., 2020) or
from their mean (ONE, Lan, Zhu & Gong, NeurIPS 2018). Ours: the nets of all tiers are global and share no weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from ..client import (
    Batch,
    Client,
    ClientResult,
    distillation_loss,
    fit,
    like,
    on_device,
    supervised_loss,
)
from ..fleet import EvalTarget, Fleet, RoundContext, ServerModel, Tier
from ..footprints import ClientUpdate, Footprint, find_footprint, read_submodel
from ..models import Model, compute_cost
from ..settings import Natural, NonNegative, Positive, SearchRange
from ..tensors import Parcel, Tensors
from ._joint_step import step_together
from .method import EXAMPLE_COUNT, Method, MethodInfo


@dataclass(frozen=True)
class CoDistill(Method):
    """Co-distillation across tiers: devices train every tier's net that they can run, and small nets teach larger ones.

    Each net is averaged over all devices that train it: the smallest over all devices, the largest over those that can
    run it. Nets share no weights, so they may be of any architecture, and each has an optimizer of its own. Without
    distillation the smallest tier's net is that of `small-for-all` and the largest tier's that of `drop-the-small`, but
    for rounding: no tier loses by the others. With it a large net learns from smaller ones, which more devices train.

    Parameters
    ----------
    distillation : the weight of the loss of a net with the mean output of itself and all smaller nets on the device as
        its target; 0: none. The smallest net has no teacher.
    temperature : the temperature of both outputs; the loss is multiplied by its square.
    warm_up : the number of rounds over which that weight grows from 0 to its value; 0: it is constant.
    weighting : the weight of a device in the average: the number of its examples, or the same for all.
    """

    info = MethodInfo(
        paper="fedloom; after Zhang et al., CVPR 2018, and Acar & Saligrama, 2022",
        uploads="weights of every tier's net that the device can run, example count",
        heterogeneity="any",
    )

    distillation: Annotated[NonNegative, SearchRange(0.1, 4.0, log=True)] = 1.0
    temperature: Annotated[Positive, SearchRange(1.0, 4.0, log=True)] = 2.0
    warm_up: Natural = 4
    weighting: Literal["examples", "uniform"] = "examples"

    def start(self, fleet: Fleet, seed: int, warm_start: Tensors | None = None) -> Parcel:
        tiers = {tier.name: tier for tier in fleet.active_tiers}
        nets = {name: tiers[name.split(",")[0]] for name in _all_nets(fleet.tier_models)}
        return {"weights": _join({name: _first_weights(tier, seed, warm_start) for name, tier in nets.items()})}

    def round(self, server: Parcel, context: RoundContext) -> Parcel:
        strength = torch.tensor(
            self.distillation * min(1.0, (context.number - 1) / self.warm_up if self.warm_up else 1.0)
        )
        extra = {"distillation": {"strength": strength}} if self.distillation else {}
        tiers = {tier.name: _footprint(tier.model, context.fleet.tier_models) for tier in context.fleet.active_tiers}
        footprints = {device: tiers[device.tier] for device in context.cohort}
        inboxes = {d: {"weights": footprint.read(server["weights"]), **extra} for d, footprint in footprints.items()}
        replies = context.ask(self.train, inboxes)
        by_examples = self.weighting == "examples"
        updates = (
            ClientUpdate(footprints[r.device], r.upload["weights"], r.examples if by_examples else 1.0) for r in replies
        )
        return {"weights": context.aggregate(server["weights"], updates)}

    @on_device(sends={"weights": like("weights")}, batch_across_runs=False)
    def train(self, client: Client, inbox: Parcel) -> ClientResult:
        nets = _nets_within(client.model, client.tier_models)

        def loss(weights: Tensors, batch: Batch) -> Tensor:
            outputs = [net(_weights_of(name, weights), batch.x, batch.step_seeds).logits for name, net in nets.items()]
            total = torch.stack([supervised_loss(logits, batch) for logits in outputs]).sum(0)
            if self.distillation and len(outputs) > 1:
                total = total + inbox["distillation"]["strength"] * self._divergence(outputs, client)
            return total

        return ClientResult(upload={"weights": fit(client, inbox["weights"], *step_together(loss, _net_of, [*nets]))})

    def _divergence(self, outputs: list[Tensor], client: Client) -> Tensor:
        """The sum over nets, from small to large, of their loss with the mean of their own and all smaller outputs."""
        softened = torch.stack([logits / self.temperature for logits in outputs])
        losses = [
            distillation_loss(softened[net], softened[: net + 1].mean(0), client.task) for net in range(1, len(outputs))
        ]
        return self.temperature**2 * torch.stack(losses).sum(0)

    def eval_targets(self, server: Parcel) -> Mapping[str, EvalTarget]:
        return {"server": ServerModel(lambda tier: _weights_for(tier, server["weights"]))}

    def aggregation_footprint(self, tier: Tier, fleet: Fleet, round_number: int) -> Footprint:
        return _footprint(tier.model, fleet.tier_models)

    def trained_beside(self, model: Model, tier_models: Mapping[str, Model]) -> tuple[Model, ...]:
        return tuple(net for net in _nets_within(model, tier_models).values() if not net.is_equivalent(model))

    @property
    def dp_uncovered(self) -> str:
        return EXAMPLE_COUNT if self.weighting == "examples" else ""


def _all_nets(tier_models: Mapping[str, Model]) -> dict[str, Model]:
    """The different nets of all tiers, each named after the tiers that have it: "phones,tablets"."""
    tiers_of: dict[Model, list[str]] = {}
    for tier, model in tier_models.items():
        same = next((net for net in tiers_of if net.is_equivalent(model)), model)
        tiers_of.setdefault(same, []).append(tier)
    return {",".join(tiers): net for net, tiers in tiers_of.items()}


def _nets_within(own: Model, tier_models: Mapping[str, Model]) -> dict[str, Model]:
    """The nets that cost no more than a device's own, from small to large: neither more multiply-adds nor weights."""
    limit, nets = compute_cost(own), _all_nets(tier_models)
    costs = {name: compute_cost(net) for name, net in nets.items()}
    within = [name for name, cost in costs.items() if cost.macs <= limit.macs and cost.parameters <= limit.parameters]
    return {name: nets[name] for name in sorted(within, key=lambda name: (costs[name].macs, costs[name].parameters))}


def _footprint(own: Model, tier_models: Mapping[str, Model]) -> Footprint:
    """Where a device's nets lie among those of all tiers."""
    every, within = (
        _join({name: net.shapes() for name, net in nets.items()})
        for nets in (_all_nets(tier_models), _nets_within(own, tier_models))
    )
    return find_footprint(within, every)


def _first_weights(tier: Tier, seed: int, warm_start: Tensors | None) -> dict[str, Tensor]:
    shapes = tier.model.shapes()
    found = read_submodel(shapes, tier.footprint, warm_start) if warm_start else {}
    return found if found.keys() == shapes.keys() else tier.model.initial_weights(seed)


def _join(nets: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """What belongs to the weights of several nets in one bundle, by "net:weight"."""
    return {f"{net}:{name}": value for net, values in nets.items() for name, value in values.items()}


def _net_of(name: str) -> str:
    return name.partition(":")[0]


def _weights_of(net: str, weights: Tensors) -> dict[str, Tensor]:
    """The weights of one net of a bundle."""
    return {name.partition(":")[2]: weight for name, weight in weights.items() if _net_of(name) == net}


def _weights_for(tier: Tier, weights: Tensors) -> dict[str, Tensor]:
    """The weights of a tier's own net."""
    return _weights_of(next(net for net in map(_net_of, weights) if tier.name in net.split(",")), weights)
