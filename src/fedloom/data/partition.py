"""How a data set is shared out among devices: the table of partitions, imported maps, and the dial.

A partition is a function of labels, a number of devices, a generator and its own options; it always ends.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from .dirichlet import dirichlet_per_device, dirichlet_per_label, quantity
from .maps import Labels, Partition, Rows, check_single
from .natural import natural, whole_rows
from .shards import iid, label_shards, sorted_shards

__all__ = ["PARTITIONS", "Labels", "Partition", "Rows", "from_file", "tie_to_labels"]


def from_file(labels: Labels, devices: int, generator: np.random.Generator, *, path: str) -> Partition:
    """A map made elsewhere and saved with `Partition.save`; devices may share rows in it."""
    partition = Partition.load(Path(path))
    if len(partition.train) != devices:
        raise ValueError(f"devices = {devices}, but the partition in {path} is for {len(partition.train)} devices")
    for part, maps, count in (
        ("training", partition.train, len(labels.train)),
        ("test", partition.test, len(labels.test)),
    ):
        if any(len(rows) and not 0 <= rows.min() <= rows.max() < count for rows in maps):
            raise ValueError(
                f"path = {path} names rows beyond the {count} {part} examples: is it for another data set?"
            )
    return partition


def tie_to_labels(partition: Partition, labels: Labels, dial: float, generator: np.random.Generator) -> Partition:
    """Which device holds which share, from unchanged (0) to sorted by label (1): ties tiers, given by index, to labels.

    Shares are ranked by their most frequent training label (the lowest of equals), then by their mean label, then by
    index: the label rank. They are also ranked at random. Devices get the shares in the order of
    dial · label rank + (1 - dial) · random rank, equal ones by label rank. Dial 0 draws nothing and changes nothing.
    """
    if not 0 <= dial <= 1:
        raise ValueError(f"the dial must lie between 0 (unchanged) and 1 (sorted by label), not {dial}")
    if dial == 0:
        return partition
    check_single(labels)
    by_label = _ranks(np.lexsort([_mean_labels(partition, labels), _main_labels(partition, labels)]))
    at_random = generator.permutation(len(by_label))
    order = np.lexsort([by_label, dial * by_label + (1 - dial) * at_random])
    return Partition(tuple(partition.train[share] for share in order), tuple(partition.test[share] for share in order))


def at_most(partition: Partition, examples: int | None, generator: np.random.Generator) -> Partition:
    """No device with more training examples than this: the others are drawn away at random, the test stays."""
    if examples is None:
        return partition
    return Partition(tuple(generator.permutation(rows)[:examples] for rows in partition.train), partition.test)


def held_out(examples: int, count: int, generator: np.random.Generator) -> Rows:
    """So many rows, drawn at random, that no device is to get."""
    return np.sort(generator.permutation(examples)[:count])


def thinned(partition: Partition, devices: float, keep: float, generator: np.random.Generator) -> Partition:
    """A random share of the devices keeps only a share of its training examples, and at least one."""
    count = len(partition.train)
    poorer = set(generator.permutation(count)[: round(devices * count)].tolist())

    def kept(index: int, rows: Rows) -> Rows:
        order = generator.permutation(rows)  # drawn for everybody, so that one device more or less changes no other
        return order[: max(1, round(keep * len(rows)))] if index in poorer else rows

    return Partition(tuple(kept(index, rows) for index, rows in enumerate(partition.train)), partition.test)


def _main_labels(partition: Partition, labels: Labels) -> Rows:
    return np.array([np.bincount(labels.train[rows], minlength=1).argmax() for rows in partition.train])


def _mean_labels(partition: Partition, labels: Labels) -> npt.NDArray[np.float64]:
    return np.array([labels.train[rows].mean() if len(rows) else 0.0 for rows in partition.train])


def _ranks(order: Rows) -> Rows:
    ranks = np.empty_like(order)
    ranks[order] = np.arange(len(order))
    return ranks


def own(labels: Labels, devices: int, generator: np.random.Generator) -> Partition:
    """Real devices hold what they hold, and nobody here knows it."""
    nothing = tuple(np.zeros(0, dtype=np.int64) for _ in range(devices))
    return Partition(nothing, nothing)


PARTITIONS: dict[str, Callable[..., Partition]] = {
    "iid": iid,
    "label_shards": label_shards,
    "sorted_shards": sorted_shards,
    "dirichlet_per_label": dirichlet_per_label,
    "dirichlet_per_device": dirichlet_per_device,
    "quantity": quantity,
    "rows": whole_rows,
    "natural": natural,
    "file": from_file,
    "own": own,
}
