"""Data frames of pandas and polars: a column of labels, perhaps a column of groups, and columns of numbers.

Neither library is imported: both offer `columns`, `frame[name]` and `to_numpy()`.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from .dataset import DataBroken
from .raw import Array, RawExamples


def is_frame(data: Any) -> bool:
    """True for a data frame of pandas or polars."""
    return hasattr(data, "columns") and hasattr(data, "to_numpy")


def read_frame(
    frame: Any, label: str | None, groups: str | None = None, features: Sequence[str] | None = None
) -> RawExamples:
    """The examples of a data frame; features are float32, whole numbers too.

    Parameters
    ----------
    frame : the data frame.
    label : the column of labels: numbers, or names of classes. Categories keep their order.
    groups : the column of groups, such as users.
    features : the columns of inputs. Default: all others.
    """
    by_name = {str(name): name for name in frame.columns}
    columns = list(by_name)
    if len(columns) < len(frame.columns):
        raise DataBroken("two columns of the data frame have the same name", "Rename one of them.")
    if label is None:
        hint = f"Pass as_dataset(frame, label=...) or (frame, label); the columns are {_listed(columns)}."
        raise DataBroken("a data frame does not tell which column holds the labels", hint)
    chosen = [name for name in columns if name not in (label, groups)] if features is None else list(features)
    for name in (label, *([] if groups is None else [groups]), *chosen):
        if name not in columns:
            raise DataBroken(f"there is no column {name!r}", f"The columns are {_listed(columns)}.")
    if not chosen:
        raise DataBroken("the data frame has no columns of inputs", f"The columns are {_listed(columns)}.")
    x = np.stack([_numbers(name, frame[by_name[name]]) for name in chosen], axis=1)
    labels = frame[by_name[label]]
    owners = None if groups is None else frame[by_name[groups]].to_numpy()
    return RawExamples(x, labels.to_numpy(), owners, _category_names(labels))


def _listed(columns: Sequence[str]) -> str:
    shown = ", ".join(columns[:20])
    return f"{shown} and {len(columns) - 20} more" if len(columns) > 20 else shown


def _numbers(name: str, column: Any) -> Array:
    """A column as float32, missing values as NaN."""
    values = column.to_numpy()
    try:
        if values.dtype.kind not in "buifO":
            raise ValueError(f"it holds {values.dtype}")
        return np.asarray(values, dtype=np.float32)
    except (TypeError, ValueError) as error:
        hint = f"Encode text and dates as numbers, or leave {name!r} out (features=[...])."
        raise DataBroken(f"a column is not numeric: {name!r}: {error}", hint) from error


def _category_names(column: Any) -> tuple[str, ...]:
    """The categories of a column of names, in their order; () if it has none, or if they are numbers."""
    categories: Any = getattr(getattr(column, "dtype", None), "categories", None)
    if categories is None:
        return ()
    names = list(categories)
    return tuple(names) if all(isinstance(name, str) for name in names) else ()
