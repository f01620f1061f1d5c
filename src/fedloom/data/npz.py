"""Data sets in numpy's .npz files: MedMNIST's, and anybody's own without a line of code.

Two spellings of the four arrays are understood; pickled objects are never loaded.
"""

import zipfile
import zlib
from pathlib import Path

import numpy as np

from ..settings import Count
from . import adapters
from .adapters import Array, Arrays, as_dataset
from .dataset import DataBroken, DataMissing, Dataset
from .preparation import PREPARATIONS

SPELLINGS = (
    ("x_train", "y_train", "x_test", "y_test"),
    ("train_images", "train_labels", "test_images", "test_labels"),
)


def npz(*, folder: Path, file: str, classes: Count | None = None) -> Dataset:
    """Any .npz file with a training and a test set, looked for in the data directory, then from here. `classes` has to
    be said where not every file has examples of all."""
    path = next((path for path in (folder / file, Path(file)) if path.is_file()), None)
    if path is None:
        hint = f"Put it into {folder}, name the data directory with FEDLOOM_DATA or --data-dir, or give a full path."
        raise DataMissing(f"there is no file {file}", hint)
    return as_dataset(path.stem, read_npz(path), classes, PREPARATIONS["plain"])


def pathmnist(*, folder: Path) -> Dataset:
    """Tissue of the colon: 89,996 + 7,180 colour images of 28 x 28 in 9 classes; the validation part is unused."""
    return as_dataset("pathmnist", _medmnist("pathmnist", folder), 9, PREPARATIONS["fedsup_pathmnist"])


def pneumoniamnist(*, folder: Path) -> Dataset:
    """Chest X-rays: 4,708 + 624 grey images of 28 x 28, healthy or pneumonia; the validation part is unused."""
    return as_dataset("pneumoniamnist", _medmnist("pneumoniamnist", folder), 2, PREPARATIONS["plain"])


def read_npz(path: Path, spellings: tuple[tuple[str, str, str, str], ...] = SPELLINGS) -> Arrays:
    """The four arrays of a file in the first spelling it has all of."""
    content = _load(path, {name for spelling in spellings for name in spelling})
    for spelling in spellings:
        if all(name in content for name in spelling):
            return Arrays(str(path), *(content[name] for name in spelling))
    wanted = " or ".join(", ".join(spelling) for spelling in spellings)
    raise DataBroken(f"{path} lacks the arrays of a data set", f"Save it with numpy.savez and the names {wanted}.")


def _load(path: Path, names: set[str]) -> dict[str, Array]:
    try:
        with zipfile.ZipFile(path):
            pass
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files if name in names}
    except (ValueError, EOFError, KeyError, OSError, zipfile.BadZipFile, zlib.error) as problem:
        hint = "Write plain arrays with numpy.savez, or download the file again."
        raise DataBroken(f"{path} cannot be read: {problem}", hint) from problem


def _medmnist(name: str, folder: Path) -> Arrays:
    for path in (folder / name / f"{name}.npz", folder / f"{name}.npz"):
        if path.is_file():
            return read_npz(path)
    return adapters.fetch(name, adapters.missing(name, folder, f"{name}.npz into {folder / name}"))
