"""Centralized training: one machine holds the data of all devices, or of a share of them. The papers' ceiling.

A round is one pass of the recipe's schedule over the gathered data; only a simulation can do this.
"""

from dataclasses import dataclass

from ..fleet import RoundContext
from ..footprints import ClientUpdate
from ..settings import Share
from ..tensors import Parcel
from .method import Method, train_on_labels


@dataclass(frozen=True)
class Centralized(Method):
    """`data_share` is the share of devices, in index order, whose data is gathered."""

    paper = "the ceiling every paper compares with"
    leaves, keeps, gives = "all data (simulation only)", "nothing", "global"
    admits, simulated = "one model", True
    train = train_on_labels

    data_share: Share = 1.0

    def round(self, server: Parcel, context: RoundContext) -> Parcel:
        pool = context.fleet.pool(context.fleet.largest, self.data_share)
        replies = context.ask(self.train, {pool: {"weights": server["weights"]}})
        said = (ClientUpdate(reply.device.footprint, reply.sent["weights"], 1.0) for reply in replies)
        return {"weights": context.aggregate(server["weights"], said)}
