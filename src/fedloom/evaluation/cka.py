"""Linear centered kernel alignment: how alike the layers of two nets see the same examples. Kornblith et al., 2019."""

from collections.abc import Mapping

import torch
from torch import Tensor

from ..client import alignment_loss
from ..models import Model
from ..tensors import Tensors


def linear_cka(left: Tensor, right: Tensor) -> float:
    """Of two sets of features of the same examples, [n, p] and [n, q]: 1 where they differ by rotation and scale."""
    if any(bool((one == one[:1]).all()) for one in (left, right)):
        return float("nan")  # what sees no difference between examples is like nothing
    scaled = [one.double() / one.double().abs().max() for one in (left, right)]
    return 1 - float(alignment_loss({"features": scaled[1]}, "linear")(scaled[0]))


@torch.inference_mode()
def features(model: Model, weights: Tensors, x: Tensor, batch_size: int = 500) -> dict[str, Tensor]:
    """What every tap of a net makes of examples, averaged over the map: name -> [n, channels]."""
    block = {name: one.unsqueeze(0) for name, one in weights.items()}
    made: dict[str, list[Tensor]] = {}
    for part in x.split(batch_size):
        for name, tap in model(block, part.unsqueeze(0)).taps.items():
            made.setdefault(name, []).append(tap[0].flatten(2).mean(2) if tap.dim() > 3 else tap[0])
    return {name: torch.cat(parts) for name, parts in made.items()}


def cka_map(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> list[list[float]]:
    """Every layer of one net against every layer of another."""
    return [[linear_cka(one, other) for other in right.values()] for one in left.values()]
