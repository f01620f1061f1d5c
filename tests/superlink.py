"""A real SuperLink and SuperNodes on loopback, ended whatever happens."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedloom.engines.flower import SILENCE

BIN = Path(sys.executable).parent


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def environment(home: Path) -> dict[str, str]:
    return {
        **os.environ,
        **SILENCE,
        "FLWR_HOME": str(home),
        "OMP_NUM_THREADS": "1",
        "PATH": f"{BIN}:{os.environ['PATH']}",
    }


@contextmanager
def started(command: Sequence[str], log: Path, env: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process, ended with all that it has started."""
    with log.open("wb") as file:
        program = [str(BIN / command[0]), *command[1:]]
        process = subprocess.Popen(program, stdout=file, stderr=subprocess.STDOUT, env=dict(env))
    try:
        yield process
    finally:
        brood = descendants(process.pid)  # some are in sessions of their own
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=10)
        for one in [process.pid, *brood]:
            with suppress(ProcessLookupError):
                os.kill(one, signal.SIGKILL)
        process.wait()


def descendants(ancestor: int) -> list[int]:
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    found = [ancestor]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found[1:]


@dataclass(frozen=True)
class Fleet:
    home: Path
    env: Mapping[str, str]

    def run(self, app: Path, config: Mapping[str, Any], seconds: float) -> str:
        """`flwr run` until it is over; what it said."""
        said = " ".join(f'{key}="{value}"' for key, value in config.items())
        command = [str(BIN / "flwr"), "run", str(app), "loopback", "--stream", "--run-config", said]
        done = subprocess.run(command, env=dict(self.env), capture_output=True, text=True, timeout=seconds)
        return done.stdout + done.stderr


@contextmanager
def fleet(home: Path, nodes: Sequence[Mapping[str, Any]]) -> Iterator[Fleet]:
    home.mkdir(parents=True)
    port, env = free_port(), environment(home)
    (home / "config.toml").write_text(f'[superlink.loopback]\naddress = "127.0.0.1:{port}"\ninsecure = true\n')
    link = ["flower-superlink", "--insecure", "--port", str(port), "--disable-runtime-dependency-installation"]
    with ExitStack() as all_of_them:
        all_of_them.enter_context(started(link, home / "superlink.log", env))
        await_port(port)
        for number, config in enumerate(nodes):
            said = " ".join(f'{key}="{one}"' if isinstance(one, str) else f"{key}={one}" for key, one in config.items())
            node = ["flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{port}", "--port", str(free_port())]
            all_of_them.enter_context(started([*node, "--node-config", said], home / f"node{number}.log", env))
        yield Fleet(home, env)


def await_port(port: int, seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        with socket.socket() as one:
            if one.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.2)
    raise TimeoutError(f"nobody listens at {port}")
