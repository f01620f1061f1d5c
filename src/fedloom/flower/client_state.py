"""What a device remembers, on its own disk: one file for each memory, stamped with run, round and question.

Written whole or not at all. A memory counts when the server names it in a later question; until it has named a newer
one, the older stay, so that a server that goes back a round finds everything as it was.

Which of its memories a device is to use: all that the server has where devices keep them themselves.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..engines.serialization import pack, unpack
from ..files import sync_folder, write_whole
from ..tensors import Parcel

Stamp = tuple[int, int]
"""The round, and the how manieth question of it."""

ENDING = ".memory"
KEPT, LEFT = "kept ", "left "  # before the names of bundles
SPARE = 1  # committed memories that are kept beside the one that counts


@dataclass(frozen=True)
class Entry:
    """What a task remembers, None before any has; and what a codec has left out so far of what was sent."""

    memory: Parcel | None
    left_out: Parcel


@dataclass(frozen=True)
class ClientStateFiles:
    """That of one device in one run."""

    folder: Path

    def write(self, stamp: Stamp, entry: Entry) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        parcel = {KEPT + name: one for name, one in (entry.memory or {}).items()}
        parcel |= {LEFT + name: one for name, one in entry.left_out.items()}
        data = pack(parcel)
        names = {bundle: list(tensors) for bundle, tensors in parcel.items()}
        about = {"stamp": stamp, "names": names, "remembers": entry.memory is not None}
        head = {**about, "sha256": hashlib.sha256(data).hexdigest()}
        write_whole(self._file(stamp), json.dumps(head).encode() + b"\n" + data)
        sync_folder(self.folder)

    def read(self, stamp: Stamp) -> Entry | None:
        """None if it is not there, or not as it was written."""
        try:
            line, _, data = self._file(stamp).read_bytes().partition(b"\n")
            head: dict[str, Any] = json.loads(line)
            whole = head["sha256"] == hashlib.sha256(data).hexdigest() and tuple(head["stamp"]) == stamp
        except (OSError, ValueError, KeyError, TypeError):
            return None
        if not whole:
            return None
        flat = unpack(data, list(head["names"]))
        parcel = {bundle: {name: flat[bundle][name] for name in names} for bundle, names in head["names"].items()}
        return Entry(_part(parcel, KEPT) if head["remembers"] else None, _part(parcel, LEFT))

    def forget_before(self, stamp: Stamp) -> None:
        """All that the server has no more use for."""
        older = sorted(path for path in self.folder.glob(f"*{ENDING}") if path.name < self._file(stamp).name)
        for path in older[: max(0, len(older) - SPARE)]:
            path.unlink(missing_ok=True)

    def _file(self, stamp: Stamp) -> Path:
        return self.folder / f"{stamp[0]:06d}-{stamp[1]:04d}{ENDING}"


def _part(parcel: Parcel, mark: str) -> Parcel:
    return {bundle.removeprefix(mark): one for bundle, one in parcel.items() if bundle.startswith(mark)}


def diary(home: Path, run: str, device: str) -> ClientStateFiles:
    """The server chooses the names, but not a place outside of this folder."""
    for name in (run, device):
        if not re.fullmatch(r"\w[\w.-]*", name):
            raise ValueError(f"{name!r} cannot name a folder")
    return ClientStateFiles(home / run / device)


@dataclass
class StateVersions:
    """Two generations, as in process: what was remembered in a round counts from its commit on."""

    commits: int = 0
    _committed: dict[str, Stamp] = field(default_factory=dict)
    _staged: dict[str, Stamp | None] = field(default_factory=dict)  # None: lost

    def newest(self, device: str) -> Stamp | None:
        """What a device is to use; None: it has nothing yet, and prepares its first memory."""
        return self._staged[device] if device in self._staged else self._committed.get(device)

    def counting(self, device: str) -> Stamp | None:
        """What it must not forget, for the round may come to nothing."""
        return self._committed.get(device)

    def remember(self, device: str, stamp: Stamp) -> None:
        self._staged[device] = stamp

    def lost(self, device: str) -> None:
        self._staged[device] = None

    def commit(self) -> None:
        kept = {**self._committed, **self._staged}
        self._committed = {device: stamp for device, stamp in kept.items() if stamp is not None}
        self._staged.clear()
        self.commits += 1

    def abandon(self) -> None:
        self._staged.clear()

    @property
    def committed(self) -> Mapping[str, Parcel]:
        """As parcels, so that they are saved and compared like memories."""
        return {device: {"memory": {"stamp": torch.tensor(stamp)}} for device, stamp in self._committed.items()}

    @committed.setter
    def committed(self, parcels: Mapping[str, Parcel]) -> None:
        self._committed = {device: _stamp(parcel) for device, parcel in parcels.items()}
        self._staged.clear()

    @property
    def stamps(self) -> dict[str, int]:
        """A number for every memory, which no other memory of its device has."""
        return {device: round_number << 20 | serial for device, (round_number, serial) in self._committed.items()}


def _stamp(parcel: Parcel) -> Stamp:
    round_number, serial = parcel["memory"]["stamp"].tolist()
    return round_number, serial
