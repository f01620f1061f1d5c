"""A real fleet on loopback, started by the commands a user types, and a killer of its processes. Every process is ended
at the end."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedloom.deploy.processes import command_line, find_free_port, list_descendants, stop_tree
from fedloom.deploy.registry import FleetRegistry, enroll, parse_enroll_request

FEDLOOM = (sys.executable, "-m", "fedloom")


@dataclass
class RealFleet:
    home: Path
    devices: Sequence[str]  # as `deploy keys` takes them
    data: Sequence[Path] = ()  # a folder for each device
    port: int = field(default_factory=find_free_port)
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    _serving: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        return self.home / "fleet"

    def bundle(self, name: str) -> Path:
        return self.folder / "devices" / name

    def names(self) -> list[str]:
        return [device.partition(":")[0] for device in self.devices]

    def enroll(self) -> None:
        options = [word for device in self.devices for word in ("--device", device)]
        self.run_command("deploy", "keys", str(self.folder), "--server", f"127.0.0.1:{self.port}", *options)

    def run_command(self, *words: str) -> str:
        ended = subprocess.run([*FEDLOOM, *words], capture_output=True, text=True, timeout=300, check=False)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    def start(self, name: str, *words: str) -> None:
        with (self.home / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen([*FEDLOOM, *words], stdout=log, stderr=subprocess.STDOUT)

    def serve(self, recipe: Path, out: Path, *words: str) -> None:
        self._serving = ("deploy", "server", str(recipe), "--fleet", str(self.folder), "--out", str(out), *words)
        self.serve_again()

    def serve_again(self) -> None:
        self.start("server", *self._serving)

    def join(self, *names: str) -> None:
        for number, name in enumerate(self.names()):
            if name in names or not names:
                data = ["--data-dir", str(self.data[number])] if self.data else []
                self.start(name, "deploy", "device", str(self.bundle(name)), *data)

    def await_end(self, seconds: float, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Wait for the server to end; call `meanwhile` every half second."""
        until = time.monotonic() + seconds
        while self.processes["server"].poll() is None:
            assert time.monotonic() < until, self.logs()
            meanwhile()
            time.sleep(0.5)
        assert self.processes["server"].returncode == 0, self.logs()

    def logs(self) -> str:
        paths = [*self.home.glob("*.log"), *self.folder.glob("flower/*.log")]
        return "\n".join(f"== {path.name}\n{path.read_text('utf-8', 'replace')[-1500:]}" for path in paths)

    def end(self) -> None:
        for process in self.processes.values():
            stop_tree(process.pid, process)

    def find_processes(self, name: str, program: str) -> list[int]:
        """Processes of a program that this command has started."""
        return [pid for pid in list_descendants(self.processes[name].pid) if program in command_line(pid)]

    def find_server_app(self) -> list[int]:
        """The process of the server app."""
        with suppress(OSError, ValueError):
            return [int(json.loads((self.folder / "app.json").read_text())["pid"])]
        return []


def kill(pids: Sequence[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def enroll_fleet(folder: Path, server: str | None, *devices: str, secure: bool = True) -> FleetRegistry:
    """What `fedloom deploy keys` does."""
    return enroll(folder, server, [parse_enroll_request(device) for device in devices], secure)


@contextmanager
def real_fleet(home: Path, devices: Sequence[str], data: Sequence[Path] = ()) -> Iterator[RealFleet]:
    home.mkdir(parents=True, exist_ok=True)
    fleet = RealFleet(home, devices, data)
    fleet.enroll()
    try:
        yield fleet
    finally:
        fleet.end()


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []


def last_round(out: Path) -> int:
    return max((line["round"] for line in read_lines(out / "timings.jsonl")), default=0)


@dataclass
class Killer:
    """Kills a fleet's processes one after the other, each in a later round than the last, at a random moment."""

    fleet: RealFleet
    out: Path
    targets: list[str]  # node, link, app, or server, which is then started again
    draw: random.Random
    killed: list[str] = field(default_factory=list)
    _round: int = 0  # of the last kill
    _at: float | None = None

    def __call__(self) -> None:
        if not self.targets or last_round(self.out) <= self._round:
            return
        self._at = self._at or time.monotonic() + self.draw.uniform(0, 10)
        if time.monotonic() < self._at:
            return
        target, name = self.targets[0], self.draw.choice(self.fleet.names())
        pids = self._processes(target, name)
        if pids:
            kill(pids)
            if target == "server":
                self.fleet.processes["server"].wait()
                self.fleet.serve_again()
            self._round, self._at = last_round(self.out), None
            self.killed.append(f"{target} {name if target == 'node' else ''} after round {self._round}")
            self.targets.pop(0)

    def _processes(self, target: str, name: str) -> list[int]:
        if target == "server":
            return [self.fleet.processes["server"].pid]
        if target == "node":
            return self.fleet.find_processes(name, "flower-supernode")
        return (
            self.fleet.find_processes("server", "flower-superlink")
            if target == "link"
            else self.fleet.find_server_app()
        )
