"""Checkpoints that survive a crash at any moment.

A checkpoint is a file of the tensors that changed and a manifest that says where all others are. It becomes valid when
LATEST names it; until then nothing of earlier checkpoints is touched.
"""

import contextlib
import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import safetensors
from safetensors.torch import load, save
from torch import Tensor

from ..files import sync_folder, write_atomic
from ..tensors import Parcel, Tensors

logger = logging.getLogger(__name__)

FOLDER, LATEST = "checkpoints", "LATEST"
KEPT = 3  # newest checkpoints; the best one is kept too
FILES = 8  # that the tensors of one checkpoint may be spread over before all are written again
COST = 0.05  # share of a run's time that checkpoints may take

Item = tuple[str, str]
"""(owner, bundle); the owner is "" for the server, else the name of a device."""


class CorruptCheckpoint(Exception):  # noqa: N818 - named for what is wrong
    """A checkpoint file is missing, damaged or changed."""


@dataclass(frozen=True)
class Checkpoint:
    """A run after a round. `about` is everything else it needs, as JSON. A device whose state has the version that it
    had in the last checkpoint has not changed since."""

    number: int
    server: Parcel
    client_states: Mapping[str, Parcel]  # by device
    about: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, int] = field(default_factory=dict)


@dataclass
class Checkpoints:
    """The checkpoints of one run. Tensors that did not change since the last one are not written again."""

    folder: Path
    _files: dict[Item, str] = field(default_factory=dict)  # the file of every item
    _digests: dict[str, str] = field(default_factory=dict)
    _server: Parcel = field(default_factory=dict)
    _versions: Mapping[str, int] = field(default_factory=dict)

    def save(self, checkpoint: Checkpoint, score: float | None = None) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        name = f"{checkpoint.number:06d}.safetensors"
        # a checkpoint that is saved again, with another recipe, replaces its own file
        known = {item: file for item, file in self._find_unchanged(checkpoint).items() if file != name}
        if len(set(known.values())) >= FILES:
            known = {}
        new = _collect_new(checkpoint, known)
        files = {**known, **dict.fromkeys(new, name)}
        digests = {**self._digests, name: write_atomic(self.folder / name, _pack(new))}
        content = {
            "round": checkpoint.number,
            "owners": ["", *checkpoint.client_states],
            "items": [[*item, file] for item, file in files.items()],
            "files": {file: digests[file] for file in sorted({name, *files.values()})},
            "about": dict(checkpoint.about),
            "score": score,
        }
        manifest = self.folder / f"{checkpoint.number:06d}.json"
        write_atomic(manifest, json.dumps({**content, "sha256": _digest(content)}).encode())
        sync_folder(self.folder)
        write_atomic(self.folder / LATEST, f"{manifest.name}\n".encode())
        sync_folder(self.folder)
        self._files, self._digests = files, digests
        self._server, self._versions = checkpoint.server, dict(checkpoint.versions)
        self._prune()

    def _find_unchanged(self, checkpoint: Checkpoint) -> dict[Item, str]:
        devices = {name for name, version in checkpoint.versions.items() if self._versions.get(name) == version}
        bundles = {name for name, one in checkpoint.server.items() if _is_same(one, self._server.get(name, {}))}
        return {
            (owner, bundle): file
            for (owner, bundle), file in self._files.items()
            if owner in devices or (owner == "" and bundle in bundles)
        }

    def read_newest(self) -> Checkpoint | None:
        """The last valid checkpoint; those that are skipped are logged. None without any."""
        for number in self._newest_first():
            try:
                return self.read(number)
            except CorruptCheckpoint as error:
                logger.warning("checkpoint of round %d cannot be used: %s", number, error)
        return None

    def read(self, number: int) -> Checkpoint:
        manifest = self._read_manifest(number)
        stored: dict[tuple[str, str, str], Tensors] = {}
        for file, digest in manifest["files"].items():
            data = (self.folder / file).read_bytes() if (self.folder / file).is_file() else b""
            if hashlib.sha256(data).hexdigest() != digest:
                raise CorruptCheckpoint(f"{file} is missing or damaged")
            stored |= {(*item, file): tensors for item, tensors in _unpack(data).items()}
        parcels: dict[str, dict[str, Tensors]] = {owner: {} for owner in manifest["owners"]}
        for owner, bundle, file in manifest["items"]:
            parcels[owner][bundle] = stored[owner, bundle, file]
        return Checkpoint(manifest["round"], parcels.pop(""), parcels, manifest["about"])

    def numbers(self) -> list[int]:
        """The rounds with a checkpoint, valid or not."""
        return sorted(int(path.stem) for path in self.folder.glob("*.json") if path.stem.isdigit())

    def delete_after(self, number: int) -> None:
        """Delete all checkpoints after this round."""
        for later in [other for other in self.numbers() if other > number]:
            (self.folder / f"{later:06d}.json").unlink()
        self._prune()

    def _newest_first(self) -> list[int]:
        """What LATEST names, then all earlier ones: only LATEST guarantees that a checkpoint is complete."""
        numbers = self.numbers()[::-1]
        with contextlib.suppress(OSError, ValueError):
            named = int((self.folder / LATEST).read_text(encoding="utf-8").strip().removesuffix(".json"))
            if named in numbers:
                return [named, *(number for number in numbers if number < named)]
        return numbers

    def _read_manifest(self, number: int) -> dict[str, Any]:
        try:
            content: dict[str, Any] = json.loads((self.folder / f"{number:06d}.json").read_bytes())
            digest = content.pop("sha256")
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise CorruptCheckpoint(f"{number:06d}.json: {type(error).__name__}") from error
        if digest != _digest(content):
            raise CorruptCheckpoint(f"{number:06d}.json was changed")
        return content

    def _prune(self) -> None:
        """Delete all files but those of the newest checkpoints and of the best."""
        manifests = {}
        for number in self.numbers():
            with contextlib.suppress(CorruptCheckpoint):
                manifests[number] = self._read_manifest(number)
        newest = sorted(manifests)[-KEPT:]
        scored = [number for number, manifest in manifests.items() if manifest["score"] is not None]
        kept = {*newest, *([max(scored, key=lambda number: (manifests[number]["score"], number))] if scored else [])}
        needed = {file for number in kept for file in manifests[number]["files"]}
        keep = needed | {f"{number:06d}.json" for number in kept}
        for path in self.folder.glob("[0-9]*"):
            if path.name not in keep:
                path.unlink()


@dataclass
class CheckpointPolicy:
    """Saves a checkpoint every so many rounds or, with "auto", as often as `COST` allows."""

    checkpoints: Checkpoints
    every: int | Literal["auto"] = "auto"
    first: Callable[[], None] = lambda: None  # writes what must be on disk before the checkpoint
    started: float = field(default_factory=time.perf_counter)
    spent: float = 0.0
    last_cost: float = 0.02
    newest: Checkpoint | None = None  # maybe not saved yet
    saved: int = 0
    score: float | None = None

    def after(self, checkpoint: Checkpoint, score: float | None = None) -> None:
        self.newest, self.score = checkpoint, score
        if self._is_due(checkpoint.number):
            self.save()

    def replace(self, checkpoint: Checkpoint, score: float | None = None) -> None:
        """Save a checkpoint now, also if its round has one."""
        self.newest, self.score, self.saved = checkpoint, score, 0
        self.save()

    def _is_due(self, number: int) -> bool:
        if self.every == "auto":
            return self.spent + self.last_cost <= COST * (time.perf_counter() - self.started)
        return self.every > 0 and number % self.every == 0

    def save(self) -> None:
        """Save the newest checkpoint, unless it is saved already."""
        if self.newest is None or self.newest.number == self.saved:
            return
        started = time.perf_counter()
        self.first()
        self.checkpoints.save(self.newest, self.score)
        self.saved, self.last_cost = self.newest.number, time.perf_counter() - started
        self.spent += self.last_cost


def _is_same(tensors: Tensors, before: Tensors) -> bool:
    return tensors.keys() == before.keys() and all(before[name] is tensor for name, tensor in tensors.items())


def _collect_new(checkpoint: Checkpoint, known: Mapping[Item, str]) -> dict[Item, Tensors]:
    """Items that are not stored yet. States of other devices are not even read: that may be slow."""
    new: dict[Item, Tensors] = {("", name): one for name, one in checkpoint.server.items() if ("", name) not in known}
    stored = {owner for owner, _ in known}
    for device in checkpoint.client_states:
        if device not in stored:
            new |= {(device, bundle): tensors for bundle, tensors in checkpoint.client_states[device].items()}
    return new


def _pack(items: Mapping[Item, Tensors]) -> bytes:
    """Tensors are stored under numbers, since names are arbitrary; one that several items share is stored once."""
    numbers: dict[tuple[Any, ...], str] = {}
    flat: dict[str, Tensor] = {}
    entries = []
    for item, tensors in items.items():
        listed = {}
        for name, tensor in tensors.items():
            identity = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype) if tensor.numel() else ()
            number = numbers.get(identity) if identity else None
            if number is None:
                number = str(len(flat))
                flat[number] = tensor.detach().contiguous().clone()
                if identity:
                    numbers[identity] = number
            listed[name] = number
        entries.append([*item, listed])
    return save(flat, {"items": json.dumps(entries)})


def _unpack(data: bytes) -> dict[Item, Tensors]:
    try:
        flat = load(data)
        size = int.from_bytes(data[:8], "little")
        entries = json.loads(json.loads(data[8 : 8 + size])["__metadata__"]["items"])
        return {(owner, bundle): {n: flat[number] for n, number in listed.items()} for owner, bundle, listed in entries}
    except (safetensors.SafetensorError, ValueError, KeyError) as error:
        raise CorruptCheckpoint(f"{type(error).__name__}: {error}") from error


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
