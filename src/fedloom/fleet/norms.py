"""How far a device moved what it was given."""

import math

from torch import Tensor

from ..tensors import Parcel, Tensors
from .device import Reply


def update_norm(reply: Reply, inbox: Parcel) -> float | None:
    """Over all bundles that come back as they were given, but for their numbers; None if there are none. What the
    server computes is its own affair."""
    mirrored = [bundle for bundle, sent in reply.sent.items() if _mirrors(sent, inbox.get(bundle, {}))]
    if not mirrored or reply.device.here:
        return None
    return math.sqrt(sum(_square(reply.sent[b][name], given) for b in mirrored for name, given in inbox[b].items()))


def _mirrors(sent: Tensors, given: Tensors) -> bool:
    return (
        bool(sent)
        and sent.keys() == given.keys()
        and all(_mirrors_one(tensor, given[name]) for name, tensor in sent.items())
    )


def _mirrors_one(sent: Tensor, given: Tensor) -> bool:
    return sent.shape == given.shape and sent.is_floating_point() and not sent.is_meta  # a rehearsal has no numbers


def _square(sent: Tensor, given: Tensor) -> float:
    return float((sent.double() - given.double()).square().sum())
