"""Examples as a source gives them: labels and groups may still be names, and there may be no test set yet.

Every source, be it arrays, a data frame or a folder, ends here, so that names become numbers and test examples are held
out in one way.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ..seeds import VALIDATION, generator
from .dataset import DataBroken

Array = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class RawExamples:
    """Inputs, labels and groups of one part of a source.

    Parameters
    ----------
    x : the inputs; the first axis is the examples.
    y : numbers or names of classes.
    groups : the group of each example, such as a user, by number or by name; None: there are no groups.
    class_names : the names of the classes, if the source lists them.
    """

    x: Array
    y: Array
    groups: Array | None = None
    class_names: tuple[str, ...] = ()

    def select(self, rows: Array) -> "RawExamples":
        """Some of the examples.

        Parameters
        ----------
        rows : which.
        """
        groups = None if self.groups is None else self.groups[rows]
        return replace(self, x=self.x[rows], y=self.y[rows], groups=groups)


def concatenate(parts: Sequence[RawExamples], origin: str) -> RawExamples:
    """All examples of some parts, one part after the other.

    Parameters
    ----------
    parts : at least one.
    origin : the file or folder to name in errors.
    """
    shapes = sorted({part.x.shape[1:] for part in parts})
    if len(shapes) > 1:
        message = f"{origin}: examples differ in shape, such as {shapes[0]} and {shapes[1]}"
        raise DataBroken(message, "Give all examples one shape.")
    groups = [part.groups for part in parts if part.groups is not None]
    return RawExamples(
        np.concatenate([part.x for part in parts]),
        np.concatenate([part.y for part in parts]),
        np.concatenate(groups) if len(groups) == len(parts) else None,
        parts[0].class_names,
    )


def encode_labels(
    parts: Sequence[RawExamples], class_names: Sequence[str], origin: str
) -> tuple[list[RawExamples], tuple[str, ...]]:
    """Names of classes become numbers, in the order of `class_names` or else of the alphabet; numbers stay.

    Parameters
    ----------
    parts : the training set, and the test set if there is one.
    class_names : the names that the user gives; (): those of the source, or those that occur.
    origin : the file or folder to name in errors.

    Returns
    -------
    The parts, and the names.
    """
    names = tuple(class_names) or next((part.class_names for part in parts if part.class_names), ())
    labels = [_plain_labels(part.y, origin) for part in parts]
    if not any(values.dtype.kind == "U" for values in labels):
        return [replace(part, y=values) for part, values in zip(parts, labels, strict=True)], names
    labels = [values if values.dtype.kind == "U" else values.astype(str) for values in labels]
    names = names or tuple(np.unique(np.concatenate(labels)).tolist())
    numbers = {name: number for number, name in enumerate(names)}
    unknown = next((label for values in labels for label in values.ravel().tolist() if label not in numbers), None)
    if unknown is not None:
        hint = f"The class names are {', '.join(names[:10])}."
        raise DataBroken(f"{origin}: there is no class {unknown!r} for a label", hint)
    encoded = [np.array([numbers[label] for label in values.ravel().tolist()], np.int64) for values in labels]
    return [replace(part, y=values.reshape(part.y.shape)) for part, values in zip(parts, encoded, strict=True)], names


def _plain_labels(values: Array, origin: str) -> Array:
    """Labels as numbers or as text, not as Python objects."""
    if values.dtype.kind != "O":
        return values
    listed = values.ravel().tolist()
    missing = [row for row, label in enumerate(listed) if label is None or label != label]
    if missing:
        message = f"{origin}: {len(missing)} examples have no label, the first one is row {missing[0]}"
        raise DataBroken(message, "Leave these examples out.")
    if all(isinstance(label, str) for label in listed):
        return np.array(listed, dtype=str).reshape(values.shape)
    if all(isinstance(label, bool | int | float | np.number) for label in listed):
        return np.array(listed).reshape(values.shape)
    kinds = sorted({type(label).__name__ for label in listed})
    raise DataBroken(f"{origin}: labels of type {', '.join(kinds)}", "Labels are numbers from 0, or names of classes.")


def encode_groups(parts: Sequence[RawExamples], origin: str) -> list[RawExamples]:
    """The parts with their groups as numbers from 0; a name is the same number in all.

    Parameters
    ----------
    parts : the training set, and the test set if there is one.
    origin : the file or folder to name in errors.
    """
    given = [part.groups for part in parts]
    found = [groups for groups in given if groups is not None]
    if not found:
        return list(parts)
    if len(found) < len(given):
        message = f"{origin}: groups of the {'training' if given[0] is not None else 'test'} examples only"
        raise DataBroken(message, "Give the group of every training and of every test example, or none.")
    for part, groups in zip(parts, found, strict=True):
        if groups.shape != (len(part.y),):
            message = f"{origin}: groups of shape {groups.shape} for {len(part.y)} examples"
            raise DataBroken(message, "Give every example one group.")
        absent = [row for row, group in enumerate(groups.tolist()) if group is None or group != group]
        if absent:
            message = f"{origin}: {len(absent)} examples have no group, the first one is row {absent[0]}"
            raise DataBroken(message, "Leave these examples out, or give them a group.")
    everything = np.concatenate(found) if all(groups.dtype.kind in "uif" for groups in found) else None
    if everything is None:
        everything = np.concatenate([groups.astype(str) for groups in found])
    numbers = np.unique(everything, return_inverse=True)[1].astype(np.int64)
    encoded = np.split(numbers, np.cumsum([len(groups) for groups in found])[:-1])
    return [replace(part, groups=groups) for part, groups in zip(parts, encoded, strict=True)]


def split_off_test(examples: RawExamples, share: float, origin: str = "data") -> list[RawExamples]:
    """A training and a test set, drawn at random, always the same; of every group alike if there are groups.

    Parameters
    ----------
    examples : all examples.
    share : the share of the test set.
    origin : the file or folder to name in errors.
    """
    if len(examples.x) != len(examples.y):
        message = f"{origin}: {len(examples.x)} examples but {len(examples.y)} labels"
        raise DataBroken(message, "Give every example one label.")
    total = len(examples.y)
    order = generator(0, VALIDATION).permutation(total)
    if examples.groups is None:
        is_test = np.zeros(total, dtype=bool)
        is_test[order[: round(share * total)]] = True
    else:
        is_test = hold_out_of_groups(examples.groups, share, order)
    if not 0 < is_test.sum() < total:
        hint = "Pass a test set: (x, y, x_test, y_test)."
        raise DataBroken(f"{total} examples are too few to hold out {share:.0%} of them", hint)
    return [examples.select(np.flatnonzero(part)) for part in (~is_test, is_test)]


def hold_out_of_groups(groups: Array, share: float, order: Array) -> npt.NDArray[np.bool_]:
    """True for the test examples: of every group its share, rounded, of the examples that come first in `order`.

    Parameters
    ----------
    groups : the group of each example.
    share : the share of the test set.
    order : a permutation of the examples.
    """
    names = groups if groups.dtype.kind in "uif" else groups.astype(str)
    numbers, counts = np.unique(names, return_inverse=True, return_counts=True)[1:]
    by_group = order[np.argsort(numbers[order], kind="stable")]
    starts = np.cumsum(counts) - counts
    ranks = np.arange(len(order)) - np.repeat(starts, counts)
    is_test = np.zeros(len(order), dtype=bool)
    is_test[by_group[ranks < np.repeat(np.rint(share * counts), counts)]] = True
    return is_test
