"""Files that a crash leaves either as they were or as they were to be."""

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path


def write_whole(path: Path, data: bytes) -> str:
    """All of it or nothing, and on the disk when this returns; says its sha256."""
    new = path.with_name(path.name + ".new")
    with new.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    return hashlib.sha256(data).hexdigest()


def sync_folder(folder: Path) -> None:
    """Files that were renamed are on the disk only when their folder is."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_files(paths: Iterable[Path]) -> None:
    """What was appended to these is on the disk."""
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
