"""What is known of the built-in data sets without their files: sizes, label names and licenses.

With it a recipe can be checked and its cost computed on a machine that does not have the data.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from .partition import Labels, Rows


@dataclass(frozen=True)
class DatasetInfo:
    """The sizes of a data set.

    Parameters
    ----------
    shape : the shape of one example as it is stored.
    classes : the number of classes.
    train : the number of training examples.
    test : the number of test examples.
    preparation : the name of its preparation, unless the recipe names another.
    tokens : the number of token ids, where examples are text.
    label_per_token : whether every token has a label.
    groups : the number of groups in the training set, and of further ones in the test set; 0: the test examples are of
        the same groups.
    dtype : of examples that are not text: "uint8" or "float32".
    """

    shape: tuple[int, ...]
    classes: int
    train: int
    test: int
    preparation: str
    tokens: int | None = None
    label_per_token: bool = False
    groups: tuple[int, int] | None = None
    dtype: Literal["uint8", "float32"] = "uint8"


def lookup_dataset_info(name: str, settings: Mapping[str, Any]) -> DatasetInfo | None:
    """The sizes of a data set read with these settings; None if only its files tell them.

    Parameters
    ----------
    name : the name of the data set.
    settings : the settings of its reader.
    """
    info = DATASET_INFO.get(name)
    if info and name == "cifar100" and settings.get("labels") == "coarse":
        return replace(info, classes=20)
    if info and name in REDIVIDED and settings.get("test_share"):
        test = round(settings["test_share"] * (info.train + info.test))
        return replace(info, train=info.train + info.test - test, test=test)
    by_settings: dict[str, Callable[..., DatasetInfo]] = {
        "wikitext2": _wikitext2, "sentiment140": _sentiment140, "ucihar": _ucihar,
    }  # fmt: skip
    return by_settings[name](**settings) if name in by_settings else info


def describe_deviation(
    name: str,
    settings: Mapping[str, Any],
    train: int,
    test: int,
    classes: int,
    fingerprint: Callable[[], str] | None = None,
) -> str:
    """How a data set differs from the one that papers use, in words; "" if it does not, or is not known.

    Published numbers say nothing about a set that is cut or changed, so wherever they are shown, this is shown too.

    Parameters
    ----------
    name : the name of the data set.
    settings : the settings of its reader.
    train : the training examples that were read.
    test : the test examples that were read.
    classes : the classes that were read.
    fingerprint : gives the sha256 of what was read; asked for if the counts are the published ones and the content is
        known. None: only counts are compared.
    """
    info = lookup_dataset_info(name, settings)
    if info is None:
        return ""
    counts = {"training examples": (train, info.train), "test examples": (test, info.test)}
    redivided = name in REDIVIDED and settings.get("test_share")
    if name == "sentiment140" or redivided or (name == "ucihar" and settings.get("split") != "published"):
        # their readers move examples to the test set
        counts = {"examples": (train + test, info.train + info.test)}
    counts["classes"] = classes, info.classes
    unlike = [f"{found:,} {what} instead of {known:,}" for what, (found, known) in counts.items() if found != known]
    content = "" if redivided else CONTENTS.get(name, "")
    if not unlike and content and fingerprint is not None and fingerprint() != content:
        unlike = ["as many examples, but other ones, other labels or another order"]
    return f"not {name} as published: {', '.join(unlike)}" if unlike else ""


def synthetic_labels(info: DatasetInfo, test_examples: int | None = None) -> Labels:
    """As many labels as the data set has: balanced and cyclic, with consecutive groups of equal size.

    Parameters
    ----------
    info : the sizes of the data set.
    test_examples : the largest number of test examples; None: all.
    """
    counts = info.train, min(info.test, test_examples or info.test)
    train, test = (_cyclic_labels(count, info) for count in counts)
    if info.groups is None:
        return Labels(train, test, info.classes)
    first, second = info.groups
    of_test = np.arange(counts[1]) * (second or first) // info.test + (first if second else 0)
    groups = np.arange(counts[0]) * first // info.train, of_test
    return Labels(train, test, info.classes, groups)


def _cyclic_labels(count: int, info: DatasetInfo) -> Rows:
    labels = np.arange(count) % info.classes
    return np.broadcast_to(labels[:, None], (count, *info.shape)) if info.label_per_token else labels


def _wikitext2(
    *,
    rows: int = 100,
    test_rows: int = 10,
    length: int = 64,
    most_words: int | None = None,
    published: bool = False,
    test_order: str = "rows",
) -> DatasetInfo:
    words = min(33_278, most_words or 33_278) + published
    train, test = (count * (text // count // length) for text, count in ((2_088_628, rows), (245_569, test_rows)))
    return DatasetInfo((length,), words, train, test, "plain", words + 1, True, (rows, test_rows))


def _sentiment140(*, length: int = 25, words: int = 10_000, test_share: float = 0.1) -> DatasetInfo:
    """Of the official files, before a fraction of every user's tweets is moved to the test set."""
    return DatasetInfo((length,), 2, 1_600_000, 359, "plain", words + 2, groups=(659_775, 1))


def _ucihar(
    *, inputs: str = "signals", split: str = "within_subjects", test_share: float = 0.3, normalize: bool = True
) -> DatasetInfo:
    """Within subjects, the counts are those of the whole; every person's share is rounded."""
    shape, published = (9, 128) if inputs == "signals" else (561,), split == "published"
    test = 2_947 if published else round(10_299 * test_share)
    groups = (21, 9) if published else (30, 0)
    return DatasetInfo(shape, 6, 10_299 - test, test, "plain", groups=groups, dtype="float32")


DATASET_INFO: dict[str, DatasetInfo] = {
    "digits": DatasetInfo((1, 8, 8), 10, 1_437, 360, "plain"),
    "fashion-mini": DatasetInfo((1, 28, 28), 10, 2_000, 500, "fashion"),
    "mnist": DatasetInfo((1, 28, 28), 10, 60_000, 10_000, "heterofl_mnist"),
    "fashion-mnist": DatasetInfo((1, 28, 28), 10, 60_000, 10_000, "fashion"),
    "cifar10": DatasetInfo((3, 32, 32), 10, 50_000, 10_000, "heterofl_cifar10"),
    "cifar100": DatasetInfo((3, 32, 32), 100, 50_000, 10_000, "cifar100"),
    "pathmnist": DatasetInfo((3, 28, 28), 9, 89_996, 7_180, "fedsup_pathmnist"),
    "pneumoniamnist": DatasetInfo((1, 28, 28), 2, 4_708, 624, "plain"),
    "wikitext2": _wikitext2(),
    "sentiment140": _sentiment140(),
    "ucihar": _ucihar(),
}

CONTENTS: dict[str, str] = {
    "digits": "c8958ba3623bb2a242faae71248836ffd83fe1b8b7df1d5e0ee22a573aa3c04d",
    "fashion-mini": "44bf2fd19a9192c8d69f6decfe578f94d61432246d16a3afb6538f5af8a85249",
    "mnist": "05ab87c0464c87c8da6806c37a139b26b94c5fd43ab5ec5eb8c7169feae6a159",
    "fashion-mnist": "023af56f2df4044caed94170ad349e6b65f89b25f8a145855f0c7aaaf8e51fa2",
    "cifar10": "44ec2972b7f45f486f222e79ddfe83dbacbc4688e5859ca924e2dba2481d2c2d",
    "pneumoniamnist": "9788d11e0877c16ef7fb81c716f250b47b6ff9914e29d0de1174cb8f8fd3256f",
}
"""The fingerprint of a data set's examples and labels, in the order of its published files, where it is known."""


REDIVIDED = ("mnist", "fashion-mnist")
"""Data sets whose readers can pool training and test set and divide them again."""

FASHION_CLASSES = (
    "T-shirt/top", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot",
)  # fmt: skip
CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
DIGITS = tuple("0123456789")

LABEL_NAMES: dict[str, tuple[str, ...]] = {
    "digits": DIGITS,
    "digits-multilabel": DIGITS,
    "digits-segmentation": ("background", *DIGITS),
    "mnist": DIGITS,
    "fashion-mini": FASHION_CLASSES,
    "fashion-mnist": FASHION_CLASSES,
    "cifar10": CIFAR10_CLASSES,
    "sentiment140": ("negative", "positive"),
    "ucihar": ("walking", "walking upstairs", "walking downstairs", "sitting", "standing", "laying"),
}

LICENSES: dict[str, str] = {
    "diabetes": "BSD-3-Clause",
    "digits": "CC BY 4.0",
    "digits-multilabel": "CC BY 4.0",
    "digits-segmentation": "CC BY 4.0",
    "fashion-mini": "MIT",
    "fashion-mnist": "MIT",
    "pathmnist": "CC BY 4.0",
    "pneumoniamnist": "CC BY 4.0",
    "wikitext2": "CC BY-SA 3.0",
    "ucihar": "CC BY 4.0",
}
"""Of the data sets whose authors state one."""
