"""What may be wrong with the examples of a data set: errors that stop a run before it begins, and warnings.

A data set checks the form of its labels and groups itself. This looks at all values, once, when data is read that
fedloom does not know.
"""

import logging
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from .dataset import DataBroken, Dataset
from .raw import Array

logger = logging.getLogger(__name__)

RANGE_FACTOR = 50.0  # by which the largest training and the largest test input may differ
LISTED = 5


def check_values(dataset: Dataset) -> None:
    """Raise if examples cannot be trained on, and log what is suspicious.

    Parameters
    ----------
    dataset : the data set.

    Raises
    ------
    DataBroken
        For inputs that are not finite or of another type than bytes, floats and tokens, test examples of another shape
        or type than the training examples, and a single class.
    """
    train, test = dataset.train.x, dataset.test.x
    if train.shape[1:] != test.shape[1:]:
        shapes = f"{tuple(train.shape[1:])} and {tuple(test.shape[1:])}"
        message = f"{dataset.name}: training and test examples differ in shape, {shapes}"
        raise DataBroken(message, "Give both the same shape.")
    if train.dtype != test.dtype:
        message = f"{dataset.name}: training and test examples differ in type, {train.dtype} and {test.dtype}"
        raise DataBroken(message, "Read both in the same way.")
    for part, x in (("training", train), ("test", test)):
        _check_inputs(f"the {part} set of {dataset.name}", x, dataset.tokens)
    if dataset.classes < 2 and dataset.train.y.dtype == torch.int64:
        hint = "Give labels of at least two classes, or `classes`, if others hold the rest."
        raise DataBroken(f"{dataset.name} has a single class, so there is nothing to learn", hint)
    for warning in find_warnings(dataset):
        logger.warning("%s: %s", dataset.name, warning)


def _check_inputs(subject: str, x: Tensor, tokens: int | None) -> None:
    if tokens is None and x.dtype != torch.uint8 and not x.is_floating_point():
        hint = "Bytes (uint8) are images, floats other numbers; give `tokens` if these are token ids."
        raise DataBroken(f"{subject} has inputs of type {x.dtype}", hint)
    if x.is_floating_point():
        problem = describe_not_finite(x.detach().cpu().numpy())
        if problem:
            raise DataBroken(f"{subject}: {problem}", "Replace missing values, or leave these examples out.")


def describe_not_finite(values: Array) -> str | None:
    """How many values are NaN or infinite and where the first one is; None if there are none.

    Parameters
    ----------
    values : the inputs; the first axis is the examples.
    """
    if values.dtype.kind != "f" or np.isfinite(values).all():
        return None
    bad = ~np.isfinite(values)
    row = int(np.flatnonzero(bad.reshape(len(values), -1).any(axis=1))[0])
    return f"{int(bad.sum())} inputs are not finite (NaN or infinity), the first one is in row {row}"


def find_warnings(dataset: Dataset) -> Iterator[str]:
    """What is suspicious, one sentence each.

    Parameters
    ----------
    dataset : the data set.
    """
    if dataset.train.y.dtype == torch.int64:
        yield from _suspicious_labels(dataset)
    if dataset.tokens is None:
        yield from _suspicious_ranges(dataset.train.x, dataset.test.x)
        yield from _constant_inputs(dataset.train.x)
    both = count_shared_rows(dataset.train.x, dataset.test.x)
    if both:
        yield f"{both} of {len(dataset.test):,} test examples are also training examples"


def _suspicious_labels(dataset: Dataset) -> Iterator[str]:
    trained, tested = (set(part.y.unique().tolist()) for part in (dataset.train, dataset.test))
    if len(trained) == 1:
        yield f"all training examples have the label {_name_classes(dataset, trained)}"
    missing = set(range(dataset.classes)) - trained if dataset.train.y.dim() == 1 else set()
    if missing & tested:
        yield f"no training example of {_name_classes(dataset, missing & tested)}, which the test set has"
    if missing - tested:
        yield f"no example of {_name_classes(dataset, missing - tested)} of {dataset.classes} classes"


def _name_classes(dataset: Dataset, labels: set[int]) -> str:
    named = [f"{one} ({dataset.class_names[one]})" if dataset.class_names else f"{one}" for one in sorted(labels)]
    more = f" and {len(named) - LISTED} more" if len(named) > LISTED else ""
    return f"{'class' if len(named) == 1 else 'classes'} {', '.join(named[:LISTED])}{more}"


def _suspicious_ranges(train: Tensor, test: Tensor) -> Iterator[str]:
    ranges = [(float(x.min()), float(x.max())) for x in (train, test)]
    small, large = sorted(max(abs(low), abs(high)) for low, high in ranges)
    if large > RANGE_FACTOR * small:
        (a, b), (c, d) = ranges
        yield f"training inputs lie in {a:g} .. {b:g}, but test inputs in {c:g} .. {d:g}: are both scaled alike?"


def _constant_inputs(train: Tensor) -> Iterator[str]:
    """Features of rows and channels of time series; pixels of images are often constant."""
    if train.dim() not in (2, 3) or len(train) < 2:
        return
    axes = tuple(axis for axis in range(train.dim()) if axis != 1)
    constant = (train.amin(axes) == train.amax(axes)).nonzero().flatten().tolist()
    if constant:
        what = "features" if train.dim() == 2 else "channels"
        shown = ", ".join(map(str, constant[:LISTED])) + (", …" if len(constant) > LISTED else "")
        yield f"{len(constant)} of {train.shape[1]} {what} have the same value everywhere: {shown}"


def count_shared_rows(train: Tensor, test: Tensor) -> int:
    """How many test examples are also training examples, bit for bit.

    Parameters
    ----------
    train, test : the inputs.
    """
    if train.dtype != test.dtype or train.shape[1:] != test.shape[1:]:
        return 0
    known = set(_hash_rows(train))
    return sum(row in known for row in _hash_rows(test))


def _hash_rows(x: Tensor) -> Iterator[int]:
    """Hashes alone: the rows would take as much memory as the data."""
    rows = np.ascontiguousarray(x.detach().cpu().numpy()).reshape(len(x), -1)
    return (hash(row.tobytes()) for row in rows)
