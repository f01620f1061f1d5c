"""What is learned from a data set, as plain data: what a target is, where an example has targets, and what fits them.

Losses, metrics, partitions and methods ask the task what they need to know; none of them asks for a task by its name.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from ..registry import Registry

TargetKind = Literal["class", "labels", "number"]
"""One of several classes; any number of labels, each 0 or 1; or numbers."""

Positions = Literal["", "tokens", "pixels"]
"""What of an example has a target of its own; "": the example as a whole."""

TaskFamily = Literal["classification", "multi_label", "regression", "segmentation", "language_modeling"]
"""Tasks that are evaluated alike."""

IGNORED = -100
"""The target of a token or pixel that counts neither in the loss nor in a metric, as in torch."""

Problem = tuple[str, str]
"""What is wrong, and how to fix it."""


@dataclass(frozen=True)
class LearningTask:
    """What is learned: the targets of examples, and the loss and the metrics that fit them.

    Parameters
    ----------
    kind : its name in recipes.
    summary : what is learned, in a sentence.
    target : what a target is: a "class" (int64), "labels" (float32, 0 or 1 for each of them) or a "number" (float32).
    positions : what has targets: the example as a whole (""), each of its "tokens", or each of its "pixels".
    loss : the name of the loss, unless a recipe names another.
    metrics : the names of the metrics, unless a recipe names others. The first one is the headline: reports and
        verdicts are about it.
    causal : whether the prediction at a token must not depend on later tokens, which hold its answer.

    Examples
    --------
    >>> TASKS["segmentation"].class_axis, TASKS["regression"].has_class_labels
    (1, False)
    """

    kind: str
    summary: str
    target: TargetKind
    positions: Positions
    loss: str
    metrics: tuple[str, ...]
    causal: bool = False

    def __str__(self) -> str:
        return self.summary

    @cached_property
    def headline(self) -> str:
        """The metric that reports and verdicts are about."""
        return self.metrics[0]

    @cached_property
    def family(self) -> TaskFamily:
        """Tasks of a family are evaluated alike."""
        if self.target == "number":
            return "regression"
        if self.target == "labels":
            return "multi_label"
        families: dict[Positions, TaskFamily] = {
            "": "classification", "tokens": "language_modeling", "pixels": "segmentation"
        }  # fmt: skip
        return families[self.positions]

    @cached_property
    def has_class_labels(self) -> bool:
        """True if every example has one class label, by which examples can be divided over devices."""
        return self.target == "class" and not self.positions

    @cached_property
    def has_label_sets(self) -> bool:
        """True if a device holds a set of labels, its classes or words, and models can ignore the others."""
        return self.target == "class" and self.positions != "pixels"

    @cached_property
    def is_sequence(self) -> bool:
        """True if every token has a target."""
        return self.positions == "tokens"

    @cached_property
    def class_axis(self) -> int:
        """The axis of a module's output that holds the classes or outputs: 1 for pixels, as in torch, else the last."""
        return 1 if self.positions == "pixels" else -1

    @cached_property
    def dtype(self) -> torch.dtype:
        """The type of targets."""
        return torch.int64 if self.target == "class" else torch.float32

    def is_compatible(self, other: "LearningTask") -> bool:
        """True if data for the other task can also be learned as this one.

        Parameters
        ----------
        other : the other task.
        """
        return (self.target, self.positions, self.causal) == (other.target, other.positions, other.causal)

    def find_problem(self, x: Tensor, y: Tensor, outputs: int) -> Problem | None:
        """Why these cannot be the targets of the task, and how to fix it; None if they can.

        Parameters
        ----------
        x : the inputs.
        y : the targets.
        outputs : the number of classes, labels or numbers that are predicted.
        """
        noun = "labels" if self.target == "class" else "targets"
        if y.dtype != self.dtype:
            wanted = f"{noun.capitalize()} are {self.dtype}."
            return f"{noun} of type {y.dtype}", wanted if self.kind == "classification" else f"{wanted} ({self.kind})"
        shape = self._find_shape_problem(x, y, outputs)
        if shape:
            return shape
        if self.target == "number":
            finite = bool(y.isfinite().all())
            return None if finite else ("targets that are not finite", "Leave such examples out, or fill them in.")
        if self.target == "labels":
            flags = bool(((y == 0) | (y == 1)).all())
            return None if flags else ("targets other than 0 and 1", "A target is 1 where an example has the label.")
        known = y[y != IGNORED] if self.positions else y
        lowest, highest = (int(known.min()), int(known.max())) if len(known) else (0, 0)
        if lowest >= 0 and highest < outputs:
            return None
        ignored = f"; {IGNORED} marks {self.positions} to ignore" if self.positions else ""
        return (
            f"labels from {lowest} to {highest}",
            f"With {outputs} classes labels run from 0 to {outputs - 1}{ignored}.",
        )

    def _find_shape_problem(self, x: Tensor, y: Tensor, outputs: int) -> Problem | None:
        shapes = f"shape {tuple(y.shape)} for inputs of shape {tuple(x.shape)}"
        if self.target != "class":
            is_single = outputs == 1 and y.dim() == 1 and self.target == "number"
            if is_single or (y.dim() == 2 and y.shape[1] == outputs):
                return None
            each = f"{outputs} {'labels' if self.target == 'labels' else 'numbers'}"
            return f"targets of {shapes}", f"For {self.kind} give every example {each}: shape ({len(y)}, {outputs})."
        if self.positions == "pixels":
            ok = y.dim() == 3 and x.dim() == 4
            return None if ok else (f"labels of {shapes}", "Give every pixel a label: [examples, height, width].")
        if self.positions == "tokens" or y.dim() != 1:
            ok = self.positions == "tokens" and y.shape == x.shape
            return None if ok else (f"labels of {shapes}", "Give one label per example, or one per token.")
        return None


CLASSIFICATION = LearningTask(
    "classification", "One of several classes for every example.", "class", "", "cross_entropy", ("accuracy", "loss")
)
TASKS: Registry[LearningTask] = Registry(
    "tasks",
    {
        "classification": CLASSIFICATION,
        "multi_label": LearningTask(
            "multi_label", "Any number of labels for every example, each of which it has or not.", "labels", "",
            "binary_cross_entropy", ("auroc", "f1", "average_precision", "accuracy", "exact_match", "loss"),
        ),
        "regression": LearningTask(
            "regression", "One number or several for every example.", "number", "", "mse", ("rmse", "mae", "r2", "loss")
        ),
        "segmentation": LearningTask(
            "segmentation", "One of several classes for every pixel.", "class", "pixels", "cross_entropy",
            ("mean_iou", "accuracy", "loss"),
        ),
        "masked_language_modeling": LearningTask(
            "masked_language_modeling", "The words that are masked, from those around them.", "class", "tokens",
            "cross_entropy", ("perplexity", "accuracy"),
        ),
        "causal_language_modeling": LearningTask(
            "causal_language_modeling", "The next word at every position, from those before it.", "class", "tokens",
            "cross_entropy", ("perplexity", "accuracy"), causal=True,
        ),
    },
)  # fmt: skip
"""The tasks a recipe can name under `[task]`."""


def infer_task(x: Tensor, y: Tensor, masks_tokens: bool) -> LearningTask:
    """The task that inputs and targets suggest: by the type of targets and their number of axes.

    Parameters
    ----------
    x : the inputs.
    y : the targets.
    masks_tokens : whether the preparation of the inputs masks tokens.
    """
    if y.dtype == torch.bool:
        return TASKS["multi_label"]
    if y.is_floating_point():
        flags = y.dim() == 2 and y.shape[1] > 1 and bool(((y == 0) | (y == 1)).all())
        return TASKS["multi_label" if flags else "regression"]
    if y.dim() == 3 and x.dim() == 4:
        return TASKS["segmentation"]
    if y.dim() > 1 and y.shape == x.shape:
        return TASKS["masked_language_modeling" if masks_tokens else "causal_language_modeling"]
    return CLASSIFICATION
