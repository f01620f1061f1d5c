"""Files: is there one, and durable writes, after which a crash leaves either the old or the new content."""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any


def is_file(path: Path) -> bool:
    """True for an existing file; also a path that no file can have, such as one that is too long, is none."""
    try:
        return path.is_file()
    except OSError:
        return False


def is_folder(path: Path) -> bool:
    """True for an existing folder; also a path that no folder can have is none."""
    try:
        return path.is_dir()
    except OSError:
        return False


def write_atomic(path: Path, data: bytes) -> str:
    """Write and sync a file via a temporary one; returns the sha256 of the data."""
    temporary = path.with_name(path.name + ".new")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    return hashlib.sha256(data).hexdigest()


def sync_folder(folder: Path) -> None:
    """Make renames in a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_files(paths: Iterable[Path]) -> None:
    """Make appended data durable."""
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())


def read_json_lines(path: Path, strict: bool = False) -> Iterator[Any]:
    """The values of a file with one JSON value per line.

    Unless `strict`, the file may be missing, and lines that are cut off or still being written are skipped.
    """
    if not (strict or path.is_file()):
        return
    with path.open(encoding="utf-8") as file:
        for line in file:
            try:
                value = json.loads(line)
            except ValueError:
                if strict:
                    raise
                continue
            yield value
