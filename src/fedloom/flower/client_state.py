"""Client state on the device's own disk, one file per version, and the server's record of which version counts.

A version counts once the server names it in a later request. Older versions stay until a newer one is named, so that a
server that goes back a round finds the state unchanged.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..files import sync_folder, write_atomic
from ..tensors import Parcel, pack, unpack

Version = tuple[int, int]
"""(round, index of the request within the round)"""

SUFFIX = ".state"
TASK, RESIDUAL = "kept ", "left "  # prefixes of bundle names in a file
SPARE_VERSIONS = 1  # committed versions kept besides the current one


@dataclass(frozen=True)
class SavedState:
    """A device's state: `task` is None before any task has returned one; `residual` is error feedback's."""

    task: Parcel | None
    residual: Parcel


@dataclass(frozen=True)
class ClientStateFiles:
    """The state files of one device in one run."""

    folder: Path

    def write(self, version: Version, state: SavedState) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        parcel = {TASK + name: tensors for name, tensors in (state.task or {}).items()}
        parcel |= {RESIDUAL + name: tensors for name, tensors in state.residual.items()}
        data = pack(parcel)
        names = {bundle: list(tensors) for bundle, tensors in parcel.items()}
        header = {"version": version, "names": names, "has_task": state.task is not None}
        header["sha256"] = hashlib.sha256(data).hexdigest()
        write_atomic(self._path(version), json.dumps(header).encode() + b"\n" + data)
        sync_folder(self.folder)

    def read(self, version: Version) -> SavedState | None:
        """None if the file is missing or damaged."""
        try:
            line, _, data = self._path(version).read_bytes().partition(b"\n")
            header: dict[str, Any] = json.loads(line)
            is_intact = header["sha256"] == hashlib.sha256(data).hexdigest() and tuple(header["version"]) == version
        except (OSError, ValueError, KeyError, TypeError):
            return None
        if not is_intact:
            return None
        flat = unpack(data, list(header["names"]))
        parcel = {bundle: {name: flat[bundle][name] for name in names} for bundle, names in header["names"].items()}
        return SavedState(_select(parcel, TASK) if header["has_task"] else None, _select(parcel, RESIDUAL))

    def delete_before(self, version: Version) -> None:
        """Delete versions that the server can no longer ask for."""
        older = sorted(path for path in self.folder.glob(f"*{SUFFIX}") if path.name < self._path(version).name)
        for path in older[: max(0, len(older) - SPARE_VERSIONS)]:
            path.unlink(missing_ok=True)

    def _path(self, version: Version) -> Path:
        return self.folder / f"{version[0]:06d}-{version[1]:04d}{SUFFIX}"


def open_state_files(folder: Path, run: str, device: str) -> ClientStateFiles:
    """The names come from the server, so they are checked: they must not lead out of the folder."""
    for name in (run, device):
        if not re.fullmatch(r"\w[\w.-]*", name):
            raise ValueError(f"{name!r} cannot name a folder")
    return ClientStateFiles(folder / run / device)


def _select(parcel: Parcel, prefix: str) -> Parcel:
    return {bundle.removeprefix(prefix): one for bundle, one in parcel.items() if bundle.startswith(prefix)}


@dataclass
class StateVersions:
    """The version of every device's state, in two generations as in process: staged versions count from the commit."""

    is_local = False
    commits: int = 0
    _committed: dict[str, Version] = field(default_factory=dict)
    _staged: dict[str, Version | None] = field(default_factory=dict)  # None: lost

    def newest(self, device: str) -> Version | None:
        """The version to use; None: the device has no state yet."""
        return self._staged[device] if device in self._staged else self._committed.get(device)

    def last_committed(self, device: str) -> Version | None:
        """The version that must not be deleted, because the round may still be abandoned."""
        return self._committed.get(device)

    def stage(self, device: str, version: Version) -> None:
        self._staged[device] = version

    def mark_lost(self, device: str) -> None:
        self._staged[device] = None

    def commit(self) -> None:
        merged = {**self._committed, **self._staged}
        self._committed = {device: version for device, version in merged.items() if version is not None}
        self._staged.clear()
        self.commits += 1

    def rollback(self) -> None:
        self._staged.clear()

    @property
    def committed(self) -> Mapping[str, Parcel]:
        """As parcels, so that checkpoints save and compare them like client state."""
        return {device: {"memory": {"stamp": torch.tensor(version)}} for device, version in self._committed.items()}

    @committed.setter
    def committed(self, parcels: Mapping[str, Parcel]) -> None:
        self._committed = {device: _to_version(parcel) for device, parcel in parcels.items()}
        self._staged.clear()

    @property
    def versions(self) -> dict[str, int]:
        """The committed version of every device as one number."""
        return {device: round_number << 20 | index for device, (round_number, index) in self._committed.items()}


def _to_version(parcel: Parcel) -> Version:
    round_number, index = parcel["memory"]["stamp"].tolist()
    return round_number, index
