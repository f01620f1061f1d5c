"""Partitions along the groups a data set comes in: rows of text dealt to devices, or a device for every user.

Where a device's examples belong together already, nothing has to be made uneven by chance.
"""

from collections.abc import Iterable

import numpy as np

from ..settings import Count
from .maps import Labels, Partition, Rows, check_devices, equal_parts


def whole_rows(labels: Labels, devices: int, generator: np.random.Generator) -> Partition:
    """Whole rows of text dealt at random, as many to every device; a remainder stays unused.

    Test examples follow their row; where the test set has other rows than the training set, every device gets an equal
    stretch of it, so that nobody is left without because there are fewer test rows than devices.
    """
    check_devices(labels, devices)
    train, test = _groups(labels)
    names = np.unique(train)
    if len(names) < devices:
        raise ValueError(f"devices = {devices}, but there are only {len(names)} rows to deal; set fewer devices")
    dealt = equal_parts(generator.permutation(names), devices)
    if np.isin(test, names).any():
        return Partition(_members(train, dealt), _members(test, dealt))
    return Partition(_members(train, dealt), equal_parts(np.arange(len(test)), devices))


def natural(labels: Labels, devices: int, generator: np.random.Generator, *, least: Count = 1) -> Partition:
    """A device for each of the groups with most training examples, the first to appear among equals.

    Which device is whose is random: else tiers, given by index, would go by the number of examples. A device tests on
    its own group's test examples, and has none if there are none.
    """
    check_devices(labels, devices)
    train, test = _groups(labels)
    names, first, counts = np.unique(train, return_index=True, return_counts=True)
    enough = int((counts >= least).sum())
    if enough < devices:
        raise ValueError(
            f"devices = {devices}, but only {enough} of {len(names)} groups have least = {least} training examples; "
            "set fewer devices or a smaller least"
        )
    largest = np.lexsort([first, -counts])[:devices]
    own = generator.permutation(names[largest])[:, None]
    return Partition(_members(train, own), _members(test, own))


def _groups(labels: Labels) -> tuple[Rows, Rows]:
    if labels.groups is None:
        raise ValueError('this data set does not say which examples belong together; take "iid" or another partition')
    return labels.groups


def _members(groups: Rows, wanted: Iterable[Rows]) -> tuple[Rows, ...]:
    """For every list of groups the rows of their examples, group by group and in order."""
    order = np.argsort(groups, kind="stable")
    ordered = groups[order]

    def of(own: Rows) -> Rows:
        starts, ends = (np.searchsorted(ordered, own, side) for side in ("left", "right"))
        return np.concatenate([order[start:end] for start, end in zip(starts, ends, strict=True)])

    return tuple(of(own) for own in wanted)
