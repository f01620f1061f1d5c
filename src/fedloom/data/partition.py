"""A partition as data: which rows of a data set each device holds.

It is computed before training from labels and a seed alone, so it can be saved, compared and reused. A device's test
rows follow its training labels and never overlap with those of another device.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from .dataset import DataBroken, DataMissing, Dataset

Rows = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.float64]

TestSizes = Literal["equal", "proportional"]
"""Whether the test sets of devices are of one size, or in proportion to their training sets."""

_FORMAT = "fedloom partition 1"


@dataclass(frozen=True, eq=False)
class Labels:
    """What a partition may use: the labels of a data set, and its groups.

    Parameters
    ----------
    train : the labels of the training examples, [n], or [n, length] if every token has one; or other targets.
    test : the labels of the test examples.
    classes : the number of classes.
    groups : the group of every training and of every test example, such as a user; None: there are no groups.
    """

    train: Rows
    test: Rows
    classes: int
    groups: tuple[Rows, Rows] | None = None

    @property
    def has_class_labels(self) -> bool:
        """True if every example has one class label."""
        return self.train.ndim == 1 and self.train.dtype.kind != "f"

    def select_train(self, rows: Rows) -> "Labels":
        """Only some of the training examples, but all test examples.

        Parameters
        ----------
        rows : the training examples to keep.
        """
        return replace(self, train=self.train[rows], groups=self.groups and (self.groups[0][rows], self.groups[1]))


@dataclass(frozen=True, eq=False)
class Partition:
    """Which examples each device holds: row numbers into the training and the test set.

    Parameters
    ----------
    train : the training rows of each device, an int64 array each.
    test : the test rows of each device.
    """

    train: tuple[Rows, ...]
    test: tuple[Rows, ...]

    def __post_init__(self) -> None:
        if len(self.train) != len(self.test):
            raise ValueError(f"training rows for {len(self.train)} devices but test rows for {len(self.test)}")

    def fingerprint(self) -> str:
        """The sha256 of the rows of every device, in order."""
        digest = hashlib.sha256()
        for rows in (*self.train, *self.test):
            digest.update(f"{len(rows)}:".encode())
            digest.update(rows.astype("<i8").data)
        return digest.hexdigest()

    def save(self, path: Path) -> None:
        """Write the partition as JSON with its fingerprint.

        Parameters
        ----------
        path : the file.
        """
        parts = {"train": [rows.tolist() for rows in self.train], "test": [rows.tolist() for rows in self.test]}
        path.write_text(json.dumps({"format": _FORMAT, "sha256": self.fingerprint(), **parts}), encoding="utf-8")

    @staticmethod
    def load(path: Path) -> "Partition":
        """Read a saved partition; raises `DataBroken` for a file that `save` did not write.

        Parameters
        ----------
        path : the file.
        """
        hint = "Write it with Partition.save, or create the partition again."
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            partition = Partition(_parse_rows(content["train"]), _parse_rows(content["test"]))
            is_intact = content["format"] == _FORMAT and content["sha256"] == partition.fingerprint()
        except FileNotFoundError:
            raise DataMissing(f"no partition at {path}", hint) from None
        except (OSError, ValueError, TypeError, KeyError, OverflowError) as problem:
            raise DataBroken(f"{path} is not a partition: {problem!r}", hint) from problem
        if not is_intact:
            raise DataBroken(f"{path} was changed after it was written", hint)
        return partition


def extract_labels(dataset: Dataset) -> Labels:
    """The labels and groups of a data set.

    Parameters
    ----------
    dataset : the data set.
    """
    groups = None if dataset.groups is None else (dataset.groups[0].numpy(), dataset.groups[1].numpy())
    return Labels(dataset.train.y.numpy(), dataset.test.y.numpy(), dataset.classes, groups)


def rows_by_label(labels: Rows, classes: int) -> list[Rows]:
    """For every label its rows, in order."""
    order = np.argsort(labels, kind="stable")
    return np.split(order, np.cumsum(np.bincount(labels, minlength=classes))[:-1])


def split_equally(rows: Rows, parts: int) -> tuple[Rows, ...]:
    """Parts of equal size, in order; the remainder is unused."""
    size = len(rows) // parts
    return tuple(rows[part * size : (part + 1) * size] for part in range(parts))


def split_by_counts(piles: Sequence[Rows], counts: Rows) -> tuple[Rows, ...]:
    """For every device the next `counts` [devices, piles] rows of each pile."""
    ends = np.cumsum(counts, axis=0)
    starts = ends - counts
    return tuple(
        np.concatenate([pile[first:last] for pile, first, last in zip(piles, begin, end, strict=True)])
        for begin, end in zip(starts.tolist(), ends.tolist(), strict=True)
    )


def check_devices(labels: Labels, devices: int) -> None:
    """Raise unless every device can get an example."""
    if not 1 <= devices <= len(labels.train):
        raise ValueError(
            f"devices = {devices}, but it must lie between 1 and the {len(labels.train)} training examples; "
            "set fewer devices or take a larger data set"
        )


def check_one_label_each(labels: Labels) -> None:
    """Raise unless every example has one class label."""
    if not labels.has_class_labels:
        each = "numbers or 0-1 labels" if labels.train.dtype.kind == "f" else f"{labels.train[0].size} labels"
        raise ValueError(
            f"every example has {each} here, but this partition needs one label per example; "
            'use "iid" or "quantity", or whole groups with "rows" or "natural"'
        )


def _parse_rows(lists: Any) -> tuple[Rows, ...]:
    if not all(type(row) is int for rows in lists for row in rows):
        raise TypeError("rows are integers")
    return tuple(np.array(rows, dtype=np.int64) for rows in lists)


def assign_test_rows(
    labels: Labels, train: Sequence[Rows], generator: np.random.Generator, sizes: TestSizes = "equal"
) -> tuple[Rows, ...]:
    """Per device and label: n_test / devices times the label's fraction of the device's training rows, rounded.

    With `sizes` "proportional", instead the same share of the label's test rows as of its training rows, so that
    devices with more training rows have more test rows. If a label has too few test rows, the devices that hold it get
    smaller test sets of the right proportions instead of sharing rows. Rounding keeps a device's total, at least one,
    as far as its labels have test rows left. Without class labels every device gets an equal random part of the test
    set.
    """
    if not labels.has_class_labels:
        return split_equally(generator.permutation(len(labels.test)), len(train))
    supply = np.bincount(labels.test, minlength=labels.classes)
    demand = _limit_to_supply(_demand(labels, train, supply, sizes), supply)
    counts = _round(demand, supply, generator)
    piles = [generator.permutation(rows) for rows in rows_by_label(labels.test, labels.classes)]
    return split_by_counts(piles, counts)


def _demand(labels: Labels, train: Sequence[Rows], supply: Rows, sizes: TestSizes) -> Numbers:
    """The ideal number of test rows, [devices, labels]; labels without test examples are left out."""
    counts = np.stack([np.bincount(labels.train[rows], minlength=labels.classes) for rows in train]).astype(np.float64)
    if sizes == "proportional":
        return counts * supply / np.maximum(np.bincount(labels.train, minlength=labels.classes), 1)
    counts[:, supply == 0] = 0
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    demand: Numbers = shares * (len(labels.test) / len(train))
    return demand


def _limit_to_supply(demand: Numbers, supply: Rows) -> Numbers:
    """Scale each device down by its scarcest label: proportions stay, and no label is used up."""
    total = demand.sum(axis=0)
    available = np.divide(supply, total, out=np.ones_like(total), where=total > supply)
    factor: Numbers = np.where(demand > 0, available, 1.0).min(axis=1, keepdims=True)
    return demand * factor


def _round(demand: Numbers, supply: Rows, generator: np.random.Generator) -> Rows:
    """Round down, then the largest remainders up while the device lacks rows and the label has some left."""
    counts = np.floor(demand).astype(np.int64)
    totals = demand.sum(axis=1)
    lacking = np.maximum(np.floor(totals + 0.5), totals > 0).astype(np.int64) - counts.sum(axis=1)
    spare = supply - counts.sum(axis=0)
    remainders = demand - counts
    # Equal remainders in random order: otherwise low labels would go to devices with low indices, and so to one tier.
    entries = generator.permutation(np.argwhere(remainders > 0))
    largest_first = np.argsort(-remainders[tuple(entries.T)], kind="stable")
    for device, label in entries[largest_first].tolist():
        if lacking[device] > 0 and spare[label] > 0:
            counts[device, label] += 1
            lacking[device] -= 1
            spare[label] -= 1
    return counts
