"""Local training: the one training loop that every method uses."""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from ..models.lanes import lay_out
from ..tensors import Tensors, combine, finite_devices, per_device
from .client import Batch, Client
from .lane_optimizers import in_lanes
from .plan import group_steps

Objective = Callable[..., Tensor | Tensors]
"""(weights, *batches) -> a loss, [K], or the gradient itself if a method computes its own."""


@torch.no_grad()
def fit(
    client: Client,
    weights: Tensors,
    *objectives: Objective,
    only: Collection[str] | None = None,
    batches_per_step: int = 1,
    entries: Callable[..., Tensors] | None = None,
) -> dict[str, Tensor]:
    """Train on the devices' own data and return the new weights; the given ones are not changed.

    The batches, their order and the optimizer are those of the client, so that all methods train alike. Several
    objectives alternate within every step, each with its own optimizer state.

    Parameters
    ----------
    client : the devices that train.
    weights : the initial weights, [K, ...].
    objectives : functions (weights, *batches) that return a loss, [K], or the gradient itself: a dict of the weights
        that it changes.
    only : the names of the trainable weights; None: all. Momentum and decay do not touch the others.
    batches_per_step : how many batches an objective receives in each step.
    entries : a function (*batches) that returns which entries a step may change, booleans [K, ...] by name of the
        weight. Others keep their value and the optimizer's state, where a zero gradient would let momentum and decay
        move them; None: all.

    Returns
    -------
    The trained weights, [K, ...].

    Examples
    --------
    >>> def loss(weights: Tensors, batch: Batch) -> Tensor:
    ...     logits = client.model(weights, batch.x, batch.step_seeds).logits
    ...     return cross_entropy(logits, batch)
    >>> weights = fit(client, inbox["weights"], loss)
    """
    interleaved = client.model.trains_interleaved()
    trained = lay_out(weights) if interleaved else combine(torch.clone, weights)
    trainable = trained if only is None else {name: trained[name] for name in only}
    optimizer = in_lanes(client.optimizer, trainable) if interleaved else client.optimizer
    states = [optimizer.start(trainable) for _ in objectives]
    scale = _first_scale(client, trained)
    for steps in group_steps(client.plan, batches_per_step):
        batches = [client.batch(step) for step in steps]
        if scale is not None:
            batches = [replace(batch, loss_scale=scale) for batch in batches]
        for objective, state in zip(objectives, states, strict=True):
            grads = gradient(_with_auxiliary_loss(objective, client), trainable, *batches, all_weights=trained)
            active = steps[0].active
            if scale is not None:
                active, scale = _skip_overflow(grads, active, scale)
            changed = {name: trainable[name] for name in grads}
            if entries is None:
                optimizer.step(changed, grads, state, active)
            else:
                with _only_entries(entries(*batches), changed, *state.values()):
                    optimizer.step(changed, grads, state, active)
    return combine(Tensor.contiguous, trained) if interleaved else trained


FIRST_SCALE, LARGEST_SCALE, GROWTH = 2.0**12, 2.0**16, 2.0 ** (1 / 200)
"""In float16: the first factor on losses, the largest, and its growth by step. It is halved after an overflow."""


def _first_scale(client: Client, weights: Tensors) -> Tensor | None:
    """[K]; None unless models compute in float16."""
    if client.model.precision != "float16":
        return None
    first = next(iter(weights.values()))
    return first.new_full((len(first),), FIRST_SCALE)


def _skip_overflow(grads: Tensors, active: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Devices whose gradient is not finite skip the step and halve their scale. Nothing waits for an accelerator."""
    finite = finite_devices(grads)
    return active * finite, torch.where(finite, (scale * GROWTH).clamp_max(LARGEST_SCALE), scale / 2)


@contextmanager
def _only_entries(entries: Tensors, *bundles: Tensors) -> Iterator[None]:
    """Undo whatever changes in other entries of weights and states."""
    held = [{name: bundle[name].clone() for name in entries if name in bundle} for bundle in bundles]
    yield
    for bundle, before in zip(bundles, held, strict=True):
        for name, tensor in before.items():
            bundle[name].copy_(torch.where(entries[name], bundle[name], tensor))


def gradient(objective: Objective, weights: Tensors, *batches: Batch, all_weights: Tensors | None = None) -> Tensors:
    """Each device's gradient of its own loss. Devices do not share losses, so the gradient of the sum contains it.

    Parameters
    ----------
    objective : a function (weights, *batches) that returns a loss, [K], or the gradient itself.
    weights : the weights to differentiate by, [K, ...].
    batches : what the objective receives after the weights.
    all_weights : what the objective receives, if that is more than the trainable weights.

    Returns
    -------
    The gradient, by name of the weight.
    """
    with torch.enable_grad():
        leaves = combine(lambda weight: weight.detach().requires_grad_(), weights)
        loss = objective({**(all_weights or {}), **leaves}, *batches)
        if isinstance(loss, Mapping):
            return loss
        devices = batches[0].y.shape[:1]
        if loss.shape != devices:
            raise ValueError(f"a loss must be one number per device, {tuple(devices)}; got {tuple(loss.shape)}")
        scale = batches[0].loss_scale
        total = loss.sum() if scale is None else (loss * scale).sum()
        grads = torch.autograd.grad(total, list(leaves.values()), materialize_grads=True)
    if scale is not None:
        grads = tuple(grad / per_device(scale, grad) for grad in grads)
    return dict(zip(leaves, grads, strict=True))


def _with_auxiliary_loss(objective: Objective, client: Client) -> Objective:
    auxiliary = client.auxiliary_loss
    if auxiliary is None:
        return objective

    def total(weights: Tensors, *batches: Batch) -> Tensor | Tensors:
        loss = objective(weights, *batches)
        if not isinstance(loss, Mapping):
            return loss + auxiliary(weights, batches[0])
        grads = gradient(auxiliary, {name: weights[name] for name in loss}, batches[0], all_weights=weights)
        return combine(torch.add, loss, grads)

    return total
