"""FedAvg. McMahan et al., Communication-Efficient Learning of Deep Networks, AISTATS 2017, Algorithm 1."""

from dataclasses import dataclass
from typing import Literal

from ..fleet import RoundContext
from ..footprints import ClientUpdate
from ..tensors import Parcel
from .method import EXAMPLE_COUNT, Method, MethodInfo, train_on_labels


@dataclass(frozen=True)
class FedAvg(Method):
    """FedAvg: devices train one global model on their own data, and the server averages their weights.

    Parameters
    ----------
    weighting : the weight of a device in the average: the number of its examples, as published, or the same for all.
    """

    info = MethodInfo(paper="McMahan et al., AISTATS 2017", uploads="weights, example count", heterogeneity="one model")
    train = train_on_labels

    weighting: Literal["examples", "uniform"] = "examples"

    def round(self, server: Parcel, context: RoundContext) -> Parcel:
        replies = context.ask(self.train, {device: {"weights": server["weights"]} for device in context.cohort})
        share = {reply.device: reply.examples if self.weighting == "examples" else 1.0 for reply in replies}
        updates = (ClientUpdate(r.device.footprint, r.upload["weights"], share[r.device]) for r in replies)
        return {"weights": context.aggregate(server["weights"], updates)}

    @property
    def dp_uncovered(self) -> str:
        return EXAMPLE_COUNT if self.weighting == "examples" else ""
