"""Flower's programs: how each is started, kept running, and ended with all that it has started."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from . import SILENCE

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 20.0  # seconds before a program that has ended is started again
STEADY = 60.0  # seconds: one that ran for longer is started again at once
PATIENCE = 10.0  # seconds to end by itself when asked to
KILL_WITH_PARENT = 1  # PR_SET_PDEATHSIG


def environment(home: Path) -> dict[str, str]:
    beside = str(Path(sys.executable).parent)
    here = {"FLWR_HOME": str(home.resolve()), "OMP_NUM_THREADS": "1", "PATH": f"{beside}:{os.environ.get('PATH', '')}"}
    return {**os.environ, **SILENCE, **here}


def program(name: str) -> str:
    """Of the same installation as this one."""
    return str(Path(sys.executable).parent / name)


@dataclass
class SupervisedProcess:
    """A program that is started again whenever it ends, sooner or later."""

    command: Sequence[str]
    log: Path
    env: Mapping[str, str]
    on_end: Callable[[int], None] = lambda code: None
    process: subprocess.Popen[bytes] | None = None
    _began: float = 0.0
    _pause: float = FIRST_PAUSE
    _not_before: float = 0.0

    def tend(self) -> None:
        """Call it every now and then."""
        now = time.monotonic()
        if self.process is not None:
            code = self.process.poll()
            if code is None:
                return
            self.process = None
            self._pause = FIRST_PAUSE if now - self._began > STEADY else min(LONGEST_PAUSE, 2 * self._pause)
            self._not_before = now + self._pause
            self.on_end(code)
        if now >= self._not_before:
            self.start()

    def start(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as file:
            self.process = subprocess.Popen(
                [program(self.command[0]), *self.command[1:]],
                stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, env=dict(self.env),
                start_new_session=True, preexec_fn=_die_with_parent,
            )  # fmt: skip
        self._began = time.monotonic()

    def end(self) -> None:
        if self.process is not None:
            end_all(self.process.pid, self.process)
            self.process = None


def end_all(pid: int, process: subprocess.Popen[bytes] | None = None) -> None:
    """Ask a process to end, and after a while see to it, with all its descendants: some are in sessions of their
    own."""
    brood = descendants(pid)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until and _ends_later(pid, process):
        time.sleep(0.05)
    for one in (pid, *brood):
        with suppress(ProcessLookupError):
            os.kill(one, signal.SIGKILL)
    if process is not None:
        process.wait()


def _ends_later(pid: int, process: subprocess.Popen[bytes] | None) -> bool:
    return process.poll() is None if process is not None else alive(pid)


def alive(pid: int) -> bool:
    """And not just waiting to be noticed as dead."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def command_of(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
    return ""


def descendants(ancestor: int) -> list[int]:
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    found = [ancestor]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found[1:]


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def listens(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


def _die_with_parent() -> None:
    """Nobody is left behind when a supervisor is killed; where the system cannot promise that, it is found later."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(KILL_WITH_PARENT, signal.SIGKILL)
