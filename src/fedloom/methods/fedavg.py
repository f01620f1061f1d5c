"""FedAvg. McMahan et al., Communication-Efficient Learning of Deep Networks, AISTATS 2017, Algorithm 1."""

from dataclasses import dataclass
from typing import Literal

from ..fleet import RoundContext
from ..footprints import ClientUpdate
from ..tensors import Parcel
from .method import BY_EXAMPLES, Method, train_on_labels


@dataclass(frozen=True)
class FedAvg(Method):
    paper = "McMahan et al., AISTATS 2017"
    leaves, keeps, gives = "weights, example count", "nothing", "global"
    admits = "one model"
    train = train_on_labels

    weighting: Literal["examples", "uniform"] = "examples"

    @property
    def dp_uncovered(self) -> str:
        return BY_EXAMPLES if self.weighting == "examples" else ""

    def round(self, server: Parcel, context: RoundContext) -> Parcel:
        replies = context.ask(self.train, {device: {"weights": server["weights"]} for device in context.cohort})
        share = {reply.device: reply.examples if self.weighting == "examples" else 1.0 for reply in replies}
        said = (ClientUpdate(r.device.footprint, r.sent["weights"], share[r.device]) for r in replies)
        return {"weights": context.aggregate(server["weights"], said)}
