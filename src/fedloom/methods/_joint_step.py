"""Several nets that a device trains together, each with an optimizer of its own (FML, FedKD)."""

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from ..client import Batch, gradient
from ..tensors import Tensors

LocalLoss = Callable[[Tensors, Batch], Tensor]
Gradient = Callable[[Tensors, Batch], Tensors]


def step_together(loss: LocalLoss, net_of: Callable[[str], str], nets: Sequence[str]) -> list[Gradient]:
    """Objectives for `fit`: each net's part of the gradient of a loss of all of them.

    All are taken at the weights before the step, in one pass. As an objective each net has an optimizer state of its
    own, and its gradient is clipped on its own.

    Parameters
    ----------
    loss : a function (weights, batch) of the weights of all nets.
    net_of : the net that a weight belongs to, by its name.
    nets : the nets, in the order in which they take their steps.
    """
    grads: dict[str, Tensor] = {}

    def part_of(net: str, weights: Tensors, batch: Batch) -> Tensors:
        if net == nets[0]:
            grads.update(gradient(loss, weights, batch))
        return {name: grad for name, grad in grads.items() if net_of(name) == net}

    return [partial(part_of, net) for net in nets]
