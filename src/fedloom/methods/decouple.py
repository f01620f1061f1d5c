"""Decouple: a separate FedAvg for each tier. Acar & Saligrama, FedHeN, 2022, section 4."""

from collections.abc import Mapping
from dataclasses import dataclass

from ..fleet import EvalTarget, Fleet, RoundContext, ServerModel
from ..footprints import ClientUpdate, subnet_footprint
from ..tensors import Parcel, Tensors
from ._last_uploads import initial_uploads, report_problem, report_targets, updated_uploads
from .method import Method, MethodInfo, train_on_labels


@dataclass(frozen=True)
class Decouple(Method):
    """Decouple: a separate FedAvg for each tier, so that devices learn only from devices of their own size.

    A device trains its last exit. A net's earlier exits are sent and averaged with it but get no gradient: only weight
    decay moves them, and nothing that is evaluated depends on them.

    Parameters
    ----------
    report : whether to evaluate also the mean of each device's last upload, as the figures of FedHeN's paper do; the
        server then keeps a model for every device.
    """

    info = MethodInfo(paper="Acar & Saligrama, 2022", uploads="weights")
    dp_uncovered = "updates to several aggregates, one for each tier"
    train = train_on_labels

    report: bool = False

    def start(self, fleet: Fleet, seed: int, warm_start: Tensors | None = None) -> Parcel:
        weights = warm_start or fleet.global_model.initial_weights(seed)
        models = {tier.name: tier.footprint.read(weights) for tier in fleet.active_tiers}
        return {**models, **(initial_uploads(fleet, weights) if self.report else {})}

    def round(self, server: Parcel, context: RoundContext) -> Parcel:
        replies = context.ask(self.train, {device: {"weights": server[device.tier]} for device in context.cohort})
        models = {}
        for tier in context.fleet.active_tiers:
            full = subnet_footprint(tier.model, tier.model)
            of_tier = [reply for reply in replies if reply.device.tier == tier.name]
            updates = (ClientUpdate(full, reply.upload["weights"], 1.0) for reply in of_tier)
            models[tier.name] = context.aggregate(server[tier.name], updates)
        return {**server, **models, **updated_uploads(server, replies)}

    def eval_targets(self, server: Parcel) -> Mapping[str, EvalTarget]:
        return {"server": ServerModel(lambda tier: server[tier.name]), **report_targets(server)}

    def check_fleet(self, fleet: Fleet) -> str | None:
        return report_problem("decouple", fleet) if self.report else None
