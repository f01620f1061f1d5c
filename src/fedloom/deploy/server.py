"""A fleet's server, looked after: Flower's programs, the gate, and the run itself, which goes on from its last
checkpoint whatever has ended."""

import json
import os
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from ..files import write_whole
from ..recipe.errors import RecipeError
from ..runs.checkpoint import FOLDER, Checkpoints
from ..runs.faults import NoQuorum
from ..runs.folder import read_manifest
from ..runs.recorder import NothingAdmitted
from .keys import Authority, is_loopback
from .pidfile import lines
from .registry import GATE_LOG, FleetRegistry

if TYPE_CHECKING:
    from ..flower.proxy import AuthProxy
    from ..flower.superlink import Certificates, SuperLinkProcess


APP = "app.json"
LOOK_EVERY = 0.5  # seconds
BEGIN_WITHIN = 180.0  # seconds from Flower's promise to run the server's half until it is there
MOST_FUTILE = 3  # times in a row that it may end without a round more


class GivenUp(Exception):  # noqa: N818 - named for what is wrong
    """The server's half has ended, and would again."""

    def __init__(self, said: str, too_few: bool = False):
        super().__init__(said)
        self.too_few = too_few  # devices


@dataclass
class Supervisor:
    book: FleetRegistry
    out: Path
    config: Mapping[str, str]  # of the server's half: recipe, data-dir, with
    say: Callable[[str], None]
    _launch: str = ""
    _run: str = ""  # with Flower
    _launched: float = 0.0
    _futile: int = 0
    _rounds: int = -1  # that were saved when the server's half was last started
    _shown: int = 0

    def play(self) -> None:
        """Until the run has finished."""
        from ..flower.apps import write_app
        from ..flower.superlink import SuperLinkProcess

        if self.finished():
            self.say(f"{self.out} has finished already")
            return
        home, log = self.book.folder / "flower", self.book.folder / GATE_LOG
        if not self.out.exists():
            log.unlink(missing_ok=True)  # who came to an earlier run is that one's to tell
        self._end_leftover()
        station = SuperLinkProcess(home, _certificates(self.book), self.say)
        gate = None
        try:
            station.start()
            gate = open_gate(self.book, station.port)
            self.say(f"devices may come to {self.book.server}")
            self._register(station)
            app = write_app(home / "app")
            while not self.finished():
                station.tend()
                self._show()
                if not self._running():
                    self._begin(station, app)
                time.sleep(LOOK_EVERY)
            self._show()
        finally:
            if gate is not None:
                gate.shutdown()
            station.end()

    def finished(self) -> bool:
        with suppress(OSError, ValueError):
            return bool(read_manifest(self.out)["status"] == "finished")
        return False

    def _register(self, station: "SuperLinkProcess") -> None:
        if not self.book.secure:
            return
        known = {one.name: one.node for one in self.book.entries if one.node is not None}
        self.book = self.book.registered(
            station.register({one.name: one.key for one in self.book.entries if one.key}, known)
        )
        self.book.write()

    def _running(self) -> bool:
        """Whether the server's half is there, or may yet come."""
        from ..flower.processes import alive

        if not self._launch:
            return False
        said = self._app()
        if said.get("launch") == self._launch:
            return alive(int(said["pid"]))
        return time.monotonic() - self._launched < BEGIN_WITHIN

    def _app(self) -> dict[str, Any]:
        """What the server's half has last told of itself."""
        with suppress(OSError, ValueError):
            return dict(json.loads((self.book.folder / APP).read_text("utf-8")))
        return {}

    def _end_leftover(self) -> None:
        """Of a supervisor that was killed: two servers' halves must not write into one run."""
        from ..flower.processes import command_of, end_all

        pid = int(self._app().get("pid", 0))
        if "flwr" in command_of(pid):
            end_all(pid)

    def _begin(self, station: "SuperLinkProcess", app: Path) -> None:
        """The server's half, from the last checkpoint if there is one."""
        from ..flower.superlink import FlowerFailed

        saved = rounds_saved(self.out)
        if self._launch:
            failed = self._app().get("failed")
            if failed:
                raise GivenUp(failed["said"], failed["kind"] == NoQuorum.__name__)
            self._futile = self._futile + 1 if saved == self._rounds else 0
            self.say(f"the server's half has ended; it goes on after round {saved}")
        if self._futile >= MOST_FUTILE:
            raise GivenUp(f"it ended {MOST_FUTILE} times without a round more: see {station.home}/flower-superexec.log")
        self._rounds, self._launch = saved, uuid4().hex
        try:
            if self._run:
                with suppress(FlowerFailed):  # what has ended cannot be stopped
                    station.abandon(self._run)
            config = {**self.config, "out": str(self.out.resolve()), "fleet": str(self.book.folder.resolve())}
            self._run = station.launch(app, {**config, "launch": self._launch})
            self._launched = time.monotonic()
        except FlowerFailed as error:  # its SuperLink may just be away
            self.say(str(error))
            self._launch = ""

    def _show(self) -> None:
        for line in list(lines(self.out / "timings.jsonl"))[self._shown :]:
            self._shown += 1
            self.say(f"round {line['round']}  {line['seconds']:.1f} s")


@contextmanager
def watched_over(folder: Path, launch: str) -> Iterator[None]:
    """The server's half, by which whoever looks after it knows it; and why it ended, if it would do so again."""
    said: dict[str, Any] = {"pid": os.getpid(), "launch": launch}
    write_whole(folder / APP, json.dumps(said).encode())
    try:
        yield
    except (RecipeError, NoQuorum, NothingAdmitted) as error:
        failed = {"kind": type(error).__name__, "said": str(error)}
        write_whole(folder / APP, json.dumps({**said, "failed": failed}).encode())
        raise


def rounds_saved(out: Path) -> int:
    point = Checkpoints(out / FOLDER).newest() if (out / FOLDER).exists() else None
    return point.number if point else 0


def open_gate(book: FleetRegistry, port: int) -> "AuthProxy":
    from ..flower.proxy import ProxyConfig, opened

    inner = outer = None
    if book.secure:
        made = Authority(book.folder)
        outer = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        outer.minimum_version = ssl.TLSVersion.TLSv1_2
        outer.load_cert_chain(made.server_certificate, made.server_key)
        inner = ssl.create_default_context(cafile=str(made.certificate))
    admits = _keys(book) if book.secure else None
    host = "127.0.0.1" if is_loopback(book.host) else ""
    return opened((host, book.port), ProxyConfig(("127.0.0.1", port), book.folder / GATE_LOG, outer, inner, admits))


def _keys(book: FleetRegistry) -> Callable[[str], bool]:
    from cryptography.hazmat.primitives import serialization as form

    def as_pem(key: str) -> str:
        public = form.load_ssh_public_key(key.encode())
        return public.public_bytes(form.Encoding.PEM, form.PublicFormat.SubjectPublicKeyInfo).decode().strip()

    known = {as_pem(one.key) for one in book.entries if one.key}
    return lambda key: key.strip() in known


def _certificates(book: FleetRegistry) -> "Certificates | None":
    from ..flower.superlink import Certificates

    made = Authority(book.folder)
    return Certificates(made.certificate, made.server_certificate, made.server_key) if book.secure else None
