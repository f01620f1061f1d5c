"""Losses of logits and labels, and terms that methods add to them.

A loss has one number per example; what devices minimize is its mean over their batch.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from ..models import Model
from ..registry import Registry, settable_parameters
from ..settings import Fraction, NonNegative
from ..tensors import Tensors, combine, inner
from .client import Batch, Client


class Loss(Protocol):
    """A function of logits and labels with one number per example, as torch's losses with `reduction="none"`.

    It must be hashable: runs that train with equal losses can share a block.
    """

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """[examples, classes], [examples] -> [examples]."""
        ...


@dataclass(frozen=True)
class CrossEntropy:
    """Cross entropy of the softmax with the labels.

    Parameters
    ----------
    label_smoothing : share of each label that is spread over all classes.
    """

    label_smoothing: Fraction = 0.0

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits, labels, reduction="none", label_smoothing=self.label_smoothing)


@dataclass(frozen=True)
class Focal:
    """Focal loss: cross entropy that counts examples less that are already classified well (Lin et al., ICCV 2017).

    Parameters
    ----------
    gamma : how much less; 0 is cross entropy.
    """

    gamma: NonNegative = 2.0

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        losses = F.cross_entropy(logits, labels, reduction="none")
        return (1 - (-losses).exp()) ** self.gamma * losses


CROSS_ENTROPY = CrossEntropy()

LOSSES: Registry[Callable[..., Any]] = Registry(
    "losses", {"cross_entropy": CrossEntropy, "focal": Focal}, passed=("logits", "labels")
)
"""A class whose instances are losses, or a function of `logits`, `labels` and settings that is a loss itself."""


def build_loss(entry: Callable[..., Any], settings: dict[str, Any]) -> Loss:
    """The loss of a registry's entry.

    Parameters
    ----------
    entry : a class of losses, or a function of logits and labels.
    settings : its other arguments.
    """
    if tuple(settable_parameters(entry))[:2] == LOSSES.passed:
        return entry if not settings else partial(entry, **settings)
    loss: Loss = entry(**settings)
    return loss


def label_loss(client: Client) -> Callable[[Tensors, Batch], Tensor]:
    """The ordinary objective: the recipe's loss of the model's last exit with the labels.

    Parameters
    ----------
    client : the devices that train.

    Returns
    -------
    A function (weights, batch) -> loss, [K], for `fit`.
    """
    return lambda weights, batch: supervised_loss(client.model(weights, batch.x, batch.step_seeds).logits, batch)


def dummy_loss(model: Model) -> Callable[[Tensors, Batch], Tensor]:
    """The loss of every exit with class 0, for profiling and trials without labels.

    Parameters
    ----------
    model : the model.

    Returns
    -------
    A function (weights, batch) -> loss, [K].
    """

    def loss(weights: Tensors, batch: Batch) -> Tensor:
        exits = list(model(weights, batch.x, batch.step_seeds).exits.values())
        labeled = replace(batch, y=torch.zeros(exits[-1].shape[:-1], dtype=torch.int64))
        return torch.stack([supervised_loss(logits, labeled) for logits in exits]).sum(0)

    return loss


def supervised_loss(logits: Tensor, batch: Batch) -> Tensor:
    """The recipe's loss with the labels: the mean over each device's batch and, if there are several, its positions.

    Parameters
    ----------
    logits : [K, batch, ..., classes].
    batch : the batch, with its labels and, unless it is cross entropy, its loss.

    Returns
    -------
    One loss per device, [K].
    """
    loss = batch.loss or CROSS_ENTROPY
    losses = loss(logits.flatten(0, -2), batch.y.flatten())
    return losses.view_as(batch.y).flatten(1).mean(1)


def soft_cross_entropy(logits: Tensor, teacher: Tensor) -> Tensor:
    """Cross entropy with a teacher's probabilities, which get no gradient: in-place distillation.

    Parameters
    ----------
    logits : those of the student, [K, batch, ..., classes].
    teacher : the logits of the teacher, of the same shape.

    Returns
    -------
    One loss per device, [K].
    """
    probabilities = teacher.detach().softmax(-1)
    return -(probabilities * logits.log_softmax(-1)).sum(-1).flatten(1).mean(1)


def distance(weights: Tensors, anchor: Tensors) -> Tensor:
    """Half the squared distance between two sets of weights: FedProx's proximal term.

    Parameters
    ----------
    weights : the weights that are trained, [K, ...].
    anchor : the weights to stay close to, of the same names.

    Returns
    -------
    One number per device, [K].
    """
    difference = combine(lambda weight, start: weight - start, weights, anchor)
    return 0.5 * inner(difference, difference)


def mask_logits(logits: Tensor, seen_labels: Tensor, fill: float | None) -> Tensor:
    """Replace the logits of classes that a device has not seen.

    Parameters
    ----------
    logits : [K, batch, ..., classes].
    seen_labels : booleans, [K, classes].
    fill : the new logit of unseen classes; None: leave them.
    """
    if fill is None:
        return logits
    inner_axes = [1] * (logits.dim() - 2)
    fill = float(torch.tensor(fill, dtype=logits.dtype))  # beyond the largest finite number it is infinite
    return logits.masked_fill(~seen_labels.view(len(seen_labels), *inner_axes, logits.shape[-1]), fill)
