"""Participation by entry, for methods whose server state is a mean over all devices, also those that did not reply.

In a paper where all devices have the same model it is one number, |S| / N. With nested models every entry has its own:
a reply counts only where its slice has the entry.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from ..fleet import Reply, RoundContext
from ..footprints import count_contributors
from ..tensors import Tensors


def reply_shares(
    context: RoundContext, weights: Tensors, replies: Sequence[Reply], of: Literal["holders", "everyone"] = "holders"
) -> dict[str, Tensor]:
    """For each entry, the replies that cover it as a share of the devices.

    Parameters
    ----------
    context : the round, whose eligible devices are the paper's N.
    weights : the global weights.
    replies : the replies of the round.
    of : the share of the devices that hold the entry ("holders"), or of all devices ("everyone").

    Returns
    -------
    Shares in float64, in the shapes of the weights; 0 for entries that no device holds.
    """
    devices = Counter(device.tier for device in context.fleet.eligible_devices(context.number))
    replied = Counter(reply.device.tier for reply in replies)
    footprints = {tier.name: tier.footprint for tier in context.fleet.active_tiers}

    def count(name: str, weight: Tensor, tiers: Counter[str]) -> Tensor:
        return count_contributors(name, weight, [(footprints[tier], float(size)) for tier, size in tiers.items()])

    def whole(name: str, weight: Tensor) -> Tensor | int:
        return devices.total() if of == "everyone" else count(name, weight, devices).clamp_min(1)

    return {name: count(name, weight, replied) / whole(name, weight) for name, weight in weights.items()}
