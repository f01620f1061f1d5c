"""The one local training loop. Every method trains through here."""

from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor

from ..tensors import Tensors, combine
from .client import Batch, Client
from .plan import in_groups

Objective = Callable[..., Tensor | Tensors]
"""(weights, batch) -> a loss, one number per device; or the gradient itself, where a method bends it. With several
batches a step it gets them one after the other."""


@torch.no_grad()
def fit(
    client: Client,
    weights: Tensors,
    *objectives: Objective,
    only: Collection[str] | None = None,
    batches_per_step: int = 1,
) -> dict[str, Tensor]:
    """Train on the devices' own data, as their plan says; the weights handed in are not changed.

    Several objectives take turns on every step, each with an optimizer of its own. `only` names the weights that move,
    and a gradient moves those it names: neither momentum nor decay touches the others.
    """
    trained = combine(torch.clone, weights)
    moving = trained if only is None else {name: trained[name] for name in only}
    states = [client.optimizer.start(moving) for _ in objectives]
    for steps in in_groups(client.plan, batches_per_step):
        batches = [client.batch(step) for step in steps]
        for objective, state in zip(objectives, states, strict=True):
            slope = gradient(_pulled(objective, client), moving, *batches, all_weights=trained)
            client.optimizer.step({name: moving[name] for name in slope}, slope, state, steps[0].working)
    return trained


def gradient(objective: Objective, weights: Tensors, *batches: Batch, all_weights: Tensors | None = None) -> Tensors:
    """Each device's gradient of its own loss: losses do not mix devices, so the gradient of their sum has it.

    `all_weights`: what the objective sees, where it sees more than it moves.
    """
    with torch.enable_grad():
        leaves = combine(lambda weight: weight.detach().requires_grad_(), weights)
        made = objective({**(all_weights or {}), **leaves}, *batches)
        if isinstance(made, Mapping):
            return made
        devices = batches[0].y.shape[:1]
        if made.shape != devices:
            raise ValueError(f"a loss is one number per device, {tuple(devices)}; got {tuple(made.shape)}")
        slopes = torch.autograd.grad(made.sum(), list(leaves.values()), materialize_grads=True)
    return dict(zip(leaves, slopes, strict=True))


def _pulled(objective: Objective, client: Client) -> Objective:
    """The objective, and what else the client is drawn to."""
    auxiliary = client.auxiliary_loss
    if auxiliary is None:
        return objective

    def both(weights: Tensors, *batches: Batch) -> Tensor | Tensors:
        made = objective(weights, *batches)
        if not isinstance(made, Mapping):
            return made + auxiliary(weights, batches[0])
        slope = gradient(auxiliary, {name: weights[name] for name in made}, batches[0], all_weights=weights)
        return combine(torch.add, made, slope)

    return both
