"""Run Flower's programs: start, restart and stop them, and send commands to the SuperLink.

Processes are looked up in Linux's `/proc`. Flower itself is not imported here.
"""

import ctypes
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..flower import ENVIRONMENT

logger = logging.getLogger(__name__)

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 20.0  # seconds before a program that ended is started again
STABLE_AFTER = 60.0  # seconds of running after which the pause is reset
STOP_TIMEOUT = 10.0  # seconds between SIGTERM and SIGKILL
PR_SET_PDEATHSIG = 1

CONNECTION = "fleet"  # the SuperLink's name in Flower's configuration
SUPERLINK = "flower-superlink"
RESTARTS = "restarts"  # a file with one byte for every time the SuperLink ended
COMMAND_TIMEOUT = 120.0  # seconds
START_TIMEOUT = 90.0  # seconds


class FlowerCommandError(Exception):
    """One of Flower's programs or commands failed."""


@dataclass
class Certificates:
    authority: Path
    certificate: Path
    key: Path


@dataclass
class SupervisedProcess:
    """A program that is restarted whenever it ends, with a pause that doubles while it keeps ending early."""

    command: Sequence[str]
    log: Path
    env: Mapping[str, str]
    on_exit: Callable[[int], None] = lambda code: None
    process: subprocess.Popen[bytes] | None = None
    _started: float = 0.0
    _pause: float = FIRST_PAUSE
    _not_before: float = 0.0

    def restart_if_ended(self) -> None:
        """Check on the program. Call this regularly."""
        now = time.monotonic()
        if self.process is not None:
            code = self.process.poll()
            if code is None:
                return
            self.process = None
            self._pause = FIRST_PAUSE if now - self._started > STABLE_AFTER else min(LONGEST_PAUSE, 2 * self._pause)
            self._not_before = now + self._pause
            self.on_exit(code)
        if now >= self._not_before:
            self.start()

    def start(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as file:
            self.process = subprocess.Popen(
                [executable_path(self.command[0]), *self.command[1:]],
                stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, env=dict(self.env),
                start_new_session=True, preexec_fn=_die_with_parent,
            )  # fmt: skip
        self._started = time.monotonic()

    def stop(self) -> None:
        if self.process is not None:
            stop_tree(self.process.pid, self.process)
            self.process = None


@dataclass
class LogReader:
    """Reads what programs add to a log."""

    file: Path
    _offset: int = field(init=False)

    def __post_init__(self) -> None:
        self._offset = self.file.stat().st_size if self.file.exists() else 0

    def new_lines(self) -> list[str]:
        """Complete lines since the last call, or since the reader was created."""
        if not self.file.exists():
            return []
        with self.file.open("rb") as file:
            file.seek(self._offset)
            lines = [line for line in file if line.endswith(b"\n")]
        self._offset += sum(map(len, lines))
        return [line.decode("utf-8", "replace") for line in lines]


@dataclass
class SuperLinkProcess:
    """A SuperLink and the SuperExec that starts the server app.

    `folder` keeps the SuperLink's database (registered nodes and undelivered messages) across restarts.
    """

    folder: Path
    certificates: Certificates | None  # None: no TLS and no keys
    port: int = field(default_factory=lambda: find_free_port())
    processes: list[SupervisedProcess] = field(default_factory=list)

    def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        tls, env = self.certificates, flower_environment(self.folder)
        trust = f"root-certificates = {json.dumps(str(tls.authority.resolve()))}" if tls else "insecure = true"
        address = f'address = "127.0.0.1:{self.port}"'
        (self.folder / "config.toml").write_text(f"[superlink.{CONNECTION}]\n{address}\n{trust}\n", encoding="utf-8")
        for command in (self._superlink_command(), self._superexec_command()):
            log = self.folder / f"{command[0]}.log"
            self.processes.append(SupervisedProcess(command, log, env, self._on_exit(command[0])))
        self.processes[0].start()
        self._await_port()
        self.processes[1].start()

    def restart_if_ended(self) -> None:
        for process in self.processes:
            process.restart_if_ended()

    def stop(self) -> None:
        for process in reversed(self.processes):
            process.stop()

    def register(self, keys: Mapping[str, str], nodes: Mapping[str, int]) -> dict[str, int]:
        """Register public keys by device name; return node ids by device name.

        `nodes` are the known ids. They are registered again if the SuperLink's database does not have them.
        """
        known, node_ids = self.node_status().keys() if nodes else (), dict(nodes)
        (self.folder / "keys").mkdir(exist_ok=True)
        for name, key in keys.items():
            if nodes.get(name) not in known:
                file = self.folder / "keys" / f"{name}.pub"
                file.write_text(key + "\n", encoding="utf-8")
                node_ids[name] = int(self.command("supernode", "register", str(file), CONNECTION)["node-id"])
        return node_ids

    def node_status(self) -> dict[int, str]:
        """Status of all registered nodes by id: online, offline or registered."""
        nodes = self.command("supernode", "list", CONNECTION)["nodes"]
        return {int(node["node-id"]): str(node["status"]) for node in nodes}

    def launch(self, app: Path, config: Mapping[str, str]) -> str:
        """Start a run of the app; return Flower's run id."""
        run_config = " ".join(f"{key}={json.dumps(value)}" for key, value in config.items())
        return str(self.command("run", str(app), CONNECTION, "--run-config", run_config)["run-id"])

    def abandon(self, run: str) -> None:
        self.command("stop", run, CONNECTION)

    def command(self, *words: str) -> dict[str, Any]:
        """Run a `flwr` command and return its JSON output."""
        done = subprocess.run(
            [executable_path("flwr"), *words, "--format", "json"],
            env=flower_environment(self.folder), capture_output=True, text=True, timeout=COMMAND_TIMEOUT, check=False,
        )  # fmt: skip
        start = done.stdout.find("{")
        try:
            output: dict[str, Any] = json.loads(done.stdout[start:]) if start >= 0 else {}
        except ValueError:
            output = {}
        if done.returncode or not output.get("success"):
            raise FlowerCommandError(f"flwr {' '.join(words[:2])}: {(done.stdout + done.stderr).strip()[-600:]}")
        return output

    def _superlink_command(self) -> list[str]:
        tls, security = self.certificates, ["--insecure"]
        if tls:
            security = ["--ssl-ca-certfile", str(tls.authority), "--ssl-certfile", str(tls.certificate)]
            security += ["--ssl-keyfile", str(tls.key), "--enable-supernode-auth"]
        storage = ["--database", str(self.folder / "state.db"), "--isolation", "process"]
        address = ["--host", "127.0.0.1", "--port", str(self.port)]
        return [SUPERLINK, *address, *security, *storage, "--disable-runtime-dependency-installation"]

    def _superexec_command(self) -> list[str]:
        trust = ["--root-certificates", str(self.certificates.authority)] if self.certificates else ["--insecure"]
        return ["flower-superexec", "--runtime-api-address", f"127.0.0.1:{self.port}", *trust]

    def _on_exit(self, name: str) -> Callable[[int], None]:
        def on_exit(code: int) -> None:
            logger.warning("%s ended with exit code %d; restarting it", name, code)
            if name == SUPERLINK:
                with (self.folder / RESTARTS).open("ab") as file:
                    file.write(b".")

        return on_exit

    def _await_port(self) -> None:
        until = time.monotonic() + START_TIMEOUT
        while not is_listening(self.port):
            if time.monotonic() > until:
                raise FlowerCommandError(f"the SuperLink does not come up: see {self.processes[0].log}")
            time.sleep(0.2)


def count_restarts(folder: Path) -> int:
    """How often the SuperLink of this folder has ended."""
    file = folder / RESTARTS
    return file.stat().st_size if file.exists() else 0


def flower_environment(folder: Path) -> dict[str, str]:
    """Environment variables for Flower's programs, with their configuration in `folder`."""
    path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"
    settings = {"FLWR_HOME": str(folder.resolve()), "OMP_NUM_THREADS": "1", "PATH": path}
    return {**os.environ, **ENVIRONMENT, **settings}


def executable_path(name: str) -> str:
    """A program of the same Python installation as this process."""
    return str(Path(sys.executable).parent / name)


def stop_tree(pid: int, process: subprocess.Popen[bytes] | None = None) -> None:
    """Terminate a process, and kill it and all its descendants after a timeout.

    Descendants are listed by parent because some run in sessions of their own.
    """
    children = list_descendants(pid)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    until = time.monotonic() + STOP_TIMEOUT
    while time.monotonic() < until and _is_running(pid, process):
        time.sleep(0.05)
    for member in (pid, *children):
        with suppress(ProcessLookupError):
            os.kill(member, signal.SIGKILL)
    if process is not None:
        process.wait()


def _is_running(pid: int, process: subprocess.Popen[bytes] | None) -> bool:
    return process.poll() is None if process is not None else is_alive(pid)


def is_alive(pid: int) -> bool:
    """True if the process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def command_line(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
    return ""


def list_descendants(ancestor: int) -> list[int]:
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    family = [ancestor]
    for member in family:
        family += [child for child, parent in parents.items() if parent == member]
    return family[1:]


def find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _die_with_parent() -> None:
    """Leave no process behind when its supervisor is killed. Systems without prctl go without."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
