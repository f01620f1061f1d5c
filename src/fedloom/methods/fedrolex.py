"""FedRolex. Alam et al., NeurIPS 2022, Algorithm 1.

Like HeteroFL, but the window of channels that a device trains moves on by one each round, so that every weight is
trained by devices of every size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from ..fleet import Fleet, RoundContext, Tier
from ..footprints import AxisSlicer, ClientUpdate, Footprint, centered, find_footprint, rolling
from ..models.axes import axis_pairs
from ..seeds import SAMPLED_WINDOW, generator
from ..tensors import Parcel
from .method import EXAMPLE_COUNT, Method, MethodInfo, train_on_labels


@dataclass(frozen=True)
class FedRolex(Method):
    """FedRolex: each device trains a window of channels of the global model that moves on by one every round.

    Parameters
    ----------
    weighting : the weight of a device in the average: the same for all, or the number of its examples.
    window : where the window of a round begins: "rolling", as published; "random": each tier draws a channel anew every
        round. "sampled": no window; each tier draws its channels anew every round, the same ones in layers of equal
        width: the uniformly sampled subnetworks that HeteroFL (section 3.1) found worse than its leading ones.
    """

    info = MethodInfo(paper="Alam et al., NeurIPS 2022", uploads="weights of the device's window, example count")
    train = train_on_labels

    weighting: Literal["uniform", "examples"] = "uniform"
    window: Literal["rolling", "random", "sampled"] = "rolling"

    def round(self, server: Parcel, context: RoundContext) -> Parcel:
        fleet = context.fleet
        window = {tier.name: self.aggregation_footprint(tier, fleet, context.number) for tier in fleet.active_tiers}
        inboxes = {device: {"weights": window[device.tier].read(server["weights"])} for device in context.cohort}
        replies = context.ask(self.train, inboxes)
        share = {reply.device: reply.examples if self.weighting == "examples" else 1.0 for reply in replies}
        updates = (ClientUpdate(window[r.device.tier], r.upload["weights"], share[r.device]) for r in replies)
        return {"weights": context.aggregate(server["weights"], updates)}

    def aggregation_footprint(self, tier: Tier, fleet: Fleet, round_number: int) -> Footprint:
        slicer = rolling(round_number - 1)
        if self.window == "random":  # far beyond any number of channels, around which it wraps
            slicer = rolling(int(generator(fleet.seed, SAMPLED_WINDOW, round_number, tier.name).integers(2**31)))
        if self.window == "sampled":
            slicer = sampled(lambda channels: generator(fleet.seed, SAMPLED_WINDOW, round_number, tier.name, channels))
        return find_footprint(tier.model.shapes(), fleet.global_model.shapes(), slicer)

    def check_fleet(self, fleet: Fleet) -> str | None:
        """A layer after a flattened map has several inputs per channel, which would have to roll together.

        Where heads, gates or concatenated maps are stacked on an axis, the channels of each roll. Frozen weights are
        the first channels in every round.
        """
        large, frozen = fleet.global_model.shapes(), fleet.global_model.frozen_shapes()
        for tier in fleet.active_tiers:
            small = tier.model.shapes()
            sliced = [name for name, shape in tier.model.frozen_shapes().items() if shape != frozen[name]]
            if sliced:
                return f"fedrolex cannot roll {sliced[0]}, which is frozen: give every tier the same size of this layer"
            blocks = {name: [pair.blocks() for pair in axis_pairs(name, small, large) or []] for name in small}
            channels = {(part[-1], whole[-1]) for axes in blocks.values() if axes for part, whole in axes[0]}
            for name, axes in blocks.items():
                if any(part[:-1] != whole[:-1] for axis in axes for part, whole in axis):
                    return f"fedrolex cannot roll {name}, of which smaller tiers have fewer heads or parts"
                inputs = [(part[-1], whole[-1]) for part, whole in axes[1]] if len(axes) > 1 else []
                if any(pair[0] != pair[1] and pair not in channels for pair in inputs):
                    return f"fedrolex cannot roll {name}, whose inputs are not one for each channel of a layer"
        return None

    @property
    def dp_uncovered(self) -> str:
        return EXAMPLE_COUNT if self.weighting == "examples" else ""


def sampled(draw: Callable[[int], np.random.Generator]) -> AxisSlicer:
    """Channels drawn without replacement, in their order; of kernels the center.

    Parameters
    ----------
    draw : the number of channels of a layer -> a new generator, so that layers of equal width keep the same channels.

    Returns
    -------
    A slicer for `find_footprint`.
    """

    def slicer(axis: int, small: int, large: int) -> slice | Tensor:
        if small == large or axis >= 2:
            return centered(axis, small, large)
        return torch.from_numpy(np.sort(draw(large).permutation(large)[:small]))

    return slicer
