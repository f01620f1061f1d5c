"""Centralized training on the pooled data of all devices, or of a share of them: the papers' upper bound.

A round is one pass of the recipe's schedule over the pooled data. It exists in simulation only.
"""

from dataclasses import dataclass

from ..fleet import RoundContext
from ..settings import Share
from ..tensors import Parcel
from .method import Method, MethodInfo, train_on_labels


@dataclass(frozen=True)
class Centralized(Method):
    """Centralized: one model is trained on the pooled data of all devices, in simulation only (the upper bound).

    Parameters
    ----------
    data_share : the share of devices, in index order, whose data is pooled.
    """

    info = MethodInfo(
        paper="the upper bound every paper compares with",
        uploads="all data (simulation only)",
        heterogeneity="one model",
        simulation_only=True,
        server_step="trains in one place and has nothing to average",
    )
    train = train_on_labels

    data_share: Share = 1.0

    def round(self, server: Parcel, context: RoundContext) -> Parcel:
        pool = context.fleet.pooled_device(context.fleet.largest, self.data_share)
        replies = context.ask(self.train, {pool: {"weights": server["weights"]}})
        return next(({"weights": reply.upload["weights"]} for reply in replies), server)
