"""MNIST and Fashion-MNIST from their official idx files, packed with gzip or not.

A header's claims are checked against what the file holds before anything is made of it.
"""

import gzip
import hashlib
import math
import zlib
from pathlib import Path

import numpy as np

from . import adapters
from .adapters import Array, Arrays, as_dataset
from .dataset import DataBroken, Dataset
from .preparation import PREPARATIONS

FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")

# Both sets use the same file names; the digest of the training labels tells them apart.
_OFFICIAL_LABELS = {
    "1feba77c54802fa5339a11837ea4b2866434b83314ec45192930f1df69120c13": "mnist",
    "657fbd221bfc9f4198cc14b5619cc33ec57c58dd0e47af4d99d6650759e869a7": "fashion-mnist",
}
_AGAIN = f"Download the file again; the official sets hold {', '.join(FILES)}."


def mnist(*, folder: Path) -> Dataset:
    """Handwritten digits: 60,000 + 10,000 grey images of 28 x 28."""
    arrays = _read_set("mnist", folder, ("mnist", "MNIST/raw", "."))
    return as_dataset("mnist", arrays, 10, PREPARATIONS["heterofl_mnist"])


def fashion_mnist(*, folder: Path) -> Dataset:
    """Articles of clothing: 60,000 + 10,000 grey images of 28 x 28."""
    arrays = _read_set("fashion-mnist", folder, ("fashion-mnist", "FashionMNIST/raw", "."))
    return as_dataset("fashion-mnist", arrays, 10, PREPARATIONS["fashion"])


def read_folder(folder: Path) -> Arrays | None:
    """The four idx files of one folder, or None if one is not there."""
    paths = [_present(folder, name) for name in FILES]
    if any(path is None for path in paths):
        return None
    parts = [read_idx(path, axes) for path, axes in zip(paths, (3, 1, 3, 1), strict=True) if path]
    return Arrays(str(folder), *parts)


def read_idx(path: Path, axes: int) -> Array:
    """The bytes of one idx file as an array with this many axes."""
    content = _unpacked(path)
    length = 4 + 4 * axes
    if len(content) < length or content[:4] != bytes((0, 0, 8, axes)):
        raise DataBroken(f"{path} is not an idx file of bytes with {axes} axes", _AGAIN)
    shape = np.frombuffer(content[4:length], ">u4").tolist()
    if math.prod(shape) != len(content) - length:
        raise DataBroken(f"{path} announces {shape} values but holds {len(content) - length}", _AGAIN)
    return np.frombuffer(content, np.uint8, offset=length).reshape(shape)


def _read_set(name: str, folder: Path, places: tuple[str, ...]) -> Arrays:
    for place in places:
        arrays = read_folder(folder / place)
        if arrays is not None:
            _refuse_namesake(name, arrays)
            return arrays
    return adapters.fetch(
        name, adapters.missing(name, folder, f"{', '.join(FILES)} (with or without .gz) into {folder / name}")
    )


def _refuse_namesake(name: str, arrays: Arrays) -> None:
    found = _OFFICIAL_LABELS.get(hashlib.sha256(arrays.train_labels.tobytes()).hexdigest(), name)
    if found != name:
        raise DataBroken(f"{arrays.origin} holds {found}, not {name}", f"Put the files of {name} into a folder {name}.")


def _present(folder: Path, name: str) -> Path | None:
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)


def _unpacked(path: Path) -> bytes:
    if path.suffix != ".gz":
        return path.read_bytes()
    try:
        with gzip.open(path) as packed:
            return packed.read()
    except (gzip.BadGzipFile, EOFError, zlib.error) as problem:
        raise DataBroken(f"{path} cannot be unpacked: {problem}", _AGAIN) from problem
