"""What devices keep from round to round: in this process up to a budget, beyond it in files.

Two generations: a state that is staged in a round counts from its commit on, so a failed round leaves no trace.
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

from ..fleet import Device, Reply
from ..tensors import Parcel, combine, pack, unpack

BUDGET = 2 * 1024**3
RESIDUAL = " left out"  # behind the name of a device, which has no blank; enters fingerprints, so it never changes


class ClientStates(Protocol):
    """The states of devices, or where they are: what recording and faults need to know."""

    commits: int

    @property
    def is_local(self) -> bool:
        """Whether the states are in this process; else devices keep them themselves."""

    @property
    def committed(self) -> Mapping[str, Parcel]: ...

    @committed.setter
    def committed(self, states: Mapping[str, Parcel]) -> None: ...

    @property
    def versions(self) -> dict[str, int]: ...

    def commit(self) -> None: ...

    def rollback(self) -> None: ...


class ClientStateStore:
    """The states of simulated devices. Forked processes must not write to it.

    Parameters
    ----------
    initial : the first state of a device that has none yet; such a device costs nothing.
    budget : the bytes that are held in memory; beyond it states go to files.
    folder : where those files go; None: the system's temporary folder.
    """

    is_local = True

    def __init__(self, initial: Callable[[Device], Parcel], budget: int = BUDGET, folder: Path | None = None):
        self.initial = initial
        self.budget = budget
        self.resident = 0  # bytes held in this process
        self.commits = 0
        self._committed: dict[str, _Stored] = {}
        self._staged: dict[str, _Stored] = {}
        self._held: dict[_Stored, Parcel] = {}  # the least recently used first
        self._files = _Files(folder)
        self._versions = count()

    def read(self, device: Device) -> Parcel:
        """The newest state of a device. The server has none.

        Parameters
        ----------
        device : the device.
        """
        if device.is_server:
            return {}
        stored = self._staged.get(device.name) or self._committed.get(device.name)
        return self._load(stored) if stored else self.initial(device)

    def residual(self, device: Device) -> Parcel:
        """What compression has left out of the device's uploads so far. No task sees it.

        Parameters
        ----------
        device : the device.
        """
        stored = self._staged.get(device.name + RESIDUAL) or self._committed.get(device.name + RESIDUAL)
        return self._load(stored) if stored else {}

    def stage(self, reply: Reply) -> None:
        """Take over what the device of an admitted reply keeps; it counts from the next commit on.

        Parameters
        ----------
        reply : the reply.
        """
        if reply.state is not None:
            self._put(self._staged, reply.device.name, reply.state)
        if reply.residual is not None:
            self._put(self._staged, reply.device.name + RESIDUAL, reply.residual)

    def commit(self) -> None:
        """Keep what was staged since the last commit."""
        for name, stored in self._staged.items():
            self._drop(self._committed.get(name))
            self._committed[name] = stored
        self._staged.clear()
        self.commits += 1

    def rollback(self) -> None:
        """Forget what was staged since the last commit."""
        for stored in self._staged.values():
            self._drop(stored)
        self._staged.clear()

    def close(self) -> None:
        """Remove all files, and with them what did not fit in memory."""
        self._files.remove()
        for stored in self._held:
            stored.file = None

    @property
    def committed(self) -> Mapping[str, Parcel]:
        """By name of the device."""
        return _Reading(self._committed, self._load)

    @committed.setter
    def committed(self, states: Mapping[str, Parcel]) -> None:
        before, self._committed = self._committed, {}
        for name, parcel in states.items():
            self._put(self._committed, name, parcel)
        for stored in before.values():
            self._drop(stored)

    @property
    def versions(self) -> dict[str, int]:
        """A number for every state, which no other state has had or will have."""
        return {name: stored.version for name, stored in self._committed.items()}

    def _put(self, generation: "dict[str, _Stored]", name: str, parcel: Parcel) -> None:
        own = {bundle: combine(_owned, tensors) for bundle, tensors in parcel.items()}
        self._drop(generation.get(name))
        generation[name] = _Stored(
            names={bundle: tuple(tensors) for bundle, tensors in own.items()},
            size=sum(tensor.nbytes for tensors in own.values() for tensor in tensors.values()),
            version=next(self._versions),
        )
        self._hold(generation[name], own)

    def _load(self, stored: "_Stored") -> Parcel:
        if stored in self._held:
            parcel = self._held.pop(stored)
            self.resident -= stored.size
        else:
            parcel = stored.load()
        self._hold(stored, parcel)
        return parcel

    def _hold(self, stored: "_Stored", parcel: Parcel) -> None:
        """As the most recently used. Others are written to files to make room; if that is not enough, so is it."""
        self._held[stored] = parcel
        self.resident += stored.size
        while self.resident > self.budget:
            oldest, evicted = next(iter(self._held.items()))
            oldest.file = oldest.file or self._files.write(pack(evicted))
            del self._held[oldest]
            self.resident -= oldest.size

    def _drop(self, stored: "_Stored | None") -> None:
        if stored is None:
            return
        if self._held.pop(stored, None) is not None:
            self.resident -= stored.size
        if stored.file:
            stored.file.unlink(missing_ok=True)


@dataclass(eq=False, slots=True)
class _Stored:
    """One parcel, in memory or in a file. It never changes, so its file is written once."""

    names: Mapping[str, tuple[str, ...]]  # bundle -> its tensors: a file keeps neither their order nor empty bundles
    size: int
    version: int
    file: Path | None = None

    def load(self) -> Parcel:
        assert self.file is not None
        parcel = unpack(self.file.read_bytes(), list(self.names))
        return {bundle: {name: parcel[bundle][name] for name in names} for bundle, names in self.names.items()}


class _Reading(Mapping[str, Parcel]):
    """Parcels, each read when it is looked at."""

    def __init__(self, generation: Mapping[str, _Stored], read: Callable[[_Stored], Parcel]):
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
    """With memory of its own: a view would keep alive, uncounted, all that it is a view of."""
    plain = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if plain else tensor.clone(memory_format=torch.contiguous_format)
