"""Fetching a missing data set from the Hugging Face hub, only where the user asks for it.

Nothing here runs unless FEDLOOM_DOWNLOAD=1 is set; the package `datasets` (extra `hf`) keeps its own cache.
"""

import importlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .arrays import Array, Arrays
from .examples import DataBroken, DataMissing

# The name on the hub and, where the set comes in several sizes, the one to take.
HUB_NAMES: dict[str, tuple[str, ...]] = {
    "mnist": ("ylecun/mnist",),
    "fashion-mnist": ("zalando-datasets/fashion_mnist",),
    "cifar10": ("uoft-cs/cifar10",),
    "cifar100": ("uoft-cs/cifar100",),
    "pathmnist": ("jafermarq/pathmnist", "28"),
}


def missing(name: str, folder: Path, files: str) -> DataMissing:
    """The error for a data set that is not in the data directory; `files` says what belongs where."""
    hint = f"Put {files}, and name the data directory with FEDLOOM_DATA or --data-dir"
    if name in HUB_NAMES:
        hint += "; or install fedloom[hf] and set FEDLOOM_DOWNLOAD=1 to fetch it"
    return DataMissing(f"the data set {name} is not in {folder}", hint + ".")


def fetch(name: str, absence: DataMissing, label_columns: Sequence[str] = ("label", "labels")) -> Arrays:
    """The data set from the hub if downloads are allowed and possible; raises `absence` where they are not."""
    if os.environ.get("FEDLOOM_DOWNLOAD") != "1" or name not in HUB_NAMES:
        raise absence
    try:
        library = importlib.import_module("datasets")
    except ImportError:
        raise DataMissing(absence.message, "FEDLOOM_DOWNLOAD=1 needs fedloom[hf]: install it.") from None
    try:
        splits = library.load_dataset(*HUB_NAMES[name])
    except Exception as problem:
        raise DataMissing(f"the data set {name} could not be fetched: {problem}", absence.hint) from problem
    columns = [_columns(splits[part], label_columns, HUB_NAMES[name][0]) for part in ("train", "test")]
    return Arrays(HUB_NAMES[name][0], *columns[0], *columns[1])


def _columns(split: Any, label_columns: Sequence[str], origin: str) -> tuple[Array, Array]:
    names = split.column_names
    image_column = next((name for name in ("image", "img") if name in names), None)
    label_column = next((name for name in label_columns if name in names), None)
    if image_column is None or label_column is None:
        raise DataBroken(f"{origin} has the columns {', '.join(names)}", "Expected an image and a label column.")
    return np.stack([np.asarray(image) for image in split[image_column]]), np.asarray(list(split[label_column]))
