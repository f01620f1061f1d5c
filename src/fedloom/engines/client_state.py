"""What devices keep from round to round: in this process up to a budget, beyond it in files.

Two generations: what was remembered in a round counts from its commit on, so a round that is abandoned leaves no trace.
"""

import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from ..fleet import Device
from ..tensors import Parcel, combine
from .serialization import pack, unpack

BUDGET = 2 * 1024**3
LEFT_OUT = " left out"  # behind the name of a device; no device has a name with a space


class ClientStates(Protocol):
    """What devices remember, or where they do: as much of it as a run's record and its faults must know."""

    commits: int

    @property
    def committed(self) -> Mapping[str, Parcel]: ...

    @committed.setter
    def committed(self, parcels: Mapping[str, Parcel]) -> None: ...

    @property
    def stamps(self) -> dict[str, int]: ...

    def commit(self) -> None: ...

    def abandon(self) -> None: ...


class ClientStateStore:
    """`budget` is in bytes; `folder` is where files may go, by default where the system puts temporary ones.

    A device that has never remembered anything costs nothing. Forked processes must not remember.
    """

    def __init__(self, prepare: Callable[[Device], Parcel], budget: int = BUDGET, folder: Path | None = None):
        self.prepare = prepare
        self.budget = budget
        self.resident = 0  # bytes held in this process
        self._committed: dict[str, _Kept] = {}
        self._staged: dict[str, _Kept] = {}
        self._held: dict[_Kept, Parcel] = {}  # the least recently used first
        self._files = _Files(folder)
        self._stamps = count()
        self.commits = 0

    def recall(self, device: Device) -> Parcel:
        """The newest memory; a device that has none yet prepares its first, and the server has none."""
        if device.is_server:
            return {}
        kept = self._staged.get(device.name) or self._committed.get(device.name)
        return self._read(kept) if kept else self.prepare(device)

    def remember(self, device: Device, parcel: Parcel) -> None:
        self._put(self._staged, device.name, parcel)

    def left_out(self, device: Device) -> Parcel:
        """What a codec has left out of what the device sent: no task sees it, and it shares the memory's fate."""
        kept = self._staged.get(device.name + LEFT_OUT) or self._committed.get(device.name + LEFT_OUT)
        return self._read(kept) if kept else {}

    def leave_out(self, device: Device, parcel: Parcel) -> None:
        self._put(self._staged, device.name + LEFT_OUT, parcel)

    def commit(self) -> None:
        for name, kept in self._staged.items():
            self._drop(self._committed.get(name))
            self._committed[name] = kept
        self._staged.clear()
        self.commits += 1

    def abandon(self) -> None:
        for kept in self._staged.values():
            self._drop(kept)
        self._staged.clear()

    def close(self) -> None:
        """Remove all files, and with them what did not fit in memory."""
        self._files.remove()
        for kept in self._held:
            kept.file = None

    @property
    def committed(self) -> Mapping[str, Parcel]:
        """By name of the device."""
        return _Reading(self._committed, self._read)

    @committed.setter
    def committed(self, parcels: Mapping[str, Parcel]) -> None:
        before, self._committed = self._committed, {}
        for name, parcel in parcels.items():
            self._put(self._committed, name, parcel)
        for kept in before.values():
            self._drop(kept)

    @property
    def stamps(self) -> dict[str, int]:
        """A number for every memory, which no other memory has had or will have."""
        return {name: kept.stamp for name, kept in self._committed.items()}

    def _put(self, generation: "dict[str, _Kept]", name: str, parcel: Parcel) -> None:
        own = {bundle: combine(_owned, tensors) for bundle, tensors in parcel.items()}
        self._drop(generation.get(name))
        generation[name] = _Kept(
            names={bundle: tuple(tensors) for bundle, tensors in own.items()},
            size=sum(tensor.nbytes for tensors in own.values() for tensor in tensors.values()),
            stamp=next(self._stamps),
        )
        self._hold(generation[name], own)

    def _read(self, kept: "_Kept") -> Parcel:
        if kept in self._held:
            parcel = self._held.pop(kept)
            self.resident -= kept.size
        else:
            parcel = kept.load()
        self._hold(kept, parcel)
        return parcel

    def _hold(self, kept: "_Kept", parcel: Parcel) -> None:
        """As the most recently used; others make room for it, and if that is not enough, so does it."""
        self._held[kept] = parcel
        self.resident += kept.size
        while self.resident > self.budget:
            oldest, out = next(iter(self._held.items()))
            oldest.file = oldest.file or self._files.write(pack(out))
            del self._held[oldest]
            self.resident -= oldest.size

    def _drop(self, kept: "_Kept | None") -> None:
        if kept is None:
            return
        if self._held.pop(kept, None) is not None:
            self.resident -= kept.size
        if kept.file:
            kept.file.unlink(missing_ok=True)


@dataclass(eq=False, slots=True)
class _Kept:
    """One parcel, in memory or in a file. It never changes, so its file is written once and never written over."""

    names: Mapping[str, tuple[str, ...]]  # bundle -> its tensors: a file keeps neither their order nor empty bundles
    size: int
    stamp: int
    file: Path | None = None

    def load(self) -> Parcel:
        assert self.file is not None
        parcel = unpack(self.file.read_bytes(), list(self.names))
        return {bundle: {name: parcel[bundle][name] for name in names} for bundle, names in self.names.items()}


class _Reading(Mapping[str, Parcel]):
    """Parcels, each read when it is looked at."""

    def __init__(self, generation: Mapping[str, _Kept], read: Callable[[_Kept], Parcel]):
        self._generation, self._read = generation, read

    def __getitem__(self, name: str) -> Parcel:
        return self._read(self._generation[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._generation)

    def __len__(self) -> int:
        return len(self._generation)


class _Files:
    """A temporary folder, made when it is first needed and gone when this is, at the latest with the interpreter."""

    def __init__(self, parent: Path | None):
        self._parent = parent
        self._numbers = count()
        self._folder: Path | None = None
        self._removal: Callable[[], object] = lambda: None

    def write(self, data: bytes) -> Path:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="fedloom-memory-", dir=self._parent))
            self._removal = weakref.finalize(self, _remove, self._folder, os.getpid())
        file = self._folder / f"{next(self._numbers)}.safetensors"
        file.write_bytes(data)
        return file

    def remove(self) -> None:
        self._removal()
        self._folder = None


def _remove(folder: Path, maker: int) -> None:
    if os.getpid() == maker:  # a forked process ends without taking the files of the one that made them
        shutil.rmtree(folder, ignore_errors=True)


def _owned(tensor: Tensor) -> Tensor:
    """As plain memory of its own: a view would keep alive, uncounted, all that it is a view of."""
    plain = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if plain else tensor.clone(memory_format=torch.contiguous_format)
