"""Runs that outlive their process: how a run stood after a round, written so that a crash at any moment costs no more
than the rounds since.

A checkpoint is a file of tensors that changed and a small file that says where all others are. It counts from the
moment LATEST names it; until then nothing that counted before is touched.
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
KEPT = 3  # newest ones; and the best
FILES = 8  # of tensors, that one checkpoint may lie in before all is written anew
COST = 0.05  # of a run's time, for checkpoints

Item = tuple[str, str]
"""Whose it is ("" is the server, else a device's name), and the bundle."""


class CorruptCheckpoint(Exception):  # noqa: N818 - named for what is wrong
    """A checkpoint that is not as it was written."""


@dataclass(frozen=True)
class Checkpoint:
    """A run as it stands after a round. `about` is whatever else it needs, in JSON's words. A device whose memory has
    the stamp that it had in the last checkpoint has not changed since."""

    number: int
    server: Parcel
    client_states: Mapping[str, Parcel]  # by device
    about: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, int] = field(default_factory=dict)


@dataclass
class Checkpoints:
    """Those of one run. Knows what it has written, so that what did not change is not written again."""

    folder: Path
    _files: dict[Item, str] = field(default_factory=dict)  # where everything lies
    _digests: dict[str, str] = field(default_factory=dict)
    _server: Parcel = field(default_factory=dict)
    _stamps: Mapping[str, int] = field(default_factory=dict)

    def save(self, point: Checkpoint, score: float | None = None) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        known = self._unchanged(point)
        if len(set(known.values())) >= FILES:
            known = {}
        new = _others(point, known)
        name = f"{point.number:06d}.safetensors"
        places = {**known, **dict.fromkeys(new, name)}
        digests = {**self._digests, name: write_atomic(self.folder / name, _packed(new))}
        said = {
            "round": point.number,
            "owners": ["", *point.client_states],
            "items": [[*item, file] for item, file in places.items()],
            "files": {file: digests[file] for file in sorted({name, *places.values()})},
            "about": dict(point.about),
            "score": score,
        }
        manifest = self.folder / f"{point.number:06d}.json"
        write_atomic(manifest, json.dumps({**said, "sha256": _digest(said)}).encode())
        sync_folder(self.folder)
        write_atomic(self.folder / LATEST, f"{manifest.name}\n".encode())
        sync_folder(self.folder)
        self._files, self._digests, self._server, self._stamps = places, digests, point.server, dict(point.versions)
        self._prune()

    def _unchanged(self, point: Checkpoint) -> dict[Item, str]:
        still = {who for who, stamp in point.versions.items() if self._stamps.get(who) == stamp}
        bundles = {name for name, one in point.server.items() if _same(one, self._server.get(name, {}))}
        return {
            (who, bundle): file
            for (who, bundle), file in self._files.items()
            if who in still or (who == "" and bundle in bundles)
        }

    def read_newest(self) -> Checkpoint | None:
        """The last good one; what had to be passed over is said."""
        for number in self._in_order():
            try:
                return self.read(number)
            except CorruptCheckpoint as torn:
                logger.warning("checkpoint of round %d cannot be used: %s", number, torn)
        return None

    def read(self, number: int) -> Checkpoint:
        said = self._manifest(number)
        held: dict[tuple[str, str, str], Tensors] = {}
        for file, digest in said["files"].items():
            data = (self.folder / file).read_bytes() if (self.folder / file).is_file() else b""
            if hashlib.sha256(data).hexdigest() != digest:
                raise CorruptCheckpoint(f"{file} is missing or damaged")
            held |= {(*item, file): tensors for item, tensors in _unpacked(data).items()}
        parcels: dict[str, dict[str, Tensors]] = {owner: {} for owner in said["owners"]}
        for owner, bundle, file in said["items"]:
            parcels[owner][bundle] = held[owner, bundle, file]
        return Checkpoint(said["round"], parcels.pop(""), parcels, said["about"])

    def numbers(self) -> list[int]:
        """The rounds that have one, good or not."""
        return sorted(int(path.stem) for path in self.folder.glob("*.json") if path.stem.isdigit())

    def delete_after(self, number: int) -> None:
        """What comes later was not good, or will be made again."""
        for later in [one for one in self.numbers() if one > number]:
            (self.folder / f"{later:06d}.json").unlink()
        self._prune()

    def _in_order(self) -> list[int]:
        """What LATEST names first, then all the others: a manifest that LATEST does not know yet may be whole too, but
        one that it has known is surely so."""
        newest_first = self.numbers()[::-1]
        with contextlib.suppress(OSError, ValueError):
            named = int((self.folder / LATEST).read_text(encoding="utf-8").strip().removesuffix(".json"))
            if named in newest_first:
                return [named, *(one for one in newest_first if one < named)]
        return newest_first

    def _manifest(self, number: int) -> dict[str, Any]:
        try:
            said: dict[str, Any] = json.loads((self.folder / f"{number:06d}.json").read_bytes())
            digest = said.pop("sha256")
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise CorruptCheckpoint(f"{number:06d}.json: {type(error).__name__}") from error
        if digest != _digest(said):
            raise CorruptCheckpoint(f"{number:06d}.json was changed")
        return said

    def _prune(self) -> None:
        """Keep the newest and the best, and the files that they lie in."""
        manifests = {}
        for number in self.numbers():
            with contextlib.suppress(CorruptCheckpoint):
                manifests[number] = self._manifest(number)
        newest = sorted(manifests)[-KEPT:]
        scored = [number for number, said in manifests.items() if said["score"] is not None]
        kept = {*newest, *([max(scored, key=lambda number: (manifests[number]["score"], number))] if scored else [])}
        needed = {file for number in kept for file in manifests[number]["files"]}
        keep = needed | {f"{number:06d}.json" for number in kept}
        for path in self.folder.glob("[0-9]*"):
            if path.name not in keep:
                path.unlink()


@dataclass
class CheckpointPolicy:
    """Saves a run's rounds as they are done: every so many or, by itself, as often as its time allows."""

    checkpoints: Checkpoints
    every: int | Literal["auto"] = "auto"
    first: Callable[[], None] = lambda: None  # what must be on the disk before a checkpoint is
    began: float = field(default_factory=time.perf_counter)
    spent: float = 0.0
    last_cost: float = 0.02
    newest: Checkpoint | None = None  # that may not be saved yet
    saved: int = 0
    score: float | None = None

    def after(self, point: Checkpoint, score: float | None = None) -> None:
        self.newest, self.score = point, score
        if self._due(point.number):
            self.save()

    def _due(self, number: int) -> bool:
        if self.every == "auto":
            return self.spent + self.last_cost <= COST * (time.perf_counter() - self.began)
        return self.every > 0 and number % self.every == 0

    def save(self) -> None:
        """Whatever is not saved yet."""
        if self.newest is None or self.newest.number == self.saved:
            return
        began = time.perf_counter()
        self.first()
        self.checkpoints.save(self.newest, self.score)
        self.saved, self.last_cost = self.newest.number, time.perf_counter() - began
        self.spent += self.last_cost


def _same(tensors: Tensors, before: Tensors) -> bool:
    return tensors.keys() == before.keys() and all(before[name] is tensor for name, tensor in tensors.items())


def _others(point: Checkpoint, known: Mapping[Item, str]) -> dict[Item, Tensors]:
    """All that is not known, read only where that is so."""
    made: dict[Item, Tensors] = {("", name): one for name, one in point.server.items() if ("", name) not in known}
    safe = {who for who, _ in known}
    for who in point.client_states:
        if who not in safe:
            made |= {(who, bundle): tensors for bundle, tensors in point.client_states[who].items()}
    return made


def _packed(items: Mapping[Item, Tensors]) -> bytes:
    """Tensors under numbers, for names may be anything; one that several items share is written once."""
    numbers: dict[tuple[Any, ...], str] = {}
    flat: dict[str, Tensor] = {}
    entries = []
    for item, tensors in items.items():
        listed = {}
        for name, tensor in tensors.items():
            same = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype) if tensor.numel() else ()
            number = numbers.get(same) if same else None
            if number is None:
                number = str(len(flat))
                flat[number] = tensor.detach().contiguous().clone()
                if same:
                    numbers[same] = number
            listed[name] = number
        entries.append([*item, listed])
    return save(flat, {"items": json.dumps(entries)})


def _unpacked(data: bytes) -> dict[Item, Tensors]:
    try:
        flat = load(data)
        size = int.from_bytes(data[:8], "little")
        entries = json.loads(json.loads(data[8 : 8 + size])["__metadata__"]["items"])
        return {(who, bundle): {name: flat[one] for name, one in listed.items()} for who, bundle, listed in entries}
    except (safetensors.SafetensorError, ValueError, KeyError) as error:
        raise CorruptCheckpoint(f"{type(error).__name__}: {error}") from error


def _digest(said: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()
