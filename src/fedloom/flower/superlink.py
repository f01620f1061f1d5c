"""Flower's side of a server: its SuperLink, what runs the server's half of the app, and the commands to both."""

import json
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .processes import SupervisedProcess, environment, free_port, listens, program

CONNECTION = "fleet"  # as Flower's configuration names it
SUPERLINK = "flower-superlink"
BREAKS = "breaks"  # a file of as many bytes as the SuperLink has ended, for whoever has messages under way
COMMAND_WITHIN = 120.0  # seconds
UP_WITHIN = 90.0


class FlowerFailed(Exception):  # noqa: N818 - named for what is wrong
    """One of Flower's own commands did not do what it should."""


@dataclass
class Certificates:
    authority: Path
    certificate: Path
    key: Path


@dataclass
class SuperLinkProcess:
    """In a folder of its own, which keeps its database: who is registered, and messages that are on their way."""

    home: Path
    certificates: Certificates | None  # None: without TLS and keys
    say: Callable[[str], None] = lambda said: None
    port: int = field(default_factory=free_port)
    kept: list[SupervisedProcess] = field(default_factory=list)

    def start(self) -> None:
        self.home.mkdir(parents=True, exist_ok=True)
        made, env = self.certificates, environment(self.home)
        trust = f"root-certificates = {json.dumps(str(made.authority.resolve()))}" if made else "insecure = true"
        address = f'address = "127.0.0.1:{self.port}"'
        (self.home / "config.toml").write_text(f"[superlink.{CONNECTION}]\n{address}\n{trust}\n", encoding="utf-8")
        for command in (self._superlink(), self._superexec()):
            self.kept.append(SupervisedProcess(command, self.home / f"{command[0]}.log", env, self._ended(command[0])))
        self.kept[0].start()
        self._await(lambda: listens(self.port), UP_WITHIN, "the SuperLink does not come up")
        self.kept[1].start()

    def tend(self) -> None:
        for one in self.kept:
            one.tend()

    def end(self) -> None:
        for one in reversed(self.kept):
            one.end()

    def register(self, keys: Mapping[str, str], nodes: Mapping[str, int]) -> dict[str, int]:
        """Public keys by name of the device -> the nodes that Flower makes of them. Of those that have one it is asked
        whether it still knows them: its database may be a new one."""
        known, found = self.nodes().keys() if nodes else (), dict(nodes)
        (self.home / "keys").mkdir(exist_ok=True)
        for name, key in keys.items():
            if nodes.get(name) not in known:
                file = self.home / "keys" / f"{name}.pub"
                file.write_text(key + "\n", encoding="utf-8")
                found[name] = int(self.command("supernode", "register", str(file), CONNECTION)["node-id"])
        return found

    def nodes(self) -> dict[int, str]:
        """How all registered devices are: online, offline, or registered alone."""
        return {
            int(one["node-id"]): str(one["status"]) for one in self.command("supernode", "list", CONNECTION)["nodes"]
        }

    def launch(self, app: Path, config: Mapping[str, str]) -> str:
        """Begin a run of the app; its name with Flower."""
        said = " ".join(f"{key}={json.dumps(value)}" for key, value in config.items())
        return str(self.command("run", str(app), CONNECTION, "--run-config", said)["run-id"])

    def abandon(self, run: str) -> None:
        self.command("stop", run, CONNECTION)

    def command(self, *words: str) -> dict[str, Any]:
        """One of `flwr`'s, answered in JSON."""
        done = subprocess.run(
            [program("flwr"), *words, "--format", "json"],
            env=environment(self.home), capture_output=True, text=True, timeout=COMMAND_WITHIN, check=False,
        )  # fmt: skip
        begins = done.stdout.find("{")
        try:
            said: dict[str, Any] = json.loads(done.stdout[begins:]) if begins >= 0 else {}
        except ValueError:
            said = {}
        if done.returncode or not said.get("success"):
            raise FlowerFailed(f"flwr {' '.join(words[:2])}: {(done.stdout + done.stderr).strip()[-600:]}")
        return said

    def _superlink(self) -> list[str]:
        made = self.certificates
        lock = ["--insecure"]
        if made:
            lock = ["--ssl-ca-certfile", str(made.authority), "--ssl-certfile", str(made.certificate)]
            lock += ["--ssl-keyfile", str(made.key), "--enable-supernode-auth"]
        kept = ["--database", str(self.home / "state.db"), "--isolation", "process"]
        place = ["--host", "127.0.0.1", "--port", str(self.port)]
        return [SUPERLINK, *place, *lock, *kept, "--disable-runtime-dependency-installation"]

    def _superexec(self) -> list[str]:
        trust = ["--root-certificates", str(self.certificates.authority)] if self.certificates else ["--insecure"]
        return ["flower-superexec", "--runtime-api-address", f"127.0.0.1:{self.port}", *trust]

    def _ended(self, name: str) -> Callable[[int], None]:
        def told(code: int) -> None:
            self.say(f"{name} ended ({code}); it is started again")
            if name == SUPERLINK:
                with (self.home / BREAKS).open("ab") as file:
                    file.write(b".")

        return told

    def _await(self, there: Callable[[], bool], seconds: float, otherwise: str) -> None:
        until = time.monotonic() + seconds
        while not there():
            if time.monotonic() > until:
                raise FlowerFailed(f"{otherwise}: see {self.kept[0].log}")
            time.sleep(0.2)


def breaks_in(home: Path) -> int:
    """How often the SuperLink of this folder has ended."""
    file = home / BREAKS
    return file.stat().st_size if file.exists() else 0
