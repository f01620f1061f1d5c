"""A real SuperLink and SuperNodes on loopback, which are always stopped at the end."""

import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedloom.deploy.processes import executable_path, find_free_port, flower_environment, is_listening, stop_tree


@contextmanager
def start_process(command: Sequence[str], log: Path, env: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is stopped with its descendants."""
    with log.open("wb") as file:
        words = [executable_path(command[0]), *command[1:]]
        process = subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT, env=dict(env))
    try:
        yield process
    finally:
        stop_tree(process.pid, process)


@dataclass(frozen=True)
class RunningFleet:
    home: Path
    env: Mapping[str, str]

    def run(self, app: Path, config: Mapping[str, Any], seconds: float) -> str:
        """Run `flwr run` to its end and return its output."""
        run_config = " ".join(f'{key}="{value}"' for key, value in config.items())
        command = [executable_path("flwr"), "run", str(app), "loopback", "--stream", "--run-config", run_config]
        done = subprocess.run(command, env=dict(self.env), capture_output=True, text=True, timeout=seconds)
        return done.stdout + done.stderr


@contextmanager
def fleet(home: Path, nodes: Sequence[Mapping[str, Any]]) -> Iterator[RunningFleet]:
    home.mkdir(parents=True)
    port, env = find_free_port(), flower_environment(home)
    (home / "config.toml").write_text(f'[superlink.loopback]\naddress = "127.0.0.1:{port}"\ninsecure = true\n')
    link = ["flower-superlink", "--insecure", "--port", str(port), "--disable-runtime-dependency-installation"]
    with ExitStack() as stack:
        stack.enter_context(start_process(link, home / "superlink.log", env))
        await_port(port)
        for number, config in enumerate(nodes):
            node_config = " ".join(
                f'{key}="{one}"' if isinstance(one, str) else f"{key}={one}" for key, one in config.items()
            )
            node = [
                "flower-supernode",
                "--insecure",
                "--superlink",
                f"127.0.0.1:{port}",
                "--port",
                str(find_free_port()),
            ]
            stack.enter_context(start_process([*node, "--node-config", node_config], home / f"node{number}.log", env))
        yield RunningFleet(home, env)


def await_port(port: int, seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not is_listening(port):
        assert time.monotonic() < until, f"no server at port {port}"
        time.sleep(0.2)
