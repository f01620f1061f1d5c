"""CIFAR-10 and CIFAR-100 from their official binary files, unpacked or in the official archive, or from an .npz.

A record is one label byte (CIFAR-100: coarse, then fine) and a red, a green and a blue plane of 32 x 32 bytes.
"""

import tarfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from . import adapters
from .adapters import Array, Arrays, as_dataset
from .dataset import DataBroken, DataMissing, Dataset
from .npz import SPELLINGS, read_npz
from .preparation import PREPARATIONS

_PLANES = 3 * 32 * 32


@dataclass(frozen=True)
class Layout:
    """Where the files of one set lie and which byte of a record is the label."""

    name: str
    folder: str
    archive: str
    train: tuple[str, ...]
    test: str
    label_bytes: int
    label_byte: int


_TEN = Layout(
    "cifar10",
    "cifar-10-batches-bin",
    "cifar-10-binary.tar.gz",
    tuple(f"data_batch_{number}.bin" for number in range(1, 6)),
    "test_batch.bin",
    label_bytes=1,
    label_byte=0,
)


def cifar10(*, folder: Path) -> Dataset:
    """Small photographs: 50,000 + 10,000 colour images of 32 x 32 in 10 classes."""
    arrays = _binary(_TEN, folder) or _npz("cifar10", folder, SPELLINGS)
    arrays = arrays or adapters.fetch("cifar10", _missing(_TEN, folder))
    return as_dataset("cifar10", arrays, 10, PREPARATIONS["heterofl_cifar10"])


def cifar100(*, folder: Path, labels: Literal["fine", "coarse"] = "fine") -> Dataset:
    """Small photographs: 50,000 + 10,000 colour images of 32 x 32 in 100 fine classes or 20 coarse ones."""
    if labels not in ("fine", "coarse"):
        raise ValueError(f'labels must be "fine" (100 classes) or "coarse" (20), not {labels!r}')
    fine = labels == "fine"
    layout = Layout("cifar100", "cifar-100-binary", "cifar-100-binary.tar.gz", ("train.bin",), "test.bin", 2, int(fine))
    coarse = (("train_images", "train_coarse_labels", "test_images", "test_coarse_labels"),)
    arrays = _binary(layout, folder) or _npz("cifar100", folder, SPELLINGS if fine else coarse)
    arrays = arrays or adapters.fetch("cifar100", _missing(layout, folder), (f"{labels}_label",))
    return as_dataset("cifar100", arrays, 100 if fine else 20, PREPARATIONS["cifar100"])


def _binary(layout: Layout, folder: Path) -> Arrays | None:
    places = (folder / layout.folder, folder / layout.name, folder / layout.name / layout.folder, folder)
    for place in places:
        if all((place / file).is_file() for file in (*layout.train, layout.test)):
            contents = {file: (place / file).read_bytes() for file in (*layout.train, layout.test)}
            return _arrays(layout, contents, str(place))
    for place in places:
        if (place / layout.archive).is_file():
            return _arrays(layout, _unpacked(layout, place / layout.archive), str(place / layout.archive))
    return None


def _npz(name: str, folder: Path, spellings: tuple[tuple[str, str, str, str], ...]) -> Arrays | None:
    paths = (folder / name / f"{name}.npz", folder / f"{name}.npz")
    return next((read_npz(path, spellings) for path in paths if path.is_file()), None)


def _missing(layout: Layout, folder: Path) -> DataMissing:
    files = (
        f"{', '.join((*layout.train, layout.test))} into {folder / layout.folder}, or {layout.archive} into {folder}"
    )
    return adapters.missing(layout.name, folder, files)


def _unpacked(layout: Layout, path: Path) -> dict[str, bytes]:
    """The wanted files of the archive, read in memory: nothing is written where the archive says."""
    contents: dict[str, bytes] = {}
    try:
        with tarfile.open(path, "r:gz") as archive:
            for member in archive:
                file = archive.extractfile(member) if Path(member.name).name in (*layout.train, layout.test) else None
                if file is not None:
                    contents[Path(member.name).name] = file.read()
    except (tarfile.TarError, EOFError, OSError, zlib.error) as problem:
        raise DataBroken(f"{path} cannot be unpacked: {problem}", "Download the archive again.") from problem
    absent = [file for file in (*layout.train, layout.test) if file not in contents]
    if absent:
        raise DataBroken(f"{path} lacks {', '.join(absent)}", "Take the archive with the binary version.")
    return contents


def _arrays(layout: Layout, contents: Mapping[str, bytes], origin: str) -> Arrays:
    parts = [_records(layout, contents[file], f"{origin}: {file}") for file in (*layout.train, layout.test)]
    train_images, train_labels = (np.concatenate(column) for column in zip(*parts[:-1], strict=True))
    return Arrays(origin, train_images, train_labels, *parts[-1])


def _records(layout: Layout, content: bytes, origin: str) -> tuple[Array, Array]:
    length = layout.label_bytes + _PLANES
    if not content or len(content) % length:
        hint = "Download it again; the binary version is needed, not the one for Python or Matlab."
        raise DataBroken(f"{origin} has {len(content)} bytes, not a number of records of {length}", hint)
    records = np.frombuffer(content, np.uint8).reshape(-1, length)
    return records[:, layout.label_bytes :].reshape(-1, 3, 32, 32), records[:, layout.label_byte]
