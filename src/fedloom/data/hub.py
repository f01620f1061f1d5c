"""Data sets of Hugging Face's package `datasets`, which were loaded by the user or are downloaded.

The package is not imported here: its data sets tell their columns by `column_names` and `features`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .dataset import DataBroken
from .raw import Array, RawExamples

LABEL_COLUMNS = ("label", "labels")
IMAGE_COLUMNS = ("image", "img")
_SEQUENCES = ("List", "LargeList", "Sequence", "Array2D", "Array3D", "Array4D", "Array5D")


def is_hub_split(data: Any) -> bool:
    """True for one split, such as `datasets.Dataset`."""
    return hasattr(data, "column_names") and not isinstance(data, Mapping)


def choose_splits(splits: Mapping[str, Any]) -> list[Any]:
    """The training set and the test set of a `DatasetDict`; its validation set, if there is no test set.

    Parameters
    ----------
    splits : splits by name.
    """
    if "train" not in splits:
        hint = "Pass the splits you want as (training, test)."
        raise DataBroken(f"there is no split 'train' among {', '.join(map(str, splits))}", hint)
    test = next((splits[name] for name in ("test", "validation") if name in splits), None)
    return [splits["train"]] if test is None else [splits["train"], test]


def read_split(
    split: Any,
    label: str | None = None,
    groups: str | None = None,
    features: Sequence[str] | None = None,
    label_columns: Sequence[str] = LABEL_COLUMNS,
    origin: str = "data",
) -> RawExamples:
    """The examples of a split: its images, or else its columns of numbers.

    Parameters
    ----------
    split : the split.
    label : the column of labels. Default: the first of `label_columns` that it has.
    groups : the column of groups, such as users.
    features : the columns of inputs. Default: the image, or all columns of numbers.
    label_columns : usual names of the column of labels.
    origin : what errors call it.
    """
    names, types = list(split.column_names), dict(getattr(split, "features", None) or {})
    chosen = label or next((name for name in label_columns if name in names), None)
    for name in (label, groups, *(features or ())):
        if name is not None and name not in names:
            raise DataBroken(f"{origin}: there is no column {name!r}", f"The columns are {', '.join(names)}.")
    if chosen is None:
        hint = f"Expected {' or '.join(label_columns)}; name another with as_dataset(data, label=...)."
        raise DataBroken(f"{origin}: no label column among {', '.join(names)}", hint)
    inputs = [name for name in names if name not in (chosen, groups)] if features is None else list(features)
    image = next((name for name in inputs if _is_image(name, types.get(name))), None)
    x = _stack_images(split, image, origin) if image else _numbers(split, inputs, types, origin)
    class_names = tuple(getattr(types.get(chosen), "names", None) or ())
    y = np.asarray(list(split[chosen]))
    return RawExamples(x, y, None if groups is None else np.asarray(list(split[groups])), class_names)


def _is_image(name: str, kind: Any) -> bool:
    return name in IMAGE_COLUMNS if kind is None else type(kind).__name__ == "Image"


def _stack_images(split: Any, column: str, origin: str) -> Array:
    images = [np.asarray(image) for image in split[column]]
    shapes = sorted({image.shape for image in images})
    if len(shapes) > 1:
        message = f"{origin}: images differ in shape, such as {shapes[0]} and {shapes[1]}"
        raise DataBroken(message, "Resize them to one size, and convert all to gray or to RGB, with data.map(...).")
    return np.stack(images)


def _numbers(split: Any, inputs: Sequence[str], types: Mapping[str, Any], origin: str) -> Array:
    if not types or not inputs:
        hint = f"Expected {' or '.join(IMAGE_COLUMNS)}, or columns of numbers."
        raise DataBroken(f"{origin}: no image or number column among {', '.join(split.column_names)}", hint)
    for name in inputs:
        dtype = str(getattr(_innermost(types[name]), "dtype", type(types[name]).__name__))
        if dtype in ("string", "large_string"):
            hint = "Turn text into token ids, as many for each example (see the page on text), or leave the column out."
            raise DataBroken(f"{origin}: the column {name!r} is text", hint)
        if not dtype.startswith(("int", "uint", "float", "double", "bool")):
            hint = "Leave it out: as_dataset(data, features=[...])."
            raise DataBroken(f"{origin}: the column {name!r} is not numeric but {dtype}", hint)
    arrays = [name for name in inputs if type(types[name]).__name__ in _SEQUENCES]
    if not arrays:
        return np.stack([np.asarray(list(split[name]), dtype=np.float32) for name in inputs], axis=1)
    if len(inputs) > 1:
        message = f"{origin}: the columns {', '.join(inputs)} cannot be one input"
        raise DataBroken(message, "Name the column of inputs: as_dataset(data, features=[...]).")
    rows = [np.asarray(row) for row in split[arrays[0]]]
    if len({row.shape for row in rows}) > 1:
        message = f"{origin}: examples of the column {arrays[0]!r} differ in length"
        raise DataBroken(message, "Pad or cut them to one length.")
    return np.stack(rows)


def _innermost(kind: Any) -> Any:
    """The type of the numbers in a list of lists."""
    while hasattr(kind, "feature"):
        kind = kind.feature
    return kind
