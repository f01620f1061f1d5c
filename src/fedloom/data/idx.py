"""MNIST and Fashion-MNIST from their official idx files, with or without gzip.

The sizes in a header are checked against the file's length before use.
"""

import gzip
import hashlib
import math
import zlib
from pathlib import Path
from typing import Annotated

import numpy as np
from annotated_types import Interval

from ..seeds import POOLED_TEST, generator
from . import adapters
from .adapters import Arrays, build_dataset
from .dataset import DataBroken, Dataset
from .preparation import PREPARATIONS
from .raw import Array

TestShare = Annotated[float, Interval(gt=0, lt=1)]
FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")

# Both sets use the same file names; the digest of the training labels tells them apart.
_OFFICIAL_LABELS = {
    "1feba77c54802fa5339a11837ea4b2866434b83314ec45192930f1df69120c13": "mnist",
    "657fbd221bfc9f4198cc14b5619cc33ec57c58dd0e47af4d99d6650759e869a7": "fashion-mnist",
}
_HINT = f"Download the file again; the official sets hold {', '.join(FILES)}."


def mnist(*, folder: Path, test_share: TestShare | None = None) -> Dataset:
    """MNIST, handwritten digits: 60,000 + 10,000 gray images of 28 x 28 in 10 classes.

    Parameters
    ----------
    test_share : pool the published training and test set, and draw this share of every class as the test set, the same
        for every seed of a run (PFLlib: 0.25); None: as published.
    """
    arrays = _split_again(_read_set("mnist", folder, ("mnist", "MNIST/raw", ".")), test_share)
    return build_dataset("mnist", arrays, 10, PREPARATIONS["heterofl_mnist"])


def fashion_mnist(*, folder: Path, test_share: TestShare | None = None) -> Dataset:
    """Fashion-MNIST, articles of clothing: 60,000 + 10,000 gray images of 28 x 28 in 10 classes.

    Parameters
    ----------
    test_share : pool the published training and test set, and draw this share of every class as the test set, the same
        for every seed of a run (PFLlib: 0.25); None: as published.
    """
    arrays = _split_again(_read_set("fashion-mnist", folder, ("fashion-mnist", "FashionMNIST/raw", ".")), test_share)
    return build_dataset("fashion-mnist", arrays, 10, PREPARATIONS["fashion"])


def read_folder(folder: Path) -> Arrays | None:
    """Read the four idx files of a folder; None if one is missing."""
    paths = [_find_file(folder, name) for name in FILES]
    if any(path is None for path in paths):
        return None
    parts = [read_idx(path, axes) for path, axes in zip(paths, (3, 1, 3, 1), strict=True) if path]
    return Arrays(str(folder), *parts)


def read_idx(path: Path, axes: int) -> Array:
    """Read one idx file of bytes as an array with this many axes."""
    content = _read_bytes(path)
    length = 4 + 4 * axes
    if len(content) < length or content[:4] != bytes((0, 0, 8, axes)):
        raise DataBroken(f"{path} is not an idx file of bytes with {axes} axes", _HINT)
    shape = np.frombuffer(content[4:length], ">u4").tolist()
    if math.prod(shape) != len(content) - length:
        raise DataBroken(f"{path} announces {shape} values but holds {len(content) - length}", _HINT)
    return np.frombuffer(content, np.uint8, offset=length).reshape(shape)


def _read_set(name: str, folder: Path, subfolders: tuple[str, ...]) -> Arrays:
    for subfolder in subfolders:
        arrays = read_folder(folder / subfolder)
        if arrays is not None:
            _check_not_swapped(name, arrays)
            return arrays
    files = f"{', '.join(FILES)} (with or without .gz) into {folder / name}"
    return adapters.download(name, adapters.missing_data_error(name, folder, files))


def _split_again(arrays: Arrays, test_share: float | None) -> Arrays:
    """Another split of all examples, by class; every part keeps the order of the files."""
    if test_share is None:
        return arrays
    images = np.concatenate([arrays.train_images, arrays.test_images])
    labels = np.concatenate([arrays.train_labels, arrays.test_labels])
    order = generator(0, POOLED_TEST).permutation(len(labels))
    is_test = np.zeros(len(labels), bool)
    for label in np.unique(labels):
        rows = order[labels[order] == label]
        is_test[rows[: round(test_share * len(rows))]] = True
    return Arrays(arrays.origin, images[~is_test], labels[~is_test], images[is_test], labels[is_test])


def _check_not_swapped(name: str, arrays: Arrays) -> None:
    actual = _OFFICIAL_LABELS.get(hashlib.sha256(arrays.train_labels.tobytes()).hexdigest(), name)
    if actual != name:
        raise DataBroken(
            f"{arrays.origin} holds {actual}, not {name}", f"Put the files of {name} into a folder {name}."
        )


def _find_file(folder: Path, name: str) -> Path | None:
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)


def _read_bytes(path: Path) -> bytes:
    if path.suffix != ".gz":
        return path.read_bytes()
    try:
        with gzip.open(path) as file:
            return file.read()
    except (gzip.BadGzipFile, EOFError, zlib.error) as problem:
        raise DataBroken(f"{path} cannot be decompressed: {problem}", _HINT) from problem
