"""What the devices of a run hold, for its report: how many of their examples have which label or range of numbers."""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..data import IGNORED, Dataset, Partition

MAX_CLASSES = 100  # columns of label counts
FREQUENT = 10  # classes shown if there are more
RANGES = 8  # of numbers, with equally many training examples each


def count_targets(dataset: Dataset, partition: Partition) -> dict[str, Any]:
    """Training examples per device and class; of very many classes, such as words, only the most frequent.

    Numbers are counted by range, labels and the classes of pixels by the examples that have them.
    """
    if dataset.task.has_label_sets:
        return _count_labels(dataset, partition)
    if dataset.task.target == "number":
        names, held = _ranges(dataset.train.y)
        noun = "range"
    else:
        is_labels = dataset.task.target == "labels"
        names, noun = _names(dataset, range(dataset.classes)), "label" if is_labels else "class"
        held = dataset.train.y.long().numpy() if is_labels else _classes_of_pixels(dataset.train.y, dataset.classes)
    counts = [held[rows].sum(0).tolist() for rows in partition.train]
    return {"classes": names, "counts": counts, "noun": noun, "examples": [len(rows) for rows in partition.train]}


def _count_labels(dataset: Dataset, partition: Partition) -> dict[str, Any]:
    labels, classes = dataset.train.y.numpy(), dataset.classes
    labels = np.where(labels == IGNORED, classes, labels) if dataset.task.positions else labels
    shown: Sequence[int] = range(classes)
    if classes > MAX_CLASSES:
        frequency = np.bincount(labels.ravel(), minlength=classes)[:classes]
        shown = np.argsort(-frequency, kind="stable")[:FREQUENT].tolist()
    counts = [np.bincount(labels[rows].ravel(), minlength=classes)[:classes] for rows in partition.train]
    shown_counts = [[int(count[label]) for label in shown] for count in counts]
    others = [int(count.sum()) - sum(some) for count, some in zip(counts, shown_counts, strict=True)]
    names = _names(dataset, shown)
    if not any(others):
        return {"classes": names, "counts": shown_counts}
    return {
        "classes": [*names, "others"],
        "counts": [[*some, other] for some, other in zip(shown_counts, others, strict=True)],
    }


def _names(dataset: Dataset, labels: Iterable[int]) -> list[str]:
    return [dataset.class_names[label] if dataset.class_names else str(label) for label in labels]


def _ranges(y: Tensor) -> tuple[list[str], npt.NDArray[np.int64]]:
    """Ranges of the first number, and which example is in which, [examples, ranges]."""
    numbers = (y if y.dim() == 1 else y[:, 0]).double().numpy()
    edges = np.unique(np.quantile(numbers, np.linspace(0, 1, RANGES + 1)))
    if len(edges) == 1:
        return [f"{edges[0]:.3g}"], np.ones((len(numbers), 1), dtype=np.int64)
    bins = np.clip(np.searchsorted(edges, numbers, side="right") - 1, 0, len(edges) - 2)
    return [f"{low:.3g} to {high:.3g}" for low, high in pairwise(edges)], np.eye(len(edges) - 1, dtype=np.int64)[bins]


def _classes_of_pixels(y: Tensor, classes: int) -> npt.NDArray[np.int64]:
    """[examples, classes]: 1 where some pixel of an example has the class."""
    return torch.stack([(y == label).flatten(1).any(1) for label in range(classes)], 1).long().numpy()
