"""The one local training loop. Every method trains through here."""

from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor

from ..tensors import Tensors, combine
from .client import Batch, Client

Objective = Callable[[dict[str, Tensor], Batch], Tensor | Tensors]
"""(weights, batch) -> a loss, one number per device; or the gradient itself, where a method bends it."""


@torch.no_grad()
def fit(
    client: Client, weights: Tensors, objective: Objective, only: Collection[str] | None = None
) -> dict[str, Tensor]:
    """Train on the devices' own data, as their plan says; the weights handed in are not changed.

    `only` names the weights that move; neither momentum nor decay touches the others.
    """
    trained = combine(torch.clone, weights)
    moving = trained if only is None else {name: trained[name] for name in only}
    state = client.optimiser.start(moving)
    for step in client.plan:
        slope = gradient(objective, moving, client.batch(step), trained)
        client.optimiser.step(moving, slope, state, step.working)
    return trained


def gradient(objective: Objective, weights: Tensors, batch: Batch, all_weights: Tensors | None = None) -> Tensors:
    """Each device's gradient of its own loss: losses do not mix devices, so the gradient of their sum has it.

    `all_weights`: what the objective sees, where it sees more than it moves.
    """
    with torch.enable_grad():
        leaves = combine(lambda weight: weight.detach().requires_grad_(), weights)
        made = objective({**(all_weights or {}), **leaves}, batch)
        if isinstance(made, Mapping):
            return made
        if made.shape != batch.y.shape[:1]:
            raise ValueError(f"a loss is one number per device, {tuple(batch.y.shape[:1])}; got {tuple(made.shape)}")
        slopes = torch.autograd.grad(made.sum(), list(leaves.values()), materialize_grads=True)
    return dict(zip(leaves, slopes, strict=True))
