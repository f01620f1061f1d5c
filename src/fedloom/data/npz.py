"""Data sets in numpy's .npz files: the two bundled ones, MedMNIST's, and a user's own without a line of code.

Pickled objects are never loaded. The bundled sets need no download; bundled/LICENSES.txt gives their origin and
license, and scripts/cut_*.py made them.
"""

import zipfile
import zlib
from pathlib import Path

import numpy as np

from ..files import is_file
from ..settings import Count
from . import adapters
from .adapters import Array, Arrays, build_dataset
from .dataset import DataBroken, DataMissing, Dataset
from .preparation import PREPARATIONS

ArrayNames = tuple[str, str, str, str]
ARRAY_NAMES: tuple[ArrayNames, ...] = (
    ("x_train", "y_train", "x_test", "y_test"),
    ("train_images", "train_labels", "test_images", "test_labels"),
)

_BUNDLED = Path(__file__).parent / "bundled"


def digits() -> Dataset:
    """Handwritten digits, part of the package: 1,437 + 360 gray images of 8 x 8 in 10 classes."""
    return build_dataset("digits", read_npz(_BUNDLED / "digits.npz"), 10, PREPARATIONS["plain"])


def fashion_mini() -> Dataset:
    """A balanced subset of Fashion-MNIST, part of the package: 2,000 + 500 gray images of 28 x 28 in 10 classes."""
    return build_dataset("fashion-mini", read_npz(_BUNDLED / "fashion_mini.npz"), 10, PREPARATIONS["fashion"])


def npz(*, folder: Path, file: str, classes: Count | None = None) -> Dataset:
    """Any .npz file with a training and a test set.

    The arrays are named x_train, y_train, x_test and y_test, or train_images, train_labels, test_images and
    test_labels.

    Parameters
    ----------
    file : its path, searched in the data directory, then in the working directory.
    classes : the number of classes, if the file may lack examples of some; None: the highest label determines it.
    """
    path = next((path for path in (folder / file, Path(file)) if is_file(path)), None)
    if path is None:
        hint = f"Put it into {folder}, name the data directory with FEDLOOM_DATA or --data-dir, or give a full path."
        raise DataMissing(f"no file {file}", hint)
    return build_dataset(path.stem, read_npz(path), classes, PREPARATIONS["plain"])


def pathmnist(*, folder: Path) -> Dataset:
    """PathMNIST, tissue of the colon: 89,996 + 7,180 color images of 28 x 28 in 9 classes.

    The validation part is unused.
    """
    return build_dataset("pathmnist", _read_medmnist("pathmnist", folder), 9, PREPARATIONS["fedsup_pathmnist"])


def pneumoniamnist(*, folder: Path) -> Dataset:
    """PneumoniaMNIST, chest X-rays: 4,708 + 624 gray images of 28 x 28, healthy or pneumonia.

    The validation part is unused.
    """
    return build_dataset("pneumoniamnist", _read_medmnist("pneumoniamnist", folder), 2, PREPARATIONS["plain"])


def read_npz(path: Path, array_names: tuple[ArrayNames, ...] = ARRAY_NAMES) -> Arrays:
    """Read the four arrays of a file under the first set of names that it has completely."""
    content = _load(path, {name for names in array_names for name in names})
    for names in array_names:
        if all(name in content for name in names):
            return Arrays(str(path), *(content[name] for name in names))
    expected = " or ".join(", ".join(names) for names in array_names)
    raise DataBroken(f"{path} lacks the arrays of a data set", f"Save it with numpy.savez and the names {expected}.")


def find_npz(name: str, folder: Path, array_names: tuple[ArrayNames, ...] = ARRAY_NAMES) -> Arrays | None:
    """Read NAME/NAME.npz or NAME.npz of the data directory; None if there is neither."""
    paths = (folder / name / f"{name}.npz", folder / f"{name}.npz")
    return next((read_npz(path, array_names) for path in paths if is_file(path)), None)


def _load(path: Path, names: set[str]) -> dict[str, Array]:
    try:
        with zipfile.ZipFile(path):
            pass
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files if name in names}
    except (ValueError, EOFError, KeyError, OSError, zipfile.BadZipFile, zlib.error) as problem:
        hint = "Write plain arrays with numpy.savez, or download the file again."
        raise DataBroken(f"{path} cannot be read: {problem}", hint) from problem


def _read_medmnist(name: str, folder: Path) -> Arrays:
    missing = adapters.missing_data_error(name, folder, f"{name}.npz into {folder / name}")
    return find_npz(name, folder) or adapters.download(name, missing)
