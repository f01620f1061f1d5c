"""Durable file writes: after a crash a file has either its old or its new content."""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any


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
