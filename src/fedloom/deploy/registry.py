"""A fleet's folder at the server: which devices there are, by which keys they are known, and how much each may carry.

`devices/NAME` is what a device gets: copied there, it is all that `fedloom deploy device` needs.
"""

import json
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..files import sync_folder, write_whole
from ..recipe.errors import RecipeError, RecipeIssue

FILE, BUNDLE = "fleet.json", "device.json"
GATE_LOG = "gate.jsonl"


@dataclass(frozen=True)
class Entry:
    name: str
    cap: str | None  # the largest tier that its key may carry; None: whatever fits
    key: str  # the public half, as ssh writes it; "": it has none, or none any more
    node: int | None = None  # by which Flower knows the key, once it is registered


@dataclass(frozen=True)
class FleetRegistry:
    folder: Path
    server: str  # host:port, as devices reach it
    secure: bool
    entries: tuple[Entry, ...] = ()

    @property
    def host(self) -> str:
        return self.server.rpartition(":")[0]

    @property
    def port(self) -> int:
        return int(self.server.rpartition(":")[2])

    def number_of(self, node: int) -> int | None:
        """The place of a node's device in the fleet, by its key."""
        return next((number for number, one in enumerate(self.entries) if one.node == node), None)

    def registered(self, nodes: Mapping[str, int]) -> "FleetRegistry":
        """By name of the device."""
        entries = tuple(replace(one, node=nodes.get(one.name, one.node)) for one in self.entries)
        return replace(self, entries=entries)

    def write(self) -> None:
        said = {"server": self.server, "secure": self.secure, "devices": [asdict(one) for one in self.entries]}
        write_whole(self.folder / FILE, (json.dumps(said, indent=1) + "\n").encode())
        sync_folder(self.folder)


def read_book(folder: Path) -> FleetRegistry:
    try:
        said = json.loads((folder / FILE).read_text("utf-8"))
        entries = tuple(Entry(**one) for one in said["devices"])
        return FleetRegistry(folder, said["server"], said["secure"], entries)
    except OSError as error:
        hint = f"fedloom deploy keys {folder} --server HOST:PORT --device NAME"
        raise problem(folder, "FLEET_MISSING", f"there is no {FILE} in it", hint) from error
    except (ValueError, KeyError, TypeError) as error:
        raise problem(folder, "FLEET_FORMAT", f"{FILE} cannot be read: {error}") from error


@dataclass(frozen=True)
class EnrollRequest:
    """A device to come: its name, the largest tier it may carry, and its public key if it has made one itself."""

    name: str
    cap: str | None = None
    public: Path | None = None


def wish(said: str) -> EnrollRequest:
    """NAME, NAME:TIER, and either of them =FILE of a public key."""
    front, _, file = said.partition("=")
    name, _, cap = front.partition(":")
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise problem(said, "DEVICE_NAME", f"{name!r} cannot name a device", "letters, digits, . _ -")
    return EnrollRequest(name, cap or None, Path(file) if file else None)


def enroll(folder: Path, server: str | None, wishes: Iterable[EnrollRequest], secure: bool) -> FleetRegistry:
    """A new fleet, or more devices for one: nothing that is there is made anew, but for the certificate of a server
    that has moved."""
    from .keys import Authority, is_loopback

    book = read_book(folder) if (folder / FILE).exists() else FleetRegistry(folder, "", secure)
    moved = server is not None and server != book.server
    book = replace(book, server=server or book.server)
    if not re.fullmatch(r"[^\s:/]+:\d{1,5}", book.server):
        raise problem(folder, "ADDRESS", f"{book.server!r} is not HOST:PORT", "--server is where devices reach it")
    if not book.secure and not is_loopback(book.host):
        said = f"without TLS and keys anybody could take part; {book.host} is not this machine"
        raise problem(folder, "INSECURE", said, "leave --insecure out")
    folder.mkdir(parents=True, exist_ok=True)
    if book.secure and moved:
        Authority(folder).certify(book.host)
    known = {one.name for one in book.entries}
    for one in wishes:
        if one.name in known:
            raise problem(folder, "DEVICE_NAME", f"there is a device {one.name} already")
        known.add(one.name)
        book = replace(book, entries=(*book.entries, _admitted(book, one)))
    book.write()
    for number in range(len(book.entries)):
        _bundle(book, number)
    return book


def revoke(book: FleetRegistry, names: Iterable[str]) -> FleetRegistry:
    """These devices keep their places, and are let in no more."""
    for name in names:
        if name not in {one.name for one in book.entries}:
            raise problem(book.folder, "DEVICE_NAME", f"there is no device {name}")
        entries = tuple(replace(one, key="") if one.name == name else one for one in book.entries)
        book = replace(book, entries=entries)
    book.write()
    return book


def _admitted(book: FleetRegistry, one: EnrollRequest) -> Entry:
    home = book.folder / "devices" / one.name
    home.mkdir(parents=True, exist_ok=True)
    if not book.secure:
        return Entry(one.name, one.cap, "")
    if one.public is None:
        from .keys import new_device_key

        return Entry(one.name, one.cap, new_device_key(home / "key"))
    words = one.public.read_text("utf-8").split()
    if len(words) < 2 or not words[0].startswith("ecdsa-sha2-"):
        said, hint = f"{one.public} is no public key", "ssh-keygen -t ecdsa -b 384 -m PEM makes one"
        raise problem(book.folder, "KEY", said, hint)
    return Entry(one.name, one.cap, " ".join(words[:2]))


def _bundle(book: FleetRegistry, number: int) -> None:
    """What the device has to know, beside its key."""
    entry = book.entries[number]
    home = book.folder / "devices" / entry.name
    said = {"name": entry.name, "device": number, "server": book.server, "secure": book.secure}
    write_whole(home / BUNDLE, (json.dumps(said, indent=1) + "\n").encode())
    if book.secure:
        shutil.copyfile(book.folder / "ca.crt", home / "ca.crt")


@dataclass(frozen=True)
class Bundle:
    """The same, read on the device."""

    folder: Path
    name: str
    device: int
    server: str
    secure: bool


def read_bundle(folder: Path) -> Bundle:
    try:
        said: dict[str, Any] = json.loads((folder / BUNDLE).read_text("utf-8"))
        return Bundle(folder, said["name"], said["device"], said["server"], said["secure"])
    except (OSError, ValueError, KeyError) as error:
        hint = "copy devices/NAME of the fleet's folder, as fedloom deploy keys has made it"
        raise problem(folder, "BUNDLE", f"this is no device's folder: {error}", hint) from error


def problem(where: Path | str, code: str, said: str, hint: str = "") -> RecipeError:
    return RecipeError([RecipeIssue((), code, said, hint)], str(where))
