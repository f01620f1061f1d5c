"""Convert whatever holds examples into a `Dataset`, and download missing data sets.

Images become [n, channels, height, width], time series [n, channels, length], rows [n, features], and labels one
integer each. Downloads, from the Hugging Face hub with the package `datasets` (extra `hf`) and its cache, happen only
if FEDLOOM_DOWNLOAD=1 is set.
"""

import importlib
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Subset, default_collate

from .checks import describe_not_finite
from .dataset import DataBroken, DataMissing, Dataset, Examples
from .frames import is_frame, read_frame
from .hub import LABEL_COLUMNS, choose_splits, is_hub_split, read_split
from .normalization import normalize_by_training_set
from .preparation import PREPARATIONS, Preparation
from .raw import Array, RawExamples, encode_groups, encode_labels, split_off_test
from .tasks import CLASSIFICATION, TASKS, LearningTask

logger = logging.getLogger(__name__)

Kind = Literal["image", "series", "tabular", "tokens"]
"""What examples are: images, time series [n, channels, length], rows of features, or sequences of token ids."""


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
    train = RawExamples(arrays.train_images, arrays.train_labels)
    test = RawExamples(arrays.test_images, arrays.test_labels)
    return assemble_dataset(name, arrays.origin, [train, test], classes=classes, preparation=preparation)


def assemble_dataset(
    name: str,
    origin: str,
    parts: Sequence[RawExamples],
    *,
    classes: int | None = None,
    class_names: Sequence[str] = (),
    test_share: float = 0.2,
    kind: Kind | None = None,
    normalize: bool = False,
    preparation: Preparation | None = None,
    task: str | LearningTask | None = None,
) -> Dataset:
    """A data set from raw examples.

    Parameters
    ----------
    name : what reports call it.
    origin : the file or folder to name in errors.
    parts : the training set and the test set, or all examples.
    classes, class_names, test_share, kind, normalize, preparation, task : as for `as_dataset`.
    """
    learned = task if isinstance(task, LearningTask) else _find_task(task)
    parts, names = encode_labels(parts, class_names, origin)
    if kind is None and parts[0].x.ndim == 3 and parts[0].x.dtype.kind == "f":
        shape = " x ".join(map(str, parts[0].x.shape[1:]))
        logger.warning("%s: floats of %s are taken for gray images; set kind = 'series' for time series", name, shape)
    subjects = [origin] if len(parts) == 1 else [f"{origin}, training set", f"{origin}, test set"]
    parts = [_as_numbers(part, subject, kind, learned) for part, subject in zip(parts, subjects, strict=True)]
    parts = encode_groups(parts, origin)
    if len(parts) == 1:
        parts = split_off_test(parts[0], test_share, origin)
    train, test = (Examples(torch.from_numpy(part.x), torch.from_numpy(part.y)) for part in parts)
    if train.x.shape[1:] != test.x.shape[1:]:
        shapes = f"{tuple(train.x.shape[1:])} and {tuple(test.x.shape[1:])}"
        message = f"{origin}: training and test examples differ in shape, {shapes}"
        raise DataBroken(message, "Give both the same shape.")
    if train.x.dtype != test.x.dtype:
        message = f"{origin}: training and test examples differ in type, {train.x.dtype} and {test.x.dtype}"
        raise DataBroken(message, "Store both in the same way.")
    made = Dataset(
        name,
        train,
        test,
        classes or len(names) or _count_outputs(train.y, test.y, learned),
        preparation or PREPARATIONS["plain"],
        tokens=_count_tokens(train.x, test.x, origin),
        groups=_group_tensors(parts),
        class_names=names,
        task=learned,
    )
    return normalize_by_training_set(made) if normalize else made


def _group_tensors(parts: Sequence[RawExamples]) -> tuple[Tensor, Tensor] | None:
    train, test = (part.groups for part in parts)
    return None if train is None or test is None else (torch.from_numpy(train), torch.from_numpy(test))


def _find_task(name: str | None) -> LearningTask:
    if name is not None and name not in TASKS:
        raise DataBroken(f"there is no task {name!r}", f"Choose one of {', '.join(TASKS)}.")
    return TASKS[name] if name else CLASSIFICATION


def _count_outputs(train: Tensor, test: Tensor, task: LearningTask) -> int:
    """The number of classes, labels or numbers that a model predicts."""
    if task.target != "class":
        return train.shape[1] if train.dim() > 1 else 1
    return 1 + max((int(labels.max()) for labels in (train, test) if len(labels)), default=0)


def _as_numbers(part: RawExamples, subject: str, kind: Kind | None, task: LearningTask) -> RawExamples:
    """Inputs and targets as a data set stores them; before test examples are held out, so that errors tell the row."""
    read = as_labels if task.has_class_labels else partial(as_targets, dtype=task.dtype)
    x, y = as_inputs(part.x, subject, kind), read(part.y, subject)
    if len(x) != len(y):
        raise DataBroken(f"{subject}: {len(x)} examples but {len(y)} labels", "Give every example one label.")
    return replace(part, x=x.numpy(), y=y.numpy())


def _count_tokens(train: Tensor, test: Tensor, origin: str) -> int | None:
    """One more than the highest token id; None if inputs are not tokens."""
    if train.dtype != torch.int64 or not len(train) or not len(test):
        return None
    lowest = min(int(x.min()) for x in (train, test))
    if lowest < 0:
        hint = "Token ids are numbers from 0. Numbers of another kind: pass floats, or kind = 'tabular'."
        raise DataBroken(f"{origin}: integers are taken for token ids, and the lowest is {lowest}", hint)
    return 1 + max(int(x.max()) for x in (train, test))


_AXES: dict[Kind, tuple[int, ...]] = {"image": (3, 4), "series": (2, 3), "tabular": (2,), "tokens": (2,)}
_FORMS: dict[Kind, str] = {
    "image": "[n, height, width], [n, channels, height, width] or [n, height, width, channels]",
    "series": "[n, channels, length] or [n, length]",
    "tabular": "[n, features]",
    "tokens": "[n, length], of whole numbers",
}


def as_inputs(values: Array, origin: str, kind: Kind | None = None) -> Tensor:
    """Images (uint8 or float) become channels-first; token ids become int64; floats float32.

    Images with three axes are gray. Of four axes, the channel axis is the second or the last, whichever is shorter.

    Parameters
    ----------
    values : the inputs; the first axis is the examples.
    origin : the file or folder to name in errors.
    kind : what they are. Default: whole numbers with two axes are token ids, unless they are bytes; otherwise two axes
        are rows, three or four are images, and others stay as they are.
    """
    if values.dtype.kind not in "buif" or values.ndim < 2:
        hint = "Inputs are uint8 or float images, time series, rows of numbers, or token ids; first axis = examples."
        raise DataBroken(f"{origin}: inputs of type {values.dtype} and shape {values.shape}", hint)
    if values.dtype.kind == "b":
        values = values.astype(np.float32)
    problem = describe_not_finite(values)
    if problem:
        raise DataBroken(f"{origin}: {problem}", "Replace missing values, or leave these examples out.")
    if kind is None:
        kind = _usual_kind(values)
    elif kind not in _AXES:
        raise DataBroken(f"{origin}: there is no kind {kind!r}", f"Choose one of {', '.join(_AXES)}.")
    if kind is not None and (values.ndim not in _AXES[kind] or (kind == "tokens" and values.dtype.kind == "f")):
        message = f"{origin}: inputs of type {values.dtype} and shape {values.shape} are no {_PLURALS[kind]}"
        raise DataBroken(message, f"Give them as {_FORMS[kind]}.")
    if kind == "tokens":
        return torch.from_numpy(values.astype(np.int64))
    if values.dtype != np.uint8 and values.dtype.kind in "ui":
        values = _as_bytes(values, origin) if kind == "image" else values.astype(np.float32)
    if kind == "image" and values.ndim == 3:
        values = values[:, None]
    elif kind == "image" and values.shape[3] < values.shape[1]:
        values = values.transpose(0, 3, 1, 2)
    elif kind == "series" and values.ndim == 2:
        values = values[:, None]
    dtype = np.uint8 if values.dtype == np.uint8 and kind in ("image", None) else np.float32
    return torch.from_numpy(np.array(values, dtype=dtype, order="C"))


_PLURALS: dict[Kind, str] = {"image": "images", "series": "time series", "tabular": "rows", "tokens": "token ids"}


def _usual_kind(values: Array) -> Kind | None:
    is_whole = values.dtype.kind in "ui" and values.dtype != np.uint8
    if values.ndim == 2 and is_whole:
        return "tokens"
    return "image" if values.ndim in (3, 4) else None


def _as_bytes(values: Array, origin: str) -> Array:
    """Pixels that are stored as longer integers."""
    low, high = int(values.min(initial=0)), int(values.max(initial=0))
    if low < 0 or high > 255:
        hint = "Pixels are 0 to 255, or floats. Pass kind = 'series' for time series, floats for other numbers."
        raise DataBroken(f"{origin}: whole numbers from {low} to {high} are no pixels", hint)
    return values.astype(np.uint8)


def as_labels(values: Array, origin: str) -> Tensor:
    """One label per example, from [n] or [n, 1]; floats only if they are whole numbers."""
    if values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    if values.dtype.kind == "f" and values.ndim == 1:
        rows = np.flatnonzero(~(np.isfinite(values) & (values == np.rint(values))))
        if len(rows):
            message = f"{origin}: {len(rows)} labels are not whole numbers, the first one is {values[rows[0]]:g}"
            hint = "Labels are the numbers of classes, from 0. To predict numbers, set task = 'regression'."
            raise DataBroken(f"{message} in row {rows[0]}", hint)
        values = values.astype(np.int64)
    if values.ndim != 1 or values.dtype.kind not in "bui":
        hint = "Labels are integers, one per example: turn one-hot rows into integers with argmax."
        raise DataBroken(f"{origin}: labels of type {values.dtype} and shape {values.shape}", hint)
    return torch.from_numpy(values.astype(np.int64))


def as_targets(values: Array, origin: str, dtype: torch.dtype) -> Tensor:
    """Targets of other tasks than classification: numbers, flags, or a class for every token or pixel."""
    if values.dtype.kind not in "buif" or (dtype == torch.int64 and values.dtype.kind == "f"):
        hint = "Give numbers, flags of 0 and 1, or whole numbers for the classes of tokens and pixels."
        raise DataBroken(f"{origin}: targets of type {values.dtype}", hint)
    return torch.from_numpy(np.array(values, order="C")).to(dtype)


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


def download(name: str, error: DataMissing, label_columns: Sequence[str] = LABEL_COLUMNS) -> Arrays:
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
    parts = [
        read_split(splits[part], label_columns=label_columns, origin=HUB_NAMES[name][0]) for part in ("train", "test")
    ]
    return Arrays(HUB_NAMES[name][0], parts[0].x, parts[0].y, parts[1].x, parts[1].y)


def as_dataset(
    data: Any,
    *,
    name: str = "data",
    classes: int | None = None,
    test_share: float = 0.2,
    kind: Kind | None = None,
    label: str | None = None,
    groups: Any = None,
    features: Sequence[str] | None = None,
    class_names: Sequence[str] = (),
    normalize: bool = False,
    preparation: Preparation | None = None,
    task: str | LearningTask | None = None,
) -> Dataset:
    """A `Dataset` from whatever holds examples.

    Parameters
    ----------
    data : one of

        - arrays or tensors `(x, y)`, of which a random `test_share` becomes the test set,
        - `(x, y, x_test, y_test)` or `((x, y), (x_test, y_test))`,
        - a torch data set of `(x, y)` pairs or a loader of one, or two of them for training and test,
        - a data frame of pandas or polars, or two of them, with `label`; also `(frame, "label")`,
        - a data set of the Hugging Face hub or its splits, with images or columns of numbers,
        - a `Dataset`, which is returned as it is.
    name : for messages and reports.
    classes : the number of classes. Default: the class names or the highest label tell.
    test_share : the share of examples held out for testing if there is no test set, of every group alike. The draw is
        always the same.
    kind : "image", "series" (time series [n, channels, length]), "tabular" (rows of features) or "tokens" (token ids).
        Default: rows if there are two axes, but tokens if these are integers other than bytes; images if there are
        three or four.
    label : the column of labels of a data frame or a data set of the hub.
    groups : the group of each example, such as a user, for the partition "natural": a column, an array, or two arrays
        for training and test.
    features : the columns of inputs. Default: all other columns; on the hub the image, if there is one.
    class_names : the name of each class. Default: those that the source has; labels may be names, too.
    normalize : whether to normalize with the mean and the standard deviation of the training examples: per channel of
        images and time series, per feature of rows. They become part of the preparation, and of exported models.
    preparation : how examples become a model's input. Default: bytes are divided by 255, other numbers stay.
    task : what is learned, such as "regression", "multi_label" or "segmentation". Default: one class per example.

    Returns
    -------
    Dataset
        Images as they are stored, other numbers as float32, token ids as int64, labels 0, 1, ….

    Examples
    --------
    >>> as_dataset((x, y), class_names=["sit", "walk"], kind="series", normalize=True).train.x.shape
    """
    if isinstance(data, Dataset):
        _refuse_options(
            classes=classes, kind=kind, label=label, groups=groups, features=features, class_names=class_names or None,
            normalize=normalize or None, preparation=preparation, task=task,
        )  # fmt: skip
        return data
    options = _Columns(label, groups if isinstance(groups, str) else None, features)
    parts = [options.read(one) for one in _splits(data)]
    if groups is not None and not isinstance(groups, str):
        parts = _with_groups(parts, groups)
    return assemble_dataset(
        name,
        name,
        parts,
        classes=classes,
        class_names=class_names,
        test_share=test_share,
        kind=kind,
        normalize=normalize,
        preparation=preparation,
        task=task,
    )


def _refuse_options(**options: Any) -> None:
    given = [name for name, value in options.items() if value is not None]
    if given:
        hint = "Change its fields: dataclasses.replace(data, class_names=...)."
        raise DataBroken(f"the data is a Dataset already, to which {' and '.join(given)} would not be applied", hint)


_SOURCES = (
    "Pass (x, y), (x, y, x_test, y_test), torch data sets or loaders, a data frame with its label column, or a data "
    "set of the Hugging Face hub."
)


def _splits(data: Any) -> list[Any]:
    """What the training set, and the test set if there is one, come from."""
    if isinstance(data, Mapping) and data and all(is_hub_split(split) for split in data.values()):
        return choose_splits(data)
    if not isinstance(data, tuple | list):
        return [data]
    if 2 <= len(data) <= 3 and isinstance(data[-1], str):  # frames and their label column
        *frames, label = data
        return [_LabeledFrame(frame, label) for frame in frames]
    if len(data) == 4:
        return [data[:2], data[2:]]
    if len(data) == 2 and (_is_pair(data[0]) or _is_source(data[0])):
        return list(data)
    return [data]


@dataclass(frozen=True, eq=False)
class _LabeledFrame:
    frame: Any
    label: str


@dataclass(frozen=True, eq=False)
class _Columns:
    """The columns that the user names."""

    label: str | None
    groups: str | None
    features: Sequence[str] | None

    def read(self, part: Any) -> RawExamples:
        if isinstance(part, _LabeledFrame) and is_frame(part.frame):
            return read_frame(part.frame, part.label, self.groups, self.features)
        if is_frame(part):
            return read_frame(part, self.label, self.groups, self.features)
        if is_hub_split(part):
            return read_split(part, self.label, self.groups, self.features)
        named = {"label": self.label, "groups": self.groups, "features": self.features}
        given = next((option for option, value in named.items() if value is not None), None)
        if given:
            raise DataBroken(f"{given} names a column, and {type(part).__name__} has no columns", _SOURCES)
        if isinstance(part, DataLoader):
            return _read_loader(part)
        if isinstance(part, torch.utils.data.Dataset):
            return _read_torch(part)
        if isinstance(part, str | Path):
            hint = "Read a file with fl.datasets.npz(file=...), a folder with fl.datasets.folder(path=...)."
            raise DataBroken(f"{part} is a path, not data", hint)
        if not isinstance(part, tuple | list) or len(part) != 2:
            what = f"a {type(part).__name__} of {len(part)}" if isinstance(part, tuple | list) else type(part).__name__
            raise DataBroken(f"no data set can be made of {what}", _SOURCES)
        return RawExamples(_as_array(part[0], "inputs"), _as_array(part[1], "labels"))


def _with_groups(parts: list[RawExamples], groups: Any) -> list[RawExamples]:
    listed = list(groups) if len(parts) == 2 and isinstance(groups, tuple | list) else [groups]
    if len(listed) != len(parts):
        hint = "Pass groups=(of training examples, of test examples)."
        raise DataBroken(f"there are {len(parts)} sets of examples but groups for {len(listed)}", hint)
    return [replace(part, groups=_as_array(one, "groups")) for part, one in zip(parts, listed, strict=True)]


def _is_pair(data: Any) -> bool:
    """True for inputs and labels; plain lists of numbers are inputs alone."""
    return isinstance(data, tuple | list) and len(data) == 2 and all(hasattr(one, "shape") for one in data)


def _is_source(data: Any) -> bool:
    """True for what holds inputs and labels by itself."""
    return is_frame(data) or is_hub_split(data) or isinstance(data, DataLoader | torch.utils.data.Dataset)


def _as_array(values: Any, what: str) -> Array:
    if isinstance(values, Tensor):
        return values.detach().cpu().numpy()
    try:
        return np.asarray(values)
    except (TypeError, ValueError) as error:
        message = f"{what} of type {type(values).__name__} are no array: {error}"
        raise DataBroken(message, "Give all examples one shape.") from error


def _read_loader(loader: "DataLoader[Any]") -> RawExamples:
    """The examples of a loader's data set, in the data set's order: a loader may shuffle them and drop the last."""
    if loader.collate_fn is not default_collate and loader.batch_size is not None:
        hint = "Pass loader.dataset, or arrays (x, y)."
        raise DataBroken("the loader has a collate function of its own, which is not applied", hint)
    return _read_torch(loader.dataset)


def _read_torch(data: "torch.utils.data.Dataset[Any]") -> RawExamples:
    examples: list[Any] = list(data) if isinstance(data, IterableDataset) else [data[n] for n in range(len(data))]  # type: ignore[arg-type]
    if not examples:
        raise DataBroken("the torch data set is empty", "Give it examples.")
    odd = next((one for one in examples if not isinstance(one, tuple | list) or len(one) != 2), None)
    if odd is not None:
        form = f"{type(odd).__name__} of {len(odd)}" if hasattr(odd, "__len__") else type(odd).__name__
        raise DataBroken(f"an example of the torch data set is a {form}", "Its examples must be pairs (x, y).")
    x, y = (_stack([one[index] for one in examples], what) for index, what in ((0, "inputs"), (1, "labels")))
    return RawExamples(x, y, class_names=_class_names(data))


def _class_names(data: Any) -> tuple[str, ...]:
    """The attribute `classes` that torchvision's data sets have."""
    names = getattr(data.dataset if isinstance(data, Subset) else data, "classes", None)
    is_listed = isinstance(names, tuple | list) and all(isinstance(name, str) for name in names)
    return tuple(names) if names is not None and is_listed else ()


def _stack(values: Sequence[Any], what: str) -> Array:
    arrays = [_as_array(value, what) for value in values]
    shapes = sorted({array.shape for array in arrays})
    if len(shapes) > 1:
        message = f"{what} of the torch data set differ in shape, such as {shapes[0]} and {shapes[1]}"
        raise DataBroken(message, "Give all examples one shape.")
    return np.stack(arrays)
