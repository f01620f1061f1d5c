"""Partitions that cut the data into equal pieces: at random, label by label, or after sorting.

Label shards are HeteroFL's and FedBABU's "s classes per client"; sorted shards are McMahan's.
"""

import numpy as np

from .maps import Labels, Partition, Rows, check_devices, check_single, equal_parts, rows_by_label
from .matching import matching_test


def iid(labels: Labels, devices: int, generator: np.random.Generator) -> Partition:
    """Shuffle and cut into equal parts, training and test alike; a remainder stays unused."""
    check_devices(labels, devices)
    train = equal_parts(generator.permutation(len(labels.train)), devices)
    return Partition(train, equal_parts(generator.permutation(len(labels.test)), devices))


def label_shards(
    labels: Labels, devices: int, generator: np.random.Generator, *, labels_per_device: int, dedupe: bool = True
) -> Partition:
    """Every label cut into equal shards, `labels_per_device` shards per device, the same labels in training and test.

    A device may draw one label twice: with `dedupe` it then holds one shard of it and the other stays unused
    (HeteroFL), without it holds both (FedBABU, FedHeNN).
    """
    check_single(labels)
    shards = _shards_per_label(labels, devices, labels_per_device)
    drawn = generator.permutation(np.repeat(np.arange(labels.classes), shards)).reshape(devices, labels_per_device)
    numbers = np.empty_like(drawn)
    for label in range(labels.classes):
        numbers[drawn == label] = generator.permutation(shards)
    train, test = (
        [np.array_split(rows, shards) for rows in rows_by_label(part, labels.classes)]
        for part in (labels.train, labels.test)
    )
    held = [_held(*both, dedupe) for both in zip(drawn.tolist(), numbers.tolist(), strict=True)]
    return Partition(tuple(_collect(train, pairs) for pairs in held), tuple(_collect(test, pairs) for pairs in held))


def sorted_shards(labels: Labels, devices: int, generator: np.random.Generator, *, shards_per_device: int) -> Partition:
    """Sort by label, cut into equal shards, deal them at random; a shard may span two labels.

    A remainder of the sorted rows stays unused. Test rows follow the proportions of a device's training labels.
    """
    check_devices(labels, devices)
    check_single(labels)
    if not 1 <= shards_per_device <= len(labels.train) // devices:
        raise ValueError(
            f"shards_per_device = {shards_per_device}, but it must lie between 1 and the "
            f"{len(labels.train) // devices} examples a device gets; set fewer shards or fewer devices"
        )
    shards = equal_parts(np.argsort(labels.train, kind="stable"), devices * shards_per_device)
    dealt = generator.permutation(len(shards)).reshape(devices, shards_per_device)
    train = tuple(np.concatenate([shards[number] for number in numbers]) for numbers in dealt)
    return Partition(train, matching_test(labels, train, generator))


def _shards_per_label(labels: Labels, devices: int, labels_per_device: int) -> int:
    check_devices(labels, devices)
    if not 1 <= labels_per_device <= labels.classes:
        raise ValueError(
            f"labels_per_device = {labels_per_device}, but there are {labels.classes} classes to choose from"
        )
    shards, rest = divmod(labels_per_device * devices, labels.classes)
    if rest:
        raise ValueError(
            f"labels_per_device = {labels_per_device} times devices = {devices} must be a multiple of the "
            f"{labels.classes} classes, so that every label has equally many shards; change one of the two"
        )
    fewest = int(np.bincount(labels.train, minlength=labels.classes).min())
    if fewest < shards:
        raise ValueError(
            f"labels_per_device = {labels_per_device} needs {shards} shards of every label, but one label has only "
            f"{fewest} training examples; set fewer devices or fewer labels_per_device"
        )
    return shards


def _held(drawn: list[int], numbers: list[int], dedupe: bool) -> list[tuple[int, int]]:
    pairs = list(zip(drawn, numbers, strict=True))
    if not dedupe:
        return pairs
    return [pair for place, pair in enumerate(pairs) if pair[0] not in drawn[:place]]


def _collect(shards: list[list[Rows]], pairs: list[tuple[int, int]]) -> Rows:
    return np.concatenate([shards[label][number] for label, number in pairs])
