"""Dynamic regularization, as in FedDyn (Acar et al., ICLR 2021, Algorithm 1) and in methods that use it too.

A device keeps an estimate of its gradient, by which its loss is changed. The server keeps h, the mean of these over all
devices. Entries of the global model that a round does not update keep weights and h.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from ..client import distance
from ..fleet import Reply, RoundContext
from ..footprints import ClientUpdate, updated_entries
from ..tensors import Tensors, combine, inner
from ._reply_share import reply_shares


def dynamic_regularizer(weights: Tensors, received: Tensors, local_gradient: Tensors, alpha: float) -> Tensor:
    """[K]: alpha / 2 |weights - received|² - <local gradient, weights>, which is added to a device's loss."""
    return alpha * distance(weights, received) - inner(local_gradient, weights)


def next_gradient(local_gradient: Tensors, trained: Tensors, received: Tensors, alpha: float) -> dict[str, Tensor]:
    """A device's estimate of its gradient after training."""
    return combine(lambda g, new, old: g - alpha * (new - old), local_gradient, trained, received)


def average_and_correct(
    context: RoundContext,
    before: Tensors,
    h: Tensors,
    replies: Sequence[Reply],
    updates: Sequence[ClientUpdate],
    alpha: float,
    of: Literal["holders", "everyone"] = "holders",
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The server's step: h follows the mean change, and the new weights are the mean less h / alpha.

    Parameters
    ----------
    context : the round.
    before : the global weights that devices started from.
    h : the mean of the devices' gradients so far.
    replies : the replies of the round, and
    updates : what is averaged of them.
    alpha : the strength of the regularizer.
    of : whether h is a mean over the devices that hold an entry ("holders"), or over all devices ("everyone").
    """
    mean = context.aggregate(before, updates)
    shares = reply_shares(context, before, replies, of)
    updated = updated_entries(context.aggregate, before, updates)

    def step(h: Tensor, old: Tensor, mean: Tensor, share: Tensor) -> Tensor:
        return h.double() - alpha * share * (mean.double() - old.double())

    def where_updated(new: Tensor, old: Tensor, updated: Tensor) -> Tensor:
        return torch.where(updated, new.to(old.dtype), old)

    next_h = combine(step, h, before, mean, shares)
    weights = combine(lambda mean, h: mean.double() - h / alpha, mean, next_h)
    return combine(where_updated, weights, before, updated), combine(where_updated, next_h, h, updated)
