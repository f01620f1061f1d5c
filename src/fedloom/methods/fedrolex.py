"""FedRolex. Alam et al., NeurIPS 2022, Algorithm 1.

Like HeteroFL, but the channels a device trains roll on by one each round, so that every weight is trained by devices of
every size.
"""

from dataclasses import dataclass
from typing import Literal

from ..fleet import Fleet, RoundContext, Tier
from ..footprints import ClientUpdate, Footprint, between, rolling
from ..tensors import Parcel
from .method import BY_EXAMPLES, Method, train_on_labels


@dataclass(frozen=True)
class FedRolex(Method):
    paper = "Alam et al., NeurIPS 2022"
    leaves, keeps, gives = "weights of the device's window, example count", "nothing", "global"
    train = train_on_labels

    weighting: Literal["uniform", "examples"] = "uniform"

    def round(self, server: Parcel, context: RoundContext) -> Parcel:
        window = {
            tier.name: self.aggregation_footprint(tier, context.fleet, context.number)
            for tier in context.fleet.active_tiers
        }
        inboxes = {device: {"weights": window[device.tier].read(server["weights"])} for device in context.cohort}
        replies = context.ask(self.train, inboxes)
        share = {reply.device: reply.examples if self.weighting == "examples" else 1.0 for reply in replies}
        said = (ClientUpdate(window[r.device.tier], r.sent["weights"], share[r.device]) for r in replies)
        return {"weights": context.aggregate(server["weights"], said)}

    @property
    def dp_uncovered(self) -> str:
        return BY_EXAMPLES if self.weighting == "examples" else ""

    def aggregation_footprint(self, tier: Tier, fleet: Fleet, round_number: int) -> Footprint:
        return between(tier.model.shapes(), fleet.global_model.shapes(), rolling(round_number - 1))

    def check_fleet(self, fleet: Fleet) -> str | None:
        """A layer behind a flattened map has several inputs for each channel, and they would have to roll together."""
        large = fleet.global_model.shapes()
        for tier in fleet.active_tiers:
            small = tier.model.shapes()
            channels = {(shape[0], large[name][0]) for name, shape in small.items()}
            for name, shape in small.items():
                if len(shape) > 1 and shape[1] != large[name][1] and (shape[1], large[name][1]) not in channels:
                    return f"fedrolex cannot roll {name}, whose inputs are not one for each channel of a layer"
        return None
