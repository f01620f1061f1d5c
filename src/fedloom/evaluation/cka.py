"""Linear centered kernel alignment: how similar the layers of two nets represent examples. Kornblith et al., 2019."""

from collections.abc import Mapping

import torch
from torch import Tensor

from ..client import alignment_loss
from ..models import Model
from ..placement import ON_CPU, Compute, enter, leave
from ..tensors import Tensors


def linear_cka(left: Tensor, right: Tensor) -> float:
    """CKA of two sets of features of the same examples, [n, p] and [n, q]: 1 if equal up to rotation and scale."""
    if any(bool((features == features[:1]).all()) for features in (left, right)):
        return float("nan")  # undefined for constant features
    scaled = [features.double() / features.double().abs().max() for features in (left, right)]
    return 1 - float(alignment_loss({"features": scaled[1]}, "linear")(scaled[0]))


def features(
    model: Model,
    weights: Tensors,
    x: Tensor,
    batch_size: int = 500,
    with_logits: bool = False,
    compute: Compute = ON_CPU,
) -> dict[str, Tensor]:
    """The features at every tap of a net, averaged over the spatial axes: name -> [n, channels].

    With `with_logits` also the logits of every exit: nets without early exits have a single tap. The result is on the
    CPU, wherever it is computed.
    """
    block = {name: tensor.unsqueeze(0) for name, tensor in weights.items()}
    with compute.active():
        block, x = enter((block, x), compute.torch_device)
        return leave(_features(model, block, x, batch_size, with_logits))


@torch.inference_mode()
def _features(model: Model, block: Tensors, x: Tensor, batch_size: int, with_logits: bool) -> dict[str, Tensor]:
    parts: dict[str, list[Tensor]] = {}
    for batch in x.split(batch_size):
        output = model(block, batch.unsqueeze(0))
        for name, tap in output.taps.items():
            parts.setdefault(name, []).append(tap[0].flatten(2).mean(2) if tap.dim() > 3 else tap[0])
        for name, logits in output.exits.items() if with_logits else ():
            label = "logits" if len(output.exits) == 1 else f"logits of {name}"
            parts.setdefault(label, []).append(logits[0].flatten(1))
    return {name: torch.cat(tensors) for name, tensors in parts.items()}


def cka_map(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> list[list[float]]:
    """CKA of every layer of one net with every layer of another."""
    return [[linear_cka(one, other) for other in right.values()] for one in left.values()]
