"""CIFAR-10 and CIFAR-100 from their official binary files, extracted or in the official archive, or from an .npz.

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
from .adapters import Arrays, build_dataset
from .dataset import DataBroken, DataMissing, Dataset
from .npz import ARRAY_NAMES, find_npz
from .preparation import PREPARATIONS
from .raw import Array

_PLANES = 3 * 32 * 32


@dataclass(frozen=True)
class CifarFiles:
    """The file names of one data set, and which byte of a record is the label."""

    name: str
    folder: str
    archive: str
    train: tuple[str, ...]
    test: str
    label_bytes: int
    label_byte: int


_CIFAR10 = CifarFiles(
    "cifar10",
    "cifar-10-batches-bin",
    "cifar-10-binary.tar.gz",
    tuple(f"data_batch_{number}.bin" for number in range(1, 6)),
    "test_batch.bin",
    label_bytes=1,
    label_byte=0,
)


def cifar10(*, folder: Path) -> Dataset:
    """CIFAR-10, small photographs: 50,000 + 10,000 color images of 32 x 32 in 10 classes."""
    arrays = _read_binary(_CIFAR10, folder) or find_npz("cifar10", folder)
    arrays = arrays or adapters.download("cifar10", _missing_error(_CIFAR10, folder))
    return build_dataset("cifar10", arrays, 10, PREPARATIONS["heterofl_cifar10"])


def cifar100(*, folder: Path, labels: Literal["fine", "coarse"] = "fine") -> Dataset:
    """CIFAR-100, small photographs: 50,000 + 10,000 color images of 32 x 32 in 100 classes.

    Parameters
    ----------
    labels : the 100 "fine" classes, or the 20 "coarse" ones that group them.
    """
    if labels not in ("fine", "coarse"):
        raise ValueError(f'labels must be "fine" (100 classes) or "coarse" (20), not {labels!r}')
    fine = labels == "fine"
    archive = "cifar-100-binary.tar.gz"
    files = CifarFiles("cifar100", "cifar-100-binary", archive, ("train.bin",), "test.bin", 2, int(fine))
    coarse = (("train_images", "train_coarse_labels", "test_images", "test_coarse_labels"),)
    arrays = _read_binary(files, folder) or find_npz("cifar100", folder, ARRAY_NAMES if fine else coarse)
    arrays = arrays or adapters.download("cifar100", _missing_error(files, folder), (f"{labels}_label",))
    return build_dataset("cifar100", arrays, 100 if fine else 20, PREPARATIONS["cifar100"])


def _read_binary(files: CifarFiles, folder: Path) -> Arrays | None:
    folders = (folder / files.folder, folder / files.name, folder / files.name / files.folder, folder)
    for path in folders:
        if all((path / file).is_file() for file in (*files.train, files.test)):
            contents = {file: (path / file).read_bytes() for file in (*files.train, files.test)}
            return _to_arrays(files, contents, str(path))
    for path in folders:
        if (path / files.archive).is_file():
            return _to_arrays(files, _read_archive(files, path / files.archive), str(path / files.archive))
    return None


def _missing_error(files: CifarFiles, folder: Path) -> DataMissing:
    names = ", ".join((*files.train, files.test))
    where = f"{names} into {folder / files.folder}, or {files.archive} into {folder}"
    return adapters.missing_data_error(files.name, folder, where)


def _read_archive(files: CifarFiles, path: Path) -> dict[str, bytes]:
    """Read the needed files of the archive into memory; nothing is extracted to disk."""
    contents: dict[str, bytes] = {}
    try:
        with tarfile.open(path, "r:gz") as archive:
            for member in archive:
                file = archive.extractfile(member) if Path(member.name).name in (*files.train, files.test) else None
                if file is not None:
                    contents[Path(member.name).name] = file.read()
    except (tarfile.TarError, EOFError, OSError, zlib.error) as problem:
        raise DataBroken(f"{path} cannot be extracted: {problem}", "Download the archive again.") from problem
    absent = [file for file in (*files.train, files.test) if file not in contents]
    if absent:
        raise DataBroken(f"{path} lacks {', '.join(absent)}", "Take the archive with the binary version.")
    return contents


def _to_arrays(files: CifarFiles, contents: Mapping[str, bytes], origin: str) -> Arrays:
    parts = [_parse_records(files, contents[file], f"{origin}: {file}") for file in (*files.train, files.test)]
    train_images, train_labels = (np.concatenate(column) for column in zip(*parts[:-1], strict=True))
    return Arrays(origin, train_images, train_labels, *parts[-1])


def _parse_records(files: CifarFiles, content: bytes, origin: str) -> tuple[Array, Array]:
    length = files.label_bytes + _PLANES
    if not content or len(content) % length:
        hint = "Download it again; the binary version is needed, not the one for Python or Matlab."
        raise DataBroken(f"{origin} has {len(content)} bytes, which is no multiple of a record's {length}", hint)
    records = np.frombuffer(content, np.uint8).reshape(-1, length)
    return records[:, files.label_bytes :].reshape(-1, 3, 32, 32), records[:, files.label_byte]
