"""E-FedSup: FedSup where each device gets only a subnet that it can run. Kim & Yun, 2022, section 3.3.

Each round a device gets a random architecture within its tier's budget and trains it plainly. The server fills in the
weights a device did not have with those it sent, and averages: weights that few devices hold move little.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ..fleet import Device, Fleet, Reply, RoundContext
from ..footprints import ClientUpdate, subnet_footprint
from ..models import Model, SearchSpace, compute_cost
from ..seeds import SUBNET_OF_DEVICE
from ..settings import FrozenDict, Share
from ..tensors import Parcel
from ._supernet import SpaceChoice, build_space, space_problem
from .method import Method, MethodInfo, train_on_labels


@dataclass(frozen=True)
class EFedSup(Method):
    """E-FedSup: each device trains a random subnet of the supernet that fits its budget.

    Parameters
    ----------
    space : the sizes that subnets are sampled from: "tiers", all combinations of what the tiers differ in; the name of
        a search space; or a list of choices for each setting of the model.
    budgets : a tier's budget as a share of the supernet's multiply-adds, by tier; by default the cost of the tier's own
        model.
    aggregation : which devices a weight is averaged over: "padding", as published (section 3.3: parts that were not
        updated are filled with what was broadcast), all devices of the round, so that weights few devices hold move
        little; "holders", those that trained it, as in HeteroFL, which learns faster where coverage is low.
    """

    info = MethodInfo(paper="Kim & Yun, 2022", uploads="weights of the device's subnet, example count")
    train = train_on_labels

    space: SpaceChoice = "tiers"
    budgets: Mapping[str, Share] = FrozenDict()
    aggregation: Literal["padding", "holders"] = "padding"

    def round(self, server: Parcel, context: RoundContext) -> Parcel:
        supernet = context.fleet.global_model
        cohort = [self._with_subnet(device, context) for device in context.cohort]
        inboxes = {device: {"weights": device.footprint.read(server["weights"])} for device in cohort}
        replies = context.ask(self.train, inboxes)
        full = subnet_footprint(supernet, supernet)

        def fill_in(reply: Reply) -> ClientUpdate:
            weights = reply.device.footprint.write(server["weights"], reply.upload["weights"])
            return ClientUpdate(full, weights, reply.examples)

        def as_sent(reply: Reply) -> ClientUpdate:
            return ClientUpdate(reply.device.footprint, reply.upload["weights"], reply.examples)

        updates = map(fill_in if self.aggregation == "padding" else as_sent, replies)
        return {"weights": context.aggregate(server["weights"], updates)}

    def _with_subnet(self, device: Device, context: RoundContext) -> Device:
        supernet, subnets = context.fleet.global_model, self._subnets(context.fleet)
        draw = context.draw(SUBNET_OF_DEVICE + device.name)
        budget = self._budget(device.tier, device.model, supernet)
        return device.with_model(subnets.sample_within(supernet, draw, budget), supernet)

    def _subnets(self, fleet: Fleet) -> SearchSpace:
        return build_space(self.space, [tier.model for tier in fleet.active_tiers])

    def _budget(self, tier: str, model: Model, supernet: Model) -> float:
        """In multiply-adds."""
        return self.budgets[tier] * compute_cost(supernet).macs if tier in self.budgets else compute_cost(model).macs

    def check_fleet(self, fleet: Fleet) -> str | None:
        unknown = self.budgets.keys() - {tier.name for tier in fleet.active_tiers}
        if unknown:
            return f"efedsup has a budget for {min(unknown)!r}, which is no tier"
        problem = space_problem("efedsup", self.space, fleet)
        if problem:
            return problem
        supernet = fleet.global_model
        least = compute_cost(self._subnets(fleet).smallest(supernet)).macs
        for tier in fleet.active_tiers:
            if self._budget(tier.name, tier.model, supernet) < least:
                return f"efedsup has no subnet within the budget of {tier.name!r}: the smallest costs {least:,}"
        return None
