"""E-FedSup: FedSup where each device gets only a sub-net it can carry. Kim & Yun, 2022, section 3.3.

Every round a device draws an architecture within its tier's budget and trains it plainly. The server fills what a
device did not have with what it broadcast, and averages: a weight few devices hold moves little, unlike in HeteroFL.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from ..fleet import Device, Fleet, Reply, RoundContext, Tier
from ..footprints import ClientUpdate, part_of
from ..models import Model, cost
from ..seeds import SUBNET_OF_DEVICE
from ..settings import FixedTable, Share
from ..tensors import Parcel
from ._supernet import Choice, chosen, space_problem
from .method import Method, train_on_labels


@dataclass(frozen=True)
class EFedSup(Method):
    """`space` as in fedsup. `budgets` are shares of the supernet's multiply-adds, by tier; a tier without one may spend
    what its own model costs."""

    paper = "Kim & Yun, 2022"
    leaves, keeps, gives = "weights of the device's sub-net, example count", "nothing", "global"
    train = train_on_labels

    space: Choice = "tiers"
    budgets: Mapping[str, Share] = FixedTable()

    def round(self, server: Parcel, context: RoundContext) -> Parcel:
        cohort = [self._with_subnet(device, context) for device in context.cohort]
        inboxes = {device: {"weights": device.footprint.read(server["weights"])} for device in cohort}
        replies = context.ask(self.train, inboxes)
        all_of_it = part_of(context.fleet.global_model, context.fleet.global_model)

        def padded(reply: Reply) -> ClientUpdate:
            weights = reply.device.footprint.write(server["weights"], reply.sent["weights"])
            return ClientUpdate(all_of_it, weights, reply.examples)

        return {"weights": context.aggregate(server["weights"], map(padded, replies))}

    def _with_subnet(self, device: Device, context: RoundContext) -> Device:
        whole, nets = (
            context.fleet.global_model,
            chosen(self.space, [tier.model for tier in context.fleet.active_tiers]),
        )
        draw = context.draw(SUBNET_OF_DEVICE + device.name)
        return device.with_model(nets.sample_within(whole, draw, self._budget(device, whole)), whole)

    def _budget(self, carrier: Device | Tier, whole: Model) -> float:
        """In multiply-adds."""
        name = carrier.tier if isinstance(carrier, Device) else carrier.name
        return self.budgets[name] * cost(whole).macs if name in self.budgets else cost(carrier.model).macs

    def check_fleet(self, fleet: Fleet) -> str | None:
        unknown = self.budgets.keys() - {tier.name for tier in fleet.active_tiers}
        if unknown:
            return f"efedsup has a budget for {min(unknown)!r}, which is no tier"
        problem = space_problem("efedsup", self.space, fleet)
        if problem:
            return problem
        least = cost(chosen(self.space, [tier.model for tier in fleet.active_tiers]).smallest(fleet.global_model)).macs
        poor = [tier.name for tier in fleet.active_tiers if self._budget(tier, fleet.global_model) < least]
        return (
            f"efedsup has no sub-net within the budget of {poor[0]!r}: the smallest costs {least:,}" if poor else None
        )
