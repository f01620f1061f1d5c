"""Test rows for a device in the proportions of its training labels.

Device test sets never overlap: where a label is in short supply, the devices that hold it get smaller test sets of
the right proportions instead of sharing examples.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .maps import Labels, Rows, deal, rows_by_label

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
