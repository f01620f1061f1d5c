"""Data sets in numpy's .npz files: the two bundled ones, MedMNIST's, and a user's own without a line of code.

Pickled objects are never loaded. The bundled sets need no download; bundled/LICENSES.txt gives their origin and
license, and scripts/cut_*.py made them.
"""

import zipfile
import zlib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import numpy as np

from ..files import is_file, is_folder
from ..settings import Count, Fraction
from . import adapters
from .adapters import Arrays, Kind, assemble_dataset, build_dataset
from .dataset import DataBroken, DataMissing, Dataset
from .preparation import PREPARATIONS
from .raw import Array, RawExamples
from .tasks import LearningTask

ArrayNames = tuple[str, str, str, str]
ARRAY_NAMES: tuple[ArrayNames, ...] = (
    ("x_train", "y_train", "x_test", "y_test"),
    ("train_images", "train_labels", "test_images", "test_labels"),
)

GROUP_NAMES = (("groups_train", "groups_test"), ("train_groups", "test_groups"))
OWN_NAMES = frozenset(
    [*(name for names in (*ARRAY_NAMES, *GROUP_NAMES) for name in names), "x", "y", "groups", "class_names"]
)

_BUNDLED = Path(__file__).parent / "bundled"


def digits() -> Dataset:
    """Handwritten digits, part of the package: 1,437 + 360 gray images of 8 x 8 in 10 classes."""
    return build_dataset("digits", read_npz(_BUNDLED / "digits.npz"), 10, PREPARATIONS["plain"])


def fashion_mini() -> Dataset:
    """A balanced subset of Fashion-MNIST, part of the package: 2,000 + 500 gray images of 28 x 28 in 10 classes."""
    return build_dataset("fashion-mini", read_npz(_BUNDLED / "fashion_mini.npz"), 10, PREPARATIONS["fashion"])


def npz(
    *,
    folder: Path,
    file: str,
    classes: Count | None = None,
    kind: Kind | None = None,
    normalize: bool = False,
    test_share: Fraction = 0.2,
    task: LearningTask | None = None,
) -> Dataset:
    """Any .npz file with examples and labels.

    The arrays are named x_train, y_train, x_test and y_test, or train_images, train_labels, test_images and
    test_labels; or x and y, of which some become the test set. Optional are the groups of examples, such as users
    (groups_train and groups_test, or train_groups and test_groups; groups beside x and y), and class_names.

    Parameters
    ----------
    file : its path, searched in the data directory, then in the working directory.
    classes : the number of classes, if the file may lack examples of some; None: the class names or the highest label
        determine it.
    kind : "image", "series" (time series [n, channels, length]), "tabular" or "tokens"; None: two axes are rows, or
        tokens if they are whole numbers other than bytes; three or four are images.
    normalize : whether to normalize with the mean and the standard deviation of the training examples.
    test_share : the share of examples held out for testing, of every group alike, if there are only x and y.
    task : that of the recipe: what the labels are.
    """
    path = find_own(file, folder, is_file)
    content = load_arrays(path, OWN_NAMES)
    return assemble_dataset(
        path.stem,
        str(path),
        raw_parts(content, path),
        classes=classes,
        class_names=[str(name) for name in content.get("class_names", ())],
        test_share=test_share,
        kind=kind,
        normalize=normalize,
        task=task,
    )


def find_own(name: str, folder: Path, exists: Callable[[Path], bool]) -> Path:
    """A file or folder of the user: in the data directory, or else as it is named.

    Parameters
    ----------
    name : its path.
    folder : the data directory.
    exists : `is_file` or `is_folder` of `files`.
    """
    path = next((path for path in (folder / name, Path(name)) if exists(path)), None)
    if path is None:
        hint = f"Put it into {folder}, name the data directory with FEDLOOM_DATA or --data-dir, or give a full path."
        raise DataMissing(f"no {'folder' if exists is is_folder else 'file'} {name}", hint)
    return path


def raw_parts(content: Mapping[str, Array], path: Path) -> list[RawExamples]:
    """The training and the test set of a file, or all its examples, under the first names that it has completely.

    Parameters
    ----------
    content : its arrays by name.
    path : the file, for errors.
    """
    for names, groups in zip(ARRAY_NAMES, GROUP_NAMES, strict=True):
        if all(name in content for name in names):
            x, y, x_test, y_test = (content[name] for name in names)
            of_train, of_test = (content.get(name) for name in groups)
            return [RawExamples(x, y, of_train), RawExamples(x_test, y_test, of_test)]
    if "x" in content and "y" in content:
        return [RawExamples(content["x"], content["y"], content.get("groups"))]
    raise _lacks_arrays(path, ARRAY_NAMES)


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
    content = load_arrays(path, {name for names in array_names for name in names})
    for names in array_names:
        if all(name in content for name in names):
            return Arrays(str(path), *(content[name] for name in names))
    raise _lacks_arrays(path, array_names)


def _lacks_arrays(path: Path, array_names: tuple[ArrayNames, ...]) -> DataBroken:
    expected = " or ".join(", ".join(names) for names in array_names)
    return DataBroken(f"{path} lacks the arrays of a data set", f"Save it with numpy.savez and the names {expected}.")


def find_npz(name: str, folder: Path, array_names: tuple[ArrayNames, ...] = ARRAY_NAMES) -> Arrays | None:
    """Read NAME/NAME.npz or NAME.npz of the data directory; None if there is neither."""
    paths = (folder / name / f"{name}.npz", folder / f"{name}.npz")
    return next((read_npz(path, array_names) for path in paths if is_file(path)), None)


def load_arrays(path: Path, names: Collection[str]) -> dict[str, Array]:
    """The arrays of a file that have these names.

    Parameters
    ----------
    path : the file.
    names : the names.
    """
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
