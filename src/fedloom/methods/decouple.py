"""Decouple: a FedAvg for each tier, and nothing between tiers. Acar & Saligrama, FedHeN, 2022, section 4."""

from collections.abc import Mapping
from dataclasses import dataclass

from ..fleet import EvalTarget, Fleet, RoundContext, ServerModel
from ..footprints import ClientUpdate, part_of
from ..tensors import Parcel, Tensors
from ._last_uploads import latest_models, received, report_problem, reports
from .method import Method, train_on_labels


@dataclass(frozen=True)
class Decouple(Method):
    """`report` as in fedhen."""

    paper = "Acar & Saligrama, 2022"
    leaves, keeps, gives = "weights", "nothing", "global"
    dp_uncovered = "updates to several aggregates, one for each tier"
    train = train_on_labels

    report: bool = False

    def start(self, fleet: Fleet, seed: int, warm: Tensors | None = None) -> Parcel:
        weights = warm or fleet.global_model.initial_weights(seed)
        own = {tier.name: tier.footprint.read(weights) for tier in fleet.active_tiers}
        return {**own, **(latest_models(fleet, weights) if self.report else {})}

    def round(self, server: Parcel, context: RoundContext) -> Parcel:
        replies = context.ask(self.train, {device: {"weights": server[device.tier]} for device in context.cohort})
        merged = {}
        for tier in context.fleet.active_tiers:
            all_of_it = part_of(tier.model, tier.model)
            of_tier = [reply for reply in replies if reply.device.tier == tier.name]
            said = (ClientUpdate(all_of_it, reply.sent["weights"], 1.0) for reply in of_tier)
            merged[tier.name] = context.aggregate(server[tier.name], said)
        return {**server, **merged, **received(server, replies)}

    def eval_targets(self, server: Parcel) -> Mapping[str, EvalTarget]:
        return {"server": ServerModel(lambda tier: server[tier.name]), **reports(server)}

    def check_fleet(self, fleet: Fleet) -> str | None:
        return report_problem("decouple", fleet) if self.report else None
