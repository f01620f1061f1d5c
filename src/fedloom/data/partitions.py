"""The kinds of partition: how a data set is divided over devices.

A partition is a function of labels, a number of devices, a generator and its own options. All of them terminate:
random retries are counted, and then a fixed rule fills what is missing.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..registry import Registry
from ..settings import Count
from .partition import (
    Labels,
    Numbers,
    Partition,
    Rows,
    TestSizes,
    assign_test_rows,
    check_devices,
    check_one_label_each,
    rows_by_label,
    split_by_counts,
    split_equally,
)


def iid(labels: Labels, devices: int, generator: np.random.Generator) -> Partition:
    """IID: shuffle and split into equal parts, training and test set alike; the remainder is unused."""
    check_devices(labels, devices)
    train = split_equally(generator.permutation(len(labels.train)), devices)
    return Partition(train, split_equally(generator.permutation(len(labels.test)), devices))


def label_shards(
    labels: Labels, devices: int, generator: np.random.Generator, *, labels_per_device: int, dedupe: bool = True
) -> Partition:
    """Label shards: every label is split into equal shards, and every device draws some of them.

    A device has the same labels in its test set.

    Parameters
    ----------
    labels_per_device : the number of shards per device; times `devices` it must be a multiple of the number of classes.
    dedupe : what a device holds that draws a label twice: one of the shards, and the other is unused (HeteroFL), or
        both (FedBABU, FedHeNN).
    """
    check_one_label_each(labels)
    shards = _shards_per_label(labels, devices, labels_per_device)
    drawn = generator.permutation(np.repeat(np.arange(labels.classes), shards)).reshape(devices, labels_per_device)
    numbers = np.empty_like(drawn)
    for label in range(labels.classes):
        numbers[drawn == label] = generator.permutation(shards)
    train, test = (
        [np.array_split(rows, shards) for rows in rows_by_label(part, labels.classes)]
        for part in (labels.train, labels.test)
    )
    held = [_shards_of_device(*drawn_pair, dedupe) for drawn_pair in zip(drawn.tolist(), numbers.tolist(), strict=True)]
    return Partition(*(tuple(_concatenate_shards(part, shards) for shards in held) for part in (train, test)))


def pathological(
    labels: Labels,
    devices: int,
    generator: np.random.Generator,
    *,
    labels_per_device: Count,
    balanced: bool = False,
) -> Partition:
    """Pathological label skew, as in PFLlib: label by label, the next devices with room share all of its examples.

    So groups of devices have the same labels; the groups consist of random devices. A device's share of a label's test
    examples is that of its training examples.

    Parameters
    ----------
    labels_per_device : how many labels a device has.
    balanced : whether the devices of a label get equal parts of it; else all but one a random number, from a tenth of
        an equal part to a whole one, and the last the rest.
    """
    check_one_label_each(labels)
    check_devices(labels, devices)
    if labels_per_device > labels.classes:
        raise ValueError(
            f"labels_per_device = {labels_per_device}, but there are {labels.classes} classes to choose from"
        )
    room, held = np.full(devices, labels_per_device), [np.zeros(0, np.int64) for _ in range(devices)]
    sharers = -(-devices * labels_per_device // labels.classes)  # devices of a label, rounded up
    for label, pile in enumerate(rows_by_label(labels.train, labels.classes)):
        chosen = np.flatnonzero(room)[:sharers]
        if len(pile) < len(chosen):
            raise ValueError(
                f"label {label} has {len(pile)} training examples for {len(chosen)} devices; set fewer devices or "
                "fewer labels_per_device"
            )
        sizes = _unequal_parts(len(pile), len(chosen), balanced, generator)
        for device, rows in zip(chosen, np.split(generator.permutation(pile), np.cumsum(sizes)), strict=False):
            held[device] = np.concatenate([held[device], rows])
        room[chosen] -= 1
    train = tuple(held[device] for device in generator.permutation(devices))  # tiers go by index, labels must not
    return Partition(train, assign_test_rows(labels, train, generator, "proportional"))


def _unequal_parts(count: int, parts: int, balanced: bool, generator: np.random.Generator) -> list[int]:
    """The sizes of all parts but the last, which gets the rest."""
    if parts == 0:
        return []
    equal = count // parts
    if balanced:
        return [equal] * (parts - 1)
    least = max(1, equal // 10)
    return [int(size) for size in generator.integers(least, max(equal, least + 1), parts - 1)]


def sorted_shards(labels: Labels, devices: int, generator: np.random.Generator, *, shards_per_device: int) -> Partition:
    """Sorted shards: sort by label, split into equal shards, and assign them at random (McMahan et al., 2017).

    A shard may span two labels. The remainder of the sorted rows is unused.

    Parameters
    ----------
    shards_per_device : the number of shards per device.
    """
    check_devices(labels, devices)
    check_one_label_each(labels)
    if not 1 <= shards_per_device <= len(labels.train) // devices:
        raise ValueError(
            f"shards_per_device = {shards_per_device}, but it must lie between 1 and the "
            f"{len(labels.train) // devices} examples a device gets; set fewer shards or fewer devices"
        )
    shards = split_equally(np.argsort(labels.train, kind="stable"), devices * shards_per_device)
    assigned = generator.permutation(len(shards)).reshape(devices, shards_per_device)
    train = tuple(np.concatenate([shards[number] for number in numbers]) for numbers in assigned)
    return Partition(train, assign_test_rows(labels, train, generator))


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


def _shards_of_device(drawn: list[int], numbers: list[int], dedupe: bool) -> list[tuple[int, int]]:
    """(label, shard number) pairs; with `dedupe` only the first of each label."""
    pairs = list(zip(drawn, numbers, strict=True))
    if not dedupe:
        return pairs
    return [pair for index, pair in enumerate(pairs) if pair[0] not in drawn[:index]]


def _concatenate_shards(shards: list[list[Rows]], pairs: list[tuple[int, int]]) -> Rows:
    return np.concatenate([shards[label][number] for label, number in pairs])


ATTEMPTS = 50


def dirichlet(
    labels: Labels,
    devices: int,
    generator: np.random.Generator,
    *,
    alpha: float,
    min_examples: int = 10,
    balanced: bool = True,
    test_sizes: TestSizes = "equal",
) -> Partition:
    """Dirichlet: divide each label over the devices in proportions from Dirichlet(alpha) (Yurochkin et al., 2019).

    Parameters
    ----------
    alpha : the concentration; the smaller, the more devices differ. 0.1 is very uneven, 100 almost even.
    min_examples : the training examples that every device has at least. The partition is drawn up to 50 times; after
        that, rows are moved from the largest devices.
    balanced : whether a device that already has n / devices rows gets none of the following labels (FedML).
    test_sizes : the test sets of all devices are equally large, or "proportional" to their training sets (PFLlib).
    """
    _check_settings(labels, devices, alpha, min_examples)
    piles = rows_by_label(labels.train, labels.classes)
    limit = len(labels.train) / devices if balanced else np.inf
    train = retry_until_minimum(lambda: _label_by_label(piles, devices, alpha, limit, generator), min_examples)
    return Partition(train, assign_test_rows(labels, train, generator, test_sizes))


def quantity(
    labels: Labels, devices: int, generator: np.random.Generator, *, alpha: float, min_examples: int = 10
) -> Partition:
    """Quantity skew: the same label distribution on all devices, and sizes from Dirichlet(alpha).

    It needs no labels.

    Parameters
    ----------
    alpha : the concentration; the smaller, the more the sizes differ.
    min_examples : the training examples that every device has at least. The partition is drawn up to 50 times; after
        that, rows are moved from the largest devices.
    """
    _check_settings(labels, devices, alpha, min_examples, by_label=False)
    count = len(labels.train)

    def attempt() -> list[Rows]:
        return np.split(generator.permutation(count), cut_points(draw_proportions(generator, alpha, devices), count))

    train = retry_until_minimum(attempt, min_examples)
    return Partition(train, assign_test_rows(labels, train, generator))


def dirichlet_per_device(labels: Labels, devices: int, generator: np.random.Generator, *, alpha: float) -> Partition:
    """Devices of equal size, each with its own label proportions from Dirichlet(alpha), as in FedDyn.

    Slot by slot, a random device with room draws a label by its proportions among the labels with rows left; if none of
    its labels has any left, all remaining labels are equally likely.

    Parameters
    ----------
    alpha : the concentration; the smaller, the more devices differ.
    """
    _check_settings(labels, devices, alpha, 1)
    preferences = np.stack([draw_proportions(generator, alpha, labels.classes) for _ in range(devices)])
    supply = np.bincount(labels.train, minlength=labels.classes)
    counts = fill_slots(preferences, supply, len(labels.train) // devices, generator)
    piles = [generator.permutation(rows) for rows in rows_by_label(labels.train, labels.classes)]
    train = split_by_counts(piles, counts)
    return Partition(train, assign_test_rows(labels, train, generator))


def draw_proportions(generator: np.random.Generator, alpha: float, count: int) -> Numbers:
    """A draw from Dirichlet(alpha), or from its limit if the arithmetic over- or underflows."""
    with np.errstate(all="ignore"):
        drawn = generator.dirichlet(np.full(count, float(alpha)))
    if np.isfinite(drawn).all() and drawn.sum() > 0.5:
        return drawn
    return np.full(count, 1 / count) if alpha > 1 else np.eye(count)[generator.integers(count)]


def draw_open_proportions(generator: np.random.Generator, alpha: float, held: Rows, limit: float) -> Numbers:
    """Proportions over all devices, zero for those that already hold `limit` rows.

    Dropping entries of a Dirichlet draw and rescaling is the same as drawing for the other devices only, which cannot
    end with a sum of zero.
    """
    has_room = held < limit
    if not has_room.any():
        has_room[:] = True
    shares = np.zeros(len(held))
    shares[has_room] = draw_proportions(generator, alpha, int(has_room.sum()))
    return shares


def cut_points(shares: Numbers, count: int) -> Rows:
    """Where to split `count` rows so that the parts have these shares, rounded down cumulatively."""
    cumulative = np.cumsum(shares)
    # Rounding errors of the sum must not leave a row for devices without a share.
    cumulative[np.flatnonzero(shares)[-1] :] = 1.0
    return (cumulative * count).astype(np.int64)[:-1]


def retry_until_minimum(attempt: Callable[[], list[Rows]], minimum: int) -> tuple[Rows, ...]:
    """The first of 50 attempts in which every device has `minimum` rows; if there is none, the last one topped up."""
    parts: list[Rows] = []
    for _ in range(ATTEMPTS):
        parts = attempt()
        if min(len(part) for part in parts) >= minimum:
            return tuple(parts)
    return top_up(parts, minimum)


def top_up(parts: Sequence[Rows], minimum: int) -> tuple[Rows, ...]:
    """Move rows, last ones first, from the largest device to those below the minimum."""
    lists = [part.tolist() for part in parts]
    sizes = np.array([len(part) for part in parts])
    for device in np.flatnonzero(sizes < minimum):
        while sizes[device] < minimum:
            donor = int(sizes.argmax())
            lists[device].append(lists[donor].pop())
            sizes[device] += 1
            sizes[donor] -= 1
    return tuple(np.array(rows, dtype=np.int64) for rows in lists)


def fill_slots(preferences: Numbers, supply: Rows, size: int, generator: np.random.Generator) -> Rows:
    """The rows of each label per device, [devices, labels], if each device fills `size` slots by its preferences."""
    devices, classes = preferences.shape
    left, counts, room = supply.tolist(), [[0] * classes for _ in range(devices)], [size] * devices
    waiting, cumulative = list(range(devices)), _cumulative_chances(preferences, supply)
    for device_draw, label_draw in generator.random((devices * size, 2)).tolist():
        position = int(device_draw * len(waiting))
        device = waiting[position]
        label = bisect_right(cumulative[device], label_draw)
        counts[device][label] += 1
        left[label] -= 1
        room[device] -= 1
        if left[label] == 0:
            cumulative = _cumulative_chances(preferences, np.array(left))
        if room[device] == 0:
            waiting[position] = waiting[-1]
            waiting.pop()
    return np.array(counts, dtype=np.int64)


def _cumulative_chances(preferences: Numbers, left: Rows) -> list[list[float]]:
    """Per device the cumulative chance of each label with rows left; infinite from the last possible label on."""
    chances = preferences * (left > 0)
    chances[chances.sum(axis=1) == 0] = left > 0
    last = chances.shape[1] - 1 - np.argmax(chances[:, ::-1] > 0, axis=1)
    cumulative = np.cumsum(chances, axis=1) / np.maximum(chances.sum(axis=1, keepdims=True), np.finfo(float).tiny)
    cumulative[np.arange(chances.shape[1]) >= last[:, None]] = np.inf
    return [row.tolist() for row in cumulative]


def _label_by_label(
    piles: Sequence[Rows], devices: int, alpha: float, limit: float, generator: np.random.Generator
) -> list[Rows]:
    held = np.zeros(devices, dtype=np.int64)
    pieces = []
    for pile in piles:
        shares = draw_open_proportions(generator, alpha, held, limit)
        pieces.append(np.split(generator.permutation(pile), cut_points(shares, len(pile))))
        held += [len(piece) for piece in pieces[-1]]
    return [np.concatenate(parts) for parts in zip(*pieces, strict=True)]


def _check_settings(labels: Labels, devices: int, alpha: float, min_examples: int, by_label: bool = True) -> None:
    check_devices(labels, devices)
    if by_label:
        check_one_label_each(labels)
    if not 0 < alpha < np.inf:
        raise ValueError(f"alpha must be a number above 0, not {alpha}; 0.1 is very uneven, 100 almost even")
    if min_examples < 1:
        raise ValueError(f"min_examples must be at least 1, not {min_examples}: a device without data cannot train")
    if min_examples * devices > len(labels.train):
        raise ValueError(
            f"min_examples = {min_examples} for devices = {devices} needs {min_examples * devices} training examples, "
            f"but there are {len(labels.train)}; set a smaller min_examples or fewer devices"
        )


def text_rows(labels: Labels, devices: int, generator: np.random.Generator) -> Partition:
    """Rows of text: whole rows are assigned at random, the same number to every device.

    The remainder is unused. Test examples follow their row. If the test set has other rows than the training set, every
    device gets an equal part of it, because there may be fewer test rows than devices.
    """
    check_devices(labels, devices)
    train, test = _require_groups(labels)
    names = np.unique(train)
    if len(names) < devices:
        raise ValueError(f"devices = {devices}, but there are only {len(names)} rows to assign; set fewer devices")
    assigned = split_equally(generator.permutation(names), devices)
    if np.isin(test, names).any():
        return Partition(_rows_of_groups(train, assigned), _rows_of_groups(test, assigned))
    return Partition(_rows_of_groups(train, assigned), split_equally(np.arange(len(test)), devices))


def natural(labels: Labels, devices: int, generator: np.random.Generator, *, least: Count = 1) -> Partition:
    """Natural groups: one device for each of the groups, such as users, with most training examples.

    Of groups of equal size the first to appear counts. Groups are assigned to devices at random: otherwise tiers, which
    go by index, would depend on the number of examples. A device's test set is that of its group, and may be empty.

    Parameters
    ----------
    least : the training examples that a group must have.
    """
    check_devices(labels, devices)
    train, test = _require_groups(labels)
    names, first, counts = np.unique(train, return_index=True, return_counts=True)
    enough = int((counts >= least).sum())
    if enough < devices:
        raise ValueError(
            f"devices = {devices}, but only {enough} of {len(names)} groups have least = {least} training examples; "
            "set fewer devices or a smaller least"
        )
    largest = np.lexsort([first, -counts])[:devices]
    chosen = generator.permutation(names[largest])[:, None]
    return Partition(_rows_of_groups(train, chosen), _rows_of_groups(test, chosen))


def _require_groups(labels: Labels) -> tuple[Rows, Rows]:
    if labels.groups is None:
        raise ValueError('this data set has no groups of examples; use "iid" or another partition')
    return labels.groups


def _rows_of_groups(groups: Rows, group_lists: Iterable[Rows]) -> tuple[Rows, ...]:
    """For every list of groups the rows of their examples, group by group and in order."""
    order = np.argsort(groups, kind="stable")
    ordered = groups[order]

    def find_rows(names: Rows) -> Rows:
        starts, ends = (np.searchsorted(ordered, names, side) for side in ("left", "right"))
        return np.concatenate([order[start:end] for start, end in zip(starts, ends, strict=True)])

    return tuple(find_rows(names) for names in group_lists)


def from_file(labels: Labels, devices: int, generator: np.random.Generator, *, path: str) -> Partition:
    """A partition from a file that `Partition.save` wrote; its devices may share rows.

    Parameters
    ----------
    path : the file.
    """
    partition = Partition.load(Path(path))
    if len(partition.train) != devices:
        raise ValueError(f"devices = {devices}, but the partition in {path} is for {len(partition.train)} devices")
    for part, rows_by_device, count in (
        ("training", partition.train, len(labels.train)),
        ("test", partition.test, len(labels.test)),
    ):
        if any(len(rows) and not 0 <= rows.min() <= rows.max() < count for rows in rows_by_device):
            raise ValueError(f"path = {path} has rows beyond the {count} {part} examples; is it for another data set?")
    return partition


def correlate_tiers_with_labels(
    partition: Partition, labels: Labels, correlation: float, generator: np.random.Generator
) -> Partition:
    """Reorder the devices' parts from unchanged (0) to sorted by label (1), since tiers go by device index.

    The label rank of a part is by its most frequent training label (the lowest of equals), then by its mean label, then
    by index. The new order is by correlation · label rank + (1 - correlation) · random rank, then by label rank. A
    correlation of 0 draws no random numbers.

    Parameters
    ----------
    partition : the partition to reorder.
    labels : the labels of the data set.
    correlation : from 0 to 1.
    generator : the source of randomness.
    """
    if not 0 <= correlation <= 1:
        raise ValueError(f"the correlation must lie between 0 (unchanged) and 1 (sorted by label), not {correlation}")
    if correlation == 0:
        return partition
    check_one_label_each(labels)
    by_label = _ranks(np.lexsort([_mean_labels(partition, labels), _main_labels(partition, labels)]))
    at_random = generator.permutation(len(by_label))
    order = np.lexsort([by_label, correlation * by_label + (1 - correlation) * at_random])
    return Partition(tuple(partition.train[part] for part in order), tuple(partition.test[part] for part in order))


def limit_examples(partition: Partition, examples: int | None, generator: np.random.Generator) -> Partition:
    """Keep at most some random training examples per device; test rows are unchanged.

    Parameters
    ----------
    partition : the partition to reduce.
    examples : the largest number per device; None: no limit.
    generator : the source of randomness.
    """
    if examples is None:
        return partition
    return Partition(tuple(generator.permutation(rows)[:examples] for rows in partition.train), partition.test)


def hold_out(examples: int, count: int, generator: np.random.Generator) -> Rows:
    """Random rows to keep away from all devices, sorted.

    Parameters
    ----------
    examples : the number of rows to draw from.
    count : how many to draw.
    generator : the source of randomness.
    """
    return np.sort(generator.permutation(examples)[:count])


def subsample(partition: Partition, devices: float, keep: float, generator: np.random.Generator) -> Partition:
    """A random fraction of the devices keeps only a fraction of its training examples, at least one.

    Parameters
    ----------
    partition : the partition to reduce.
    devices : the fraction of devices.
    keep : the fraction of examples that they keep.
    generator : the source of randomness.
    """
    count = len(partition.train)
    reduced = set(generator.permutation(count)[: round(devices * count)].tolist())

    def reduce(index: int, rows: Rows) -> Rows:
        order = generator.permutation(rows)  # drawn for every device, so that the choice of devices changes no other
        return order[: max(1, round(keep * len(rows)))] if index in reduced else rows

    return Partition(tuple(reduce(index, rows) for index, rows in enumerate(partition.train)), partition.test)


def _main_labels(partition: Partition, labels: Labels) -> Rows:
    return np.array([np.bincount(labels.train[rows], minlength=1).argmax() for rows in partition.train])


def _mean_labels(partition: Partition, labels: Labels) -> npt.NDArray[np.float64]:
    return np.array([labels.train[rows].mean() if len(rows) else 0.0 for rows in partition.train])


def _ranks(order: Rows) -> Rows:
    ranks = np.empty_like(order)
    ranks[order] = np.arange(len(order))
    return ranks


def device_data(labels: Labels, devices: int, generator: np.random.Generator) -> Partition:
    """The devices' own data, for real devices: the server knows no rows."""
    empty = tuple(np.zeros(0, dtype=np.int64) for _ in range(devices))
    return Partition(empty, empty)


PARTITIONS: Registry[Callable[..., Partition]] = Registry(
    "partitions",
    {
        "iid": iid,
        "label_shards": label_shards,
        "pathological": pathological,
        "sorted_shards": sorted_shards,
        "dirichlet": dirichlet,
        "dirichlet_per_device": dirichlet_per_device,
        "quantity": quantity,
        "rows": text_rows,
        "natural": natural,
        "file": from_file,
        "own": device_data,
    },
    passed=("labels", "devices", "generator"),
)
