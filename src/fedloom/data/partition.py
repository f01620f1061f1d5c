"""A partition as data: which rows of a data set each device holds.

A map is made before training from labels and a seed alone, so it can be saved, compared and taken elsewhere.

Test rows for a device in the proportions of its training labels.

Device test sets never overlap: where a label is in short supply, the devices that hold it get smaller test sets of
the right proportions instead of sharing examples.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .dataset import DataBroken, DataMissing, Dataset

Rows = npt.NDArray[np.int64]

_FORMAT = "fedloom partition 1"


@dataclass(frozen=True, eq=False)
class Labels:
    """What a partition may look at: labels, and the group of every training and every test example if there are any."""

    train: Rows
    test: Rows
    classes: int
    groups: tuple[Rows, Rows] | None = None

    def only(self, rows: Rows) -> "Labels":
        """Those of these training examples, and all test examples."""
        return replace(self, train=self.train[rows], groups=self.groups and (self.groups[0][rows], self.groups[1]))


@dataclass(frozen=True, eq=False)
class Partition:
    """Which examples each device holds: row numbers into the training and the test set."""

    train: tuple[Rows, ...]
    test: tuple[Rows, ...]

    def __post_init__(self) -> None:
        if len(self.train) != len(self.test):
            raise ValueError(f"training rows for {len(self.train)} devices but test rows for {len(self.test)}")

    def fingerprint(self) -> str:
        """The sha256 of who holds what, in which order."""
        digest = hashlib.sha256()
        for rows in (*self.train, *self.test):
            digest.update(f"{len(rows)}:".encode())
            digest.update(rows.astype("<i8").data)
        return digest.hexdigest()

    def save(self, path: Path) -> None:
        """Write the map as JSON with its own fingerprint."""
        parts = {"train": [rows.tolist() for rows in self.train], "test": [rows.tolist() for rows in self.test]}
        path.write_text(json.dumps({"format": _FORMAT, "sha256": self.fingerprint(), **parts}), encoding="utf-8")

    @staticmethod
    def load(path: Path) -> "Partition":
        """Read a saved map; refuses a file that is not what `save` wrote."""
        hint = "Write it with Partition.save, or make the partition anew."
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            partition = Partition(_rows(content["train"]), _rows(content["test"]))
            whole = content["format"] == _FORMAT and content["sha256"] == partition.fingerprint()
        except FileNotFoundError:
            raise DataMissing(f"there is no partition at {path}", hint) from None
        except (OSError, ValueError, TypeError, KeyError, OverflowError) as problem:
            raise DataBroken(f"{path} is not a partition: {problem!r}", hint) from problem
        if not whole:
            raise DataBroken(f"{path} was changed after it was written", hint)
        return partition


def labels_of(dataset: Dataset) -> Labels:
    """What a partition may look at in this data set."""
    groups = None if dataset.groups is None else (dataset.groups[0].numpy(), dataset.groups[1].numpy())
    return Labels(dataset.train.y.numpy(), dataset.test.y.numpy(), dataset.classes, groups)


def rows_by_label(labels: Rows, classes: int) -> list[Rows]:
    """For every label, the rows that carry it, in their order."""
    order = np.argsort(labels, kind="stable")
    return np.split(order, np.cumsum(np.bincount(labels, minlength=classes))[:-1])


def equal_parts(rows: Rows, parts: int) -> tuple[Rows, ...]:
    """As many rows for everybody, in their order; a remainder stays unused."""
    size = len(rows) // parts
    return tuple(rows[part * size : (part + 1) * size] for part in range(parts))


def deal(piles: Sequence[Rows], counts: Rows) -> tuple[Rows, ...]:
    """For every device its count [devices, piles] from each pile, taken one device after the other."""
    ends = np.cumsum(counts, axis=0)
    starts = ends - counts
    return tuple(
        np.concatenate([pile[first:last] for pile, first, last in zip(piles, begin, end, strict=True)])
        for begin, end in zip(starts.tolist(), ends.tolist(), strict=True)
    )


def check_devices(labels: Labels, devices: int) -> None:
    """Refuse a number of devices that cannot each hold an example."""
    if not 1 <= devices <= len(labels.train):
        raise ValueError(
            f"devices = {devices}, but it must lie between 1 and the {len(labels.train)} training examples; "
            "set fewer devices or take a larger data set"
        )


def check_single(labels: Labels) -> None:
    """Refuse to go by the label of examples that have several."""
    if labels.train.ndim > 1:
        raise ValueError(
            f"every example has {labels.train.shape[1]} labels here, but this goes by the one label of an example; "
            'take "iid", or whole groups with "rows" or "natural"'
        )


def _rows(lists: Any) -> tuple[Rows, ...]:
    if not all(type(row) is int for rows in lists for row in rows):
        raise TypeError("rows are whole numbers")
    return tuple(np.array(rows, dtype=np.int64) for rows in lists)


Numbers = npt.NDArray[np.float64]


def matching_test(labels: Labels, train: Sequence[Rows], generator: np.random.Generator) -> tuple[Rows, ...]:
    """Per device and label n_test / devices · (the label's share of the device's training rows), rounded.

    Rounding keeps a device's total, which is at least one, as far as the labels it holds have test examples to spare.
    """
    supply = np.bincount(labels.test, minlength=labels.classes)
    asked = _within_supply(_asked(labels, train, supply), supply)
    counts = _rounded(asked, supply, generator)
    piles = [generator.permutation(rows) for rows in rows_by_label(labels.test, labels.classes)]
    return deal(piles, counts)


def _asked(labels: Labels, train: Sequence[Rows], supply: Rows) -> Numbers:
    """What every device should get, [devices, labels]; a label without test examples is left out."""
    held = np.stack([np.bincount(labels.train[rows], minlength=labels.classes) for rows in train]).astype(np.float64)
    held[:, supply == 0] = 0
    shares = held / np.maximum(held.sum(axis=1, keepdims=True), 1)
    asked: Numbers = shares * (len(labels.test) / len(train))
    return asked


def _within_supply(asked: Numbers, supply: Rows) -> Numbers:
    """Shrink each device as its scarcest label demands: proportions stay, and no label is asked for too often."""
    demand = asked.sum(axis=0)
    room = np.divide(supply, demand, out=np.ones_like(demand), where=demand > supply)
    shrink: Numbers = np.where(asked > 0, room, 1.0).min(axis=1, keepdims=True)
    return asked * shrink


def _rounded(asked: Numbers, supply: Rows, generator: np.random.Generator) -> Rows:
    """Everything rounded down, then the largest remainders up while the device lacks rows and the label has some."""
    counts = np.floor(asked).astype(np.int64)
    totals = asked.sum(axis=1)
    lacking = np.maximum(np.floor(totals + 0.5), totals > 0).astype(np.int64) - counts.sum(axis=1)
    spare = supply - counts.sum(axis=0)
    remainders = asked - counts
    # Equal remainders in random order: else low labels would go to devices with low numbers, and so to a tier.
    entries = generator.permutation(np.argwhere(remainders > 0))
    largest_first = np.argsort(-remainders[tuple(entries.T)], kind="stable")
    for device, label in entries[largest_first].tolist():
        if lacking[device] > 0 and spare[label] > 0:
            counts[device, label] += 1
            lacking[device] -= 1
            spare[label] -= 1
    return counts
