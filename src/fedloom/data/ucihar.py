"""UCI HAR: activities of 30 people from the sensors of a phone. Anguita et al., ESANN 2013.

Reads the published text files, of which nothing is downloaded.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np

from ..seeds import UCIHAR_TEST, generator
from ..settings import Fraction
from .adapters import assemble_dataset, missing_data_error
from .catalog import LABEL_NAMES
from .dataset import DataBroken, Dataset
from .raw import Array, RawExamples, concatenate, hold_out_of_groups

SIGNALS = tuple(f"{kind}_{axis}" for kind in ("body_acc", "body_gyro", "total_acc") for axis in "xyz")
ACTIVITIES = LABEL_NAMES["ucihar"]
LENGTH, FEATURES = 128, 561


def ucihar(
    *,
    folder: Path,
    inputs: Literal["signals", "features"] = "signals",
    split: Literal["within_subjects", "published"] = "within_subjects",
    test_share: Fraction = 0.3,
    normalize: bool = True,
) -> Dataset:
    """UCI HAR, activities of 30 people by a phone's sensors: 10,299 windows of 9 signals x 128 steps in 6 classes.

    People are the groups of the examples: partition "natural" with 30 devices gives each a person. The published test
    set consists of other people, so devices of the training set would have no test examples; by default a share of
    every person's windows is the test set. Consecutive windows overlap by half, which makes this test set easier than
    one of other people.

    Parameters
    ----------
    inputs : "signals": time series [9, 128] of the inertial sensors; "features": 561 features computed from them.
    split : "within_subjects": a share of every person's windows is the test set; "published": 7,352 windows of 21
        people are the training set, 2,947 of 9 others the test set.
    test_share : the share of every person's windows in the test set; only for "within_subjects".
    normalize : whether to normalize with the mean and the standard deviation of the training examples.
    """
    missing = missing_data_error(
        "ucihar", folder, f"the folders train and test of 'UCI HAR Dataset.zip' into {folder / 'ucihar'}"
    )
    roots = (folder / "ucihar", folder / "UCI HAR Dataset", folder / "ucihar" / "UCI HAR Dataset")
    root = next((root for root in roots if (root / "train").is_dir() and (root / "test").is_dir()), None)
    if root is None:
        raise missing
    parts = [_read_part(root, part, inputs) for part in ("train", "test")]
    if split == "within_subjects":
        parts = list(_split_within_subjects(concatenate(parts, str(root)), test_share))
    return assemble_dataset(
        "ucihar",
        str(root),
        parts,
        class_names=ACTIVITIES,
        kind="series" if inputs == "signals" else "tabular",
        normalize=normalize,
    )


def _split_within_subjects(examples: RawExamples, share: float) -> Iterator[RawExamples]:
    assert examples.groups is not None
    order = generator(0, UCIHAR_TEST).permutation(len(examples.y))
    is_test = hold_out_of_groups(examples.groups, share, order)
    for part in (~is_test, is_test):
        yield examples.select(np.flatnonzero(part))


def _read_part(root: Path, part: str, inputs: str) -> RawExamples:
    folder = root / part
    labels, subjects = (_read_column(folder / f"{name}_{part}.txt") for name in ("y", "subject"))
    if len(labels) and not 1 <= labels.min() <= labels.max() <= len(ACTIVITIES):
        message = f"{folder / f'y_{part}.txt'} has labels from {labels.min()} to {labels.max()}"
        raise DataBroken(message, f"The activities are numbered 1 to {len(ACTIVITIES)}.")
    if inputs == "features":
        x = _read_table(folder / f"X_{part}.txt", FEATURES)
    else:
        names = (folder / "Inertial Signals" / f"{signal}_{part}.txt" for signal in SIGNALS)
        signals = [_read_table(name, LENGTH) for name in names]
        odd = next((n for n, one in enumerate(signals) if len(one) != len(labels)), None)
        if odd is not None:
            message = f"{folder}: {len(labels)} labels but {len(signals[odd])} windows of {SIGNALS[odd]}"
            raise DataBroken(message, "Unpack the files again.")
        x = np.stack(signals, axis=1)
    if not len(x) == len(labels) == len(subjects):
        message = f"{folder}: {len(x)} windows, {len(labels)} labels and {len(subjects)} subjects"
        raise DataBroken(message, "Unpack the files again.")
    return RawExamples(x, labels - 1, subjects)


def _read_column(path: Path) -> Array:
    return _read_table(path, 1)[:, 0].astype(np.int64)


def _read_table(path: Path, columns: int) -> Array:
    """Numbers separated by blanks, one line per example."""
    try:
        table = np.loadtxt(path, dtype=np.float32, ndmin=2)
    except (OSError, ValueError) as error:
        raise DataBroken(f"{path} cannot be read: {error}", "Unpack the files of UCI HAR again.") from error
    if table.shape[1] != columns:
        raise DataBroken(f"{path} has {table.shape[1]} columns instead of {columns}", "Unpack the files again.")
    return table
