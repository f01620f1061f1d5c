"""Decouple: a FedAvg for each tier, and nothing between tiers. Acar & Saligrama, FedHeN, 2022, section 4."""

from collections.abc import Mapping
from dataclasses import dataclass

from ..fleet import Candidate, Fleet, ServerModel, Turn
from ..footprints import Contribution, part_of
from ..tensors import Parcel, Tensors
from ._last_uploads import latest_models, received, report_problem, reports
from .method import Method, train_on_labels


@dataclass(frozen=True)
class Decouple(Method):
    """`report` as in fedhen."""

    paper = "Acar & Saligrama, 2022"
    leaves, keeps, gives = "weights", "nothing", "global"
    unmerged = "votes in several merges, one for each tier"
    train = train_on_labels

    report: bool = False

    def start(self, fleet: Fleet, seed: int, warm: Tensors | None = None) -> Parcel:
        weights = warm or fleet.whole.initial(seed)
        own = {tier.name: tier.footprint.read(weights) for tier in fleet.served}
        return {**own, **(latest_models(fleet, weights) if self.report else {})}

    def round(self, server: Parcel, turn: Turn) -> Parcel:
        replies = turn.ask(self.train, {device: {"weights": server[device.tier]} for device in turn.cohort})
        merged = {}
        for tier in turn.fleet.served:
            all_of_it = part_of(tier.model, tier.model)
            of_tier = [reply for reply in replies if reply.device.tier == tier.name]
            said = (Contribution(all_of_it, reply.sent["weights"], 1.0) for reply in of_tier)
            merged[tier.name] = turn.merge(server[tier.name], said)
        return {**server, **merged, **received(server, replies)}

    def candidates(self, server: Parcel) -> Mapping[str, Candidate]:
        return {"server": ServerModel(lambda tier: server[tier.name]), **reports(server)}

    def objection(self, fleet: Fleet) -> str | None:
        return report_problem("decouple", fleet) if self.report else None
