"""What is known of a data set without its files, so that a recipe can be checked and costed anywhere.

What is known of data sets beside their numbers: what the labels mean, and on what terms the examples may be used.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .partition import Labels, Rows


@dataclass(frozen=True)
class Facts:
    shape: tuple[int, ...]  # of one example as it is stored
    classes: int
    train: int
    test: int
    preparation: str  # unless the recipe names another
    tokens: int | None = None  # where examples are text
    label_per_token: bool = False
    groups: tuple[int, int] | None = None  # how many in the training set, and how many others in the test set


def facts_of(name: str, settings: Mapping[str, Any]) -> Facts | None:
    """What is known of a data set read with these settings; None if that takes its files."""
    facts = FACTS.get(name)
    if facts and name == "cifar100" and settings.get("labels") == "coarse":
        return replace(facts, classes=20)
    by_settings: dict[str, Callable[..., Facts]] = {"wikitext2": _wikitext2, "sentiment140": _sentiment140}
    return by_settings[name](**settings) if name in by_settings else facts


def made_up_labels(facts: Facts, tests: int | None = None) -> Labels:
    """As many labels as the data set has, all as often and in turn; groups of equal size one after the other."""
    counts = facts.train, min(facts.test, tests or facts.test)
    train, test = (_in_turn(count, facts) for count in counts)
    if facts.groups is None:
        return Labels(train, test, facts.classes)
    first, second = facts.groups
    groups = np.arange(counts[0]) * first // facts.train, first + np.arange(counts[1]) * second // facts.test
    return Labels(train, test, facts.classes, groups)


def _in_turn(count: int, facts: Facts) -> Rows:
    labels = np.arange(count) % facts.classes
    return np.broadcast_to(labels[:, None], (count, *facts.shape)) if facts.label_per_token else labels


def _wikitext2(
    *,
    rows: int = 100,
    test_rows: int = 10,
    length: int = 64,
    most_words: int | None = None,
    published: bool = False,
) -> Facts:
    words = min(33_278, most_words or 33_278) + published
    train, test = (held * (text // held // length) for text, held in ((2_088_628, rows), (245_569, test_rows)))
    return Facts((length,), words, train, test, "plain", words + 1, True, (rows, test_rows))


def _sentiment140(*, length: int = 25, words: int = 10_000, test_share: float = 0.1) -> Facts:
    """Of the official files, before a share of every user's tweets goes to the test set."""
    return Facts((length,), 2, 1_600_000, 359, "plain", words + 2, groups=(659_775, 1))


FACTS: dict[str, Facts] = {
    "digits": Facts((1, 8, 8), 10, 1_437, 360, "plain"),
    "fashion-mini": Facts((1, 28, 28), 10, 2_000, 500, "fashion"),
    "mnist": Facts((1, 28, 28), 10, 60_000, 10_000, "heterofl_mnist"),
    "fashion-mnist": Facts((1, 28, 28), 10, 60_000, 10_000, "fashion"),
    "cifar10": Facts((3, 32, 32), 10, 50_000, 10_000, "heterofl_cifar10"),
    "cifar100": Facts((3, 32, 32), 100, 50_000, 10_000, "cifar100"),
    "pathmnist": Facts((3, 28, 28), 9, 89_996, 7_180, "fedsup_pathmnist"),
    "pneumoniamnist": Facts((1, 28, 28), 2, 4_708, 624, "plain"),
    "wikitext2": _wikitext2(),
    "sentiment140": _sentiment140(),
}


CLOTHES = (
    "T-shirt/top", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot",
)  # fmt: skip
THINGS = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
DIGITS = tuple("0123456789")

LABELS: dict[str, tuple[str, ...]] = {
    "digits": DIGITS,
    "mnist": DIGITS,
    "fashion-mini": CLOTHES,
    "fashion-mnist": CLOTHES,
    "cifar10": THINGS,
    "sentiment140": ("negative", "positive"),
}

LICENSES: dict[str, str] = {
    "digits": "CC BY 4.0",
    "fashion-mini": "MIT",
    "fashion-mnist": "MIT",
    "pathmnist": "CC BY 4.0",
    "pneumoniamnist": "CC BY 4.0",
    "wikitext2": "CC BY-SA 3.0",
}
"""Of those whose makers say so."""
