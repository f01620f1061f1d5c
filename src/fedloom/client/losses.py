"""Losses of a model's outputs and the targets, and terms that methods add to them.

A loss has one number per example, token or pixel; what devices minimize is its mean over their batch.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from ..data import IGNORED, LearningTask
from ..data.tasks import TargetKind
from ..models import Model
from ..registry import Registry, settable_parameters
from ..settings import Fraction, NonNegative, Positive
from ..tensors import Tensors, combine, inner
from .client import Batch, Client


class Loss(Protocol):
    """A function of logits and labels with one number per example, as torch's losses with `reduction="none"`.

    It must be hashable: runs that train with equal losses can share a block. Its attribute `targets` says which kinds
    of target it is for ("class", "labels", "number"); without it, it is for any.
    """

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Classes: [examples, classes], [examples] -> [examples]. Labels and numbers: [examples, outputs] both, and one
        number per example or per output."""
        ...


@dataclass(frozen=True)
class CrossEntropy:
    """Cross entropy of the softmax with the labels.

    Parameters
    ----------
    label_smoothing : share of each label that is spread over all classes.
    """

    targets: ClassVar[tuple[TargetKind, ...]] = ("class",)

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

    targets: ClassVar[tuple[TargetKind, ...]] = ("class",)

    gamma: NonNegative = 2.0

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        losses = F.cross_entropy(logits, labels, reduction="none")
        return (1 - (-losses).exp()) ** self.gamma * losses


@dataclass(frozen=True)
class BinaryCrossEntropy:
    """Binary cross entropy of each label's sigmoid, the mean over labels.

    Parameters
    ----------
    pos_weight : the weight of labels that an example has, relative to those that it lacks; above 1 for rare labels.
    """

    targets: ClassVar[tuple[TargetKind, ...]] = ("labels",)

    pos_weight: Positive = 1.0

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        weight = None if self.pos_weight == 1 else logits.new_tensor(self.pos_weight)
        return F.binary_cross_entropy_with_logits(logits, labels, reduction="none", pos_weight=weight).mean(-1)


@dataclass(frozen=True)
class MeanSquaredError:
    """Squared error, the mean over outputs."""

    targets: ClassVar[tuple[TargetKind, ...]] = ("number",)

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        return (logits - labels).square().mean(-1)


@dataclass(frozen=True)
class MeanAbsoluteError:
    """Absolute error, the mean over outputs: outliers count less than by squared errors."""

    targets: ClassVar[tuple[TargetKind, ...]] = ("number",)

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        return (logits - labels).abs().mean(-1)


@dataclass(frozen=True)
class Huber:
    """Huber loss: squared error for small errors, absolute error for large ones, the mean over outputs.

    Parameters
    ----------
    delta : where it changes from one to the other, in units of the targets.
    """

    targets: ClassVar[tuple[TargetKind, ...]] = ("number",)

    delta: Positive = 1.0

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.huber_loss(logits, labels, reduction="none", delta=self.delta).mean(-1)


CROSS_ENTROPY = CrossEntropy()

LOSSES: Registry[Callable[..., Any]] = Registry(
    "losses",
    {
        "cross_entropy": CrossEntropy,
        "focal": Focal,
        "binary_cross_entropy": BinaryCrossEntropy,
        "mse": MeanSquaredError,
        "mae": MeanAbsoluteError,
        "huber": Huber,
    },
    passed=("logits", "labels"),
)
"""A class whose instances are losses, or a function of `logits`, `labels` and settings that is a loss itself."""


def fits_task(entry: Callable[..., Any], task: LearningTask) -> bool:
    """True if a loss is for the targets of a task, or does not say what it is for.

    Parameters
    ----------
    entry : a loss, or a class of losses.
    task : the task.
    """
    return task.target in getattr(entry, "targets", (task.target,))


@lru_cache(maxsize=64)
def default_loss(task: LearningTask) -> Loss:
    """The loss of a task, unless a recipe names another.

    Parameters
    ----------
    task : the task.
    """
    return build_loss(LOSSES[task.loss], {})


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
    """Cross entropy of every exit with class 0, for profiling and trials without targets.

    Parameters
    ----------
    model : the model.

    Returns
    -------
    A function (weights, batch) -> loss, [K].
    """

    def loss(weights: Tensors, batch: Batch) -> Tensor:
        exits = list(model(weights, batch.x, batch.step_seeds).exits.values())
        labeled = replace(batch, y=torch.zeros(exits[-1].shape[:-1], dtype=torch.int64, device=batch.x.device))
        return torch.stack([supervised_loss(logits, labeled) for logits in exits]).sum(0)

    return loss


def supervised_loss(logits: Tensor, batch: Batch) -> Tensor:
    """The recipe's loss with the targets: the mean over each device's batch and, if there are several, its positions.

    Tokens and pixels whose label is -100 do not count.

    Parameters
    ----------
    logits : [K, batch, ..., classes].
    batch : the batch, with its targets and, unless it is cross entropy, its loss.

    Returns
    -------
    One loss per device, [K].
    """
    loss = batch.loss or CROSS_ENTROPY
    if batch.y.is_floating_point():
        outputs = logits.flatten(0, 1)
        return loss(outputs, batch.y.reshape(outputs.shape).to(outputs.dtype)).reshape(len(logits), -1).mean(1)
    ignored = batch.y == IGNORED if batch.y.dim() > 2 else None
    if ignored is None or (ignored.is_cpu and not bool(ignored.any())):
        losses = loss(logits.flatten(0, -2), batch.y.flatten())
        return losses.view_as(batch.y).flatten(1).mean(1)
    counted = ~ignored
    if ignored.is_cpu:
        losses = logits.new_zeros(batch.y.shape).masked_scatter(counted, loss(logits[counted], batch.y[counted]))
    else:  # the same numbers; how many count would have to be read back
        every = loss(logits.flatten(0, -2), batch.y.masked_fill(ignored, 0).flatten()).view_as(batch.y)
        losses = torch.where(counted, every, 0)
    totals, counts = losses.flatten(1), counted.flatten(1).sum(1)
    # a device's loss must not depend on the others of its block: the same mean as above where nothing is ignored
    return torch.where(ignored.flatten(1).any(1), totals.sum(1) / counts.clamp_min(1), totals.mean(1))


def distillation_loss(outputs: Tensor, teacher: Tensor, task: LearningTask) -> Tensor:
    """How far outputs are from a teacher's, which get no gradient, in the terms of a task.

    Cross entropy with the teacher's probabilities for classes, binary cross entropy with them for labels, and the
    squared difference for numbers.

    Parameters
    ----------
    outputs : those of the student, [K, batch, ..., classes].
    teacher : those of the teacher, of the same shape.
    task : what is learned.

    Returns
    -------
    One loss per device, [K].
    """
    if task.target == "class":
        return soft_cross_entropy(outputs, teacher)
    if task.target == "labels":
        losses = F.binary_cross_entropy_with_logits(outputs, teacher.detach().sigmoid(), reduction="none")
    else:
        losses = (outputs - teacher.detach()).square()
    return losses.flatten(1).mean(1)


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
