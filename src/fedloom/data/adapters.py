"""Convert the four arrays of an image reader into a `Dataset`, and download missing data sets.

Images become [n, channels, height, width] and labels one integer each. Downloads, from the Hugging Face hub with the
package `datasets` (extra `hf`) and its cache, happen only if FEDLOOM_DOWNLOAD=1 is set.
"""

import importlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..seeds import VALIDATION, generator
from .dataset import DataBroken, DataMissing, Dataset, Examples
from .preparation import PREPARATIONS, Preparation

Array = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class Arrays:
    """A data set as read from files; `origin` is the file or folder to name in errors."""

    origin: str
    train_images: Array
    train_labels: Array
    test_images: Array
    test_labels: Array


def build_dataset(name: str, arrays: Arrays, classes: int | None, preparation: Preparation) -> Dataset:
    """A data set from arrays; without `classes` the highest label determines their number."""
    train = _examples(arrays.train_images, arrays.train_labels, arrays.origin)
    test = _examples(arrays.test_images, arrays.test_labels, arrays.origin)
    if train.x.shape[1:] != test.x.shape[1:]:
        shapes = f"{tuple(train.x.shape[1:])} and {tuple(test.x.shape[1:])}"
        message = f"{arrays.origin}: training and test examples differ in shape, {shapes}"
        raise DataBroken(message, "Give both the same shape.")
    if classes is None:
        classes = 1 + max((int(part.y.max()) for part in (train, test) if len(part)), default=0)
    return Dataset(name, train, test, classes, preparation)


def _examples(images: Array, labels: Array, origin: str) -> Examples:
    x, y = as_inputs(images, origin), as_labels(labels, origin)
    if len(x) != len(y):
        raise DataBroken(f"{origin}: {len(x)} examples but {len(y)} labels", "Use image and label files of one split.")
    return Examples(x, y)


def as_inputs(values: Array, origin: str) -> Tensor:
    """Images (uint8 or float) become channels-first; other integers are token ids and become int64; floats float32.

    Images with three axes are gray. Of four axes, the channel axis is the second or the last, whichever is shorter.
    """
    if values.dtype.kind not in "uif" or values.ndim < 2:
        hint = "Inputs are uint8 or float images, or integer token ids; first axis = examples."
        raise DataBroken(f"{origin}: inputs of type {values.dtype} and shape {values.shape}", hint)
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        raise DataBroken(f"{origin}: some inputs are not finite", "Replace missing values before training.")
    if values.dtype != np.uint8 and values.dtype.kind in "ui":
        return torch.from_numpy(values.astype(np.int64))
    if values.ndim == 3:
        values = values[:, None]
    elif values.ndim == 4 and values.shape[3] < values.shape[1]:
        values = values.transpose(0, 3, 1, 2)
    kind = np.uint8 if values.dtype == np.uint8 else np.float32
    return torch.from_numpy(np.array(values, dtype=kind, order="C"))


def as_labels(values: Array, origin: str) -> Tensor:
    """One label per example, from [n] or [n, 1]."""
    if values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    if values.ndim != 1 or values.dtype.kind not in "ui":
        hint = "Labels are integers, one per example: turn one-hot rows into integers with argmax."
        raise DataBroken(f"{origin}: labels of type {values.dtype} and shape {values.shape}", hint)
    return torch.from_numpy(values.astype(np.int64))


# The name on the hub, and the configuration if the set has several.
HUB_NAMES: dict[str, tuple[str, ...]] = {
    "mnist": ("ylecun/mnist",),
    "fashion-mnist": ("zalando-datasets/fashion_mnist",),
    "cifar10": ("uoft-cs/cifar10",),
    "cifar100": ("uoft-cs/cifar100",),
    "pathmnist": ("jafermarq/pathmnist", "28"),
}


def missing_data_error(name: str, folder: Path, files: str) -> DataMissing:
    """The error for a data set that is not in the data directory; `files` says which files belong where."""
    hint = f"Put {files}, and name the data directory with FEDLOOM_DATA or --data-dir"
    if name in HUB_NAMES:
        hint += "; or install fedloom[hf] and set FEDLOOM_DOWNLOAD=1 to download it"
    return DataMissing(f"the data set {name} is not in {folder}", hint + ".")


def download(name: str, error: DataMissing, label_columns: Sequence[str] = ("label", "labels")) -> Arrays:
    """Download a data set from the hub.

    Raises `error` if downloads are disabled or the hub has no such set, another `DataMissing` if the download fails.
    """
    if os.environ.get("FEDLOOM_DOWNLOAD") != "1" or name not in HUB_NAMES:
        raise error
    try:
        library = importlib.import_module("datasets")
    except ImportError:
        raise DataMissing(error.message, "FEDLOOM_DOWNLOAD=1 needs fedloom[hf]: install it.") from None
    try:
        splits = library.load_dataset(*HUB_NAMES[name])
    except Exception as problem:
        raise DataMissing(f"the data set {name} could not be downloaded: {problem}", error.hint) from problem
    columns = [_columns(splits[part], label_columns, HUB_NAMES[name][0]) for part in ("train", "test")]
    return Arrays(HUB_NAMES[name][0], *columns[0], *columns[1])


def _columns(split: Any, label_columns: Sequence[str], origin: str) -> tuple[Array, Array]:
    names = split.column_names
    image_column = next((name for name in ("image", "img") if name in names), None)
    label_column = next((name for name in label_columns if name in names), None)
    if image_column is None or label_column is None:
        hint = f"Expected image or img, and {' or '.join(label_columns)}."
        raise DataBroken(f"{origin}: no image or label column among {', '.join(names)}", hint)
    return np.stack([np.asarray(image) for image in split[image_column]]), np.asarray(list(split[label_column]))


def as_dataset(data: Any, *, name: str = "data", classes: int | None = None, test_share: float = 0.2) -> Dataset:
    """A `Dataset` from whatever holds examples.

    Parameters
    ----------
    data : one of

        - arrays or tensors `(x, y)`, of which a random `test_share` becomes the test set,
        - `(x, y, x_test, y_test)` or `((x, y), (x_test, y_test))`,
        - a torch data set of `(x, y)` pairs, or two of them for training and test,
        - a pandas data frame and its label column, `(frame, "label")`, or two frames and the column,
        - data of the Hugging Face hub, with the splits "train" and "test",
        - a `Dataset`, which is returned as it is.
    name : for messages and reports.
    classes : the number of classes. Default: the highest label tells.
    test_share : the share of examples held out for testing if there is no test set. The draw is always the same.

    Returns
    -------
    Dataset
        Images as they are stored, other numbers as float32, integers as token ids, labels 0, 1, ….

    Examples
    --------
    >>> as_dataset((x, y)).train.x.shape
    """
    if isinstance(data, Dataset):
        return data
    parts = [_as_pair(one) for one in _splits(data)]
    if len(parts) == 1:
        parts = _split_off_test(*parts[0], test_share)
    (x, y), (x_test, y_test) = parts
    made = build_dataset(name, Arrays(name, x, y, x_test, y_test), classes, PREPARATIONS["plain"])
    for labels in (made.train.y, made.test.y):
        if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < made.classes:
            message = f"labels from {int(labels.min())} to {int(labels.max())}, with {made.classes} classes"
            raise DataBroken(message, "Number the classes 0, 1, ….")
    if made.train.x.dtype != torch.int64:
        return made
    return replace(made, tokens=1 + max(int(part.x.max()) for part in (made.train, made.test)))


def _splits(data: Any) -> list[Any]:
    """What the training set, and the test set if there is one, come from."""
    if hasattr(data, "keys") and "train" in data and "test" in data:  # splits of the hub
        return [data["train"], data["test"]]
    if not isinstance(data, tuple | list):
        return [data]
    if data and isinstance(data[-1], str):  # frames and their label column
        *frames, label = data
        return [_frame_pair(frame, label) for frame in frames]
    if len(data) == 4:
        return [data[:2], data[2:]]
    if len(data) == 2 and (_is_pair(data[0]) or _is_torch_dataset(data[0])):
        return list(data)
    return [data]


def _frame_pair(frame: Any, label: str) -> tuple[Array, Array]:
    """Features as float32, also whole numbers, and the column of labels."""
    if label not in frame.columns:
        raise DataBroken(f"there is no column {label!r}", f"The columns are {', '.join(map(str, frame.columns))}.")
    try:
        features = frame.drop(columns=label).to_numpy(dtype=np.float32)
    except (TypeError, ValueError) as error:
        raise DataBroken(f"a column is not numeric: {error}", "Encode text and dates as numbers.") from error
    return features, frame[label].to_numpy()


def _is_pair(data: Any) -> bool:
    """True for inputs and labels; plain lists of numbers are inputs alone."""
    return isinstance(data, tuple | list) and len(data) == 2 and all(hasattr(one, "shape") for one in data)


def _is_torch_dataset(data: Any) -> bool:
    return isinstance(data, torch.utils.data.Dataset)


def _as_pair(part: Any) -> tuple[Array, Array]:
    if hasattr(part, "column_names"):
        return _columns(part, ("label", "labels"), "data")
    if _is_torch_dataset(part):
        examples = [part[index] for index in range(len(part))]
        if not examples:
            raise DataBroken("the torch data set is empty", "Give it examples.")
        return _stack([x for x, _ in examples]), _stack([y for _, y in examples])
    if not isinstance(part, tuple | list) or len(part) != 2:
        hint = "Pass (x, y), (x, y, x_test, y_test), torch data sets, or (frame, label column)."
        raise DataBroken(f"no data set can be made of {type(part).__name__}", hint)
    return np.asarray(part[0]), np.asarray(part[1])


def _stack(values: Sequence[Any]) -> Array:
    return np.stack([np.asarray(value) for value in values])


def _split_off_test(x: Array, y: Array, share: float) -> list[tuple[Array, Array]]:
    if len(x) != len(y):
        raise DataBroken(f"{len(x)} examples but {len(y)} labels", "Give every example one label.")
    count = round(share * len(y))
    if not 0 < count < len(y):
        hint = "Pass a test set: (x, y, x_test, y_test)."
        raise DataBroken(f"{len(y)} examples are too few to hold out {share:.0%} of them", hint)
    order = generator(0, VALIDATION).permutation(len(y))
    test, train = np.sort(order[:count]), np.sort(order[count:])
    return [(x[train], y[train]), (x[test], y[test])]
