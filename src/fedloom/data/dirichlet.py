"""Partitions whose proportions come from a Dirichlet distribution; a small alpha makes devices unlike each other.

Per label after Yurochkin with FedML's balance, per device after FedDyn, and by quantity alone. All of them end:
retries are counted, and what chance does not give is mended by a fixed rule.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from .maps import Labels, Partition, Rows, check_devices, check_single, deal, rows_by_label
from .matching import matching_test

Numbers = npt.NDArray[np.float64]

ATTEMPTS = 50


def dirichlet_per_label(
    labels: Labels,
    devices: int,
    generator: np.random.Generator,
    *,
    alpha: float,
    min_examples: int = 10,
    balanced: bool = True,
) -> Partition:
    """Each label's rows cut at proportions over the devices drawn from Dirichlet(alpha).

    With `balanced` a device that already holds its n / devices rows gets none of the labels that follow (FedML). Drawn
    anew up to 50 times until everybody has `min_examples`; then the largest devices give the missing rows.
    """
    _check(labels, devices, alpha, min_examples)
    piles = rows_by_label(labels.train, labels.classes)
    limit = len(labels.train) / devices if balanced else np.inf
    train = with_minimum(lambda: _label_by_label(piles, devices, alpha, limit, generator), min_examples)
    return Partition(train, matching_test(labels, train, generator))


def quantity(
    labels: Labels, devices: int, generator: np.random.Generator, *, alpha: float, min_examples: int = 10
) -> Partition:
    """Labels as in the whole, sizes drawn from Dirichlet(alpha); `min_examples` as in `dirichlet_per_label`."""
    _check(labels, devices, alpha, min_examples)
    count = len(labels.train)

    def attempt() -> list[Rows]:
        return np.split(generator.permutation(count), cuts(proportions(generator, alpha, devices), count))

    train = with_minimum(attempt, min_examples)
    return Partition(train, matching_test(labels, train, generator))


def dirichlet_per_device(labels: Labels, devices: int, generator: np.random.Generator, *, alpha: float) -> Partition:
    """Devices of equal size, each with its own label proportions drawn from Dirichlet(alpha).

    One slot at a time: a random device with room draws a label by its proportions among the labels not yet used up;
    if those it favours are all used up, any remaining label is as likely.
    """
    _check(labels, devices, alpha, 1)
    wishes = np.stack([proportions(generator, alpha, labels.classes) for _ in range(devices)])
    supply = np.bincount(labels.train, minlength=labels.classes)
    counts = fill(wishes, supply, len(labels.train) // devices, generator)
    train = deal([generator.permutation(rows) for rows in rows_by_label(labels.train, labels.classes)], counts)
    return Partition(train, matching_test(labels, train, generator))


def proportions(generator: np.random.Generator, alpha: float, count: int) -> Numbers:
    """A draw from Dirichlet(alpha); where the arithmetic over- or underflows, from its limit."""
    with np.errstate(all="ignore"):
        drawn = generator.dirichlet(np.full(count, float(alpha)))
    if np.isfinite(drawn).all() and drawn.sum() > 0.5:
        return drawn
    return np.full(count, 1 / count) if alpha > 1 else np.eye(count)[generator.integers(count)]


def open_proportions(generator: np.random.Generator, alpha: float, held: Rows, limit: float) -> Numbers:
    """Proportions over all devices with nothing for those that hold `limit` rows already.

    Striking entries out of a Dirichlet draw and rescaling the others is the same as drawing for the others alone,
    and that cannot be left with nothing to rescale.
    """
    has_room = held < limit
    if not has_room.any():
        has_room[:] = True
    shares = np.zeros(len(held))
    shares[has_room] = proportions(generator, alpha, int(has_room.sum()))
    return shares


def cuts(shares: Numbers, count: int) -> Rows:
    """Where to cut a list of `count` rows so that its parts have these shares, rounded down cumulatively."""
    cumulative = np.cumsum(shares)
    # Rounding in the sum must not leave a row for devices without a share.
    cumulative[np.flatnonzero(shares)[-1] :] = 1.0
    return (cumulative * count).astype(np.int64)[:-1]


def with_minimum(attempt: Callable[[], list[Rows]], minimum: int) -> tuple[Rows, ...]:
    """The first of 50 attempts in which everybody has `minimum` rows; failing that, the last one topped up."""
    parts: list[Rows] = []
    for _ in range(ATTEMPTS):
        parts = attempt()
        if min(len(part) for part in parts) >= minimum:
            return tuple(parts)
    return top_up(parts, minimum)


def top_up(parts: Sequence[Rows], minimum: int) -> tuple[Rows, ...]:
    """Move rows, last ones first, from whoever holds most to those below the minimum."""
    lists = [part.tolist() for part in parts]
    sizes = np.array([len(part) for part in parts])
    for device in np.flatnonzero(sizes < minimum):
        while sizes[device] < minimum:
            donor = int(sizes.argmax())
            lists[device].append(lists[donor].pop())
            sizes[device] += 1
            sizes[donor] -= 1
    return tuple(np.array(rows, dtype=np.int64) for rows in lists)


def fill(wishes: Numbers, supply: Rows, size: int, generator: np.random.Generator) -> Rows:
    """How many rows of each label every device gets, [devices, labels], when each fills `size` slots by its wishes."""
    devices, classes = wishes.shape
    left, counts, room = supply.tolist(), [[0] * classes for _ in range(devices)], [size] * devices
    waiting, ladders = list(range(devices)), _ladders(wishes, supply)
    for who, what in generator.random((devices * size, 2)).tolist():
        place = int(who * len(waiting))
        device = waiting[place]
        label = bisect_right(ladders[device], what)
        counts[device][label] += 1
        left[label] -= 1
        room[device] -= 1
        if left[label] == 0:
            ladders = _ladders(wishes, np.array(left))
        if room[device] == 0:
            waiting[place] = waiting[-1]
            waiting.pop()
    return np.array(counts, dtype=np.int64)


def _ladders(wishes: Numbers, left: Rows) -> list[list[float]]:
    """Per device the cumulative chance of each label among those left; the last possible step is out of reach."""
    chances = wishes * (left > 0)
    chances[chances.sum(axis=1) == 0] = left > 0
    last = chances.shape[1] - 1 - np.argmax(chances[:, ::-1] > 0, axis=1)
    ladders = np.cumsum(chances, axis=1) / np.maximum(chances.sum(axis=1, keepdims=True), np.finfo(float).tiny)
    ladders[np.arange(chances.shape[1]) >= last[:, None]] = np.inf
    return [ladder.tolist() for ladder in ladders]


def _label_by_label(
    piles: Sequence[Rows], devices: int, alpha: float, limit: float, generator: np.random.Generator
) -> list[Rows]:
    held = np.zeros(devices, dtype=np.int64)
    pieces = []
    for pile in piles:
        shares = open_proportions(generator, alpha, held, limit)
        pieces.append(np.split(generator.permutation(pile), cuts(shares, len(pile))))
        held += [len(piece) for piece in pieces[-1]]
    return [np.concatenate(own) for own in zip(*pieces, strict=True)]


def _check(labels: Labels, devices: int, alpha: float, min_examples: int) -> None:
    check_devices(labels, devices)
    check_single(labels)
    if not 0 < alpha < np.inf:
        raise ValueError(f"alpha must be a number above 0, not {alpha}; 0.1 is very uneven, 100 almost even")
    if min_examples < 1:
        raise ValueError(f"min_examples must be at least 1, not {min_examples}: a device without data cannot train")
    if min_examples * devices > len(labels.train):
        raise ValueError(
            f"min_examples = {min_examples} for devices = {devices} needs {min_examples * devices} training examples, "
            f"but there are {len(labels.train)}; set a smaller min_examples or fewer devices"
        )
