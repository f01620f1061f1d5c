"""A device of a real fleet, looked after: what it can do is measured once, and its SuperNode is started again whenever
it ends."""

import http.client
import json
import math
import os
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from ..analysis.hardware import probe
from ..files import write_whole
from .registry import Bundle

MACHINE, MEMORY = "machine.json", "memory"
SENT = 1 << 20  # bytes, to find out how fast the line is
LOOK_EVERY = 0.5  # seconds


@dataclass
class Node:
    bundle: Bundle
    own: Mapping[str, str]  # data-dir, with, load
    say: Callable[[str], None]

    def play(self) -> None:
        """Until it is interrupted."""
        from ..flower.processes import SupervisedProcess, environment, free_port

        folder = self.bundle.folder.resolve()
        self._measure(folder)
        home = folder / "flower"
        command = [*self._supernode(folder), "--port", str(free_port()), "--node-config", self._config(folder)]
        kept = SupervisedProcess(command, home / "flower-supernode.log", environment(home), self._ended)
        self.say(f"{self.bundle.name} goes to {self.bundle.server}")
        try:
            while True:
                kept.tend()
                time.sleep(LOOK_EVERY)
        finally:
            kept.end()

    def _measure(self, folder: Path) -> None:
        if (folder / MACHINE).exists():
            return
        found = asdict(probe(self.bundle.name, {}))
        found["bandwidth"] = bandwidth(self.bundle)
        kept = {key: one for key, one in found.items() if isinstance(one, float) and math.isfinite(one)}
        write_whole(folder / MACHINE, json.dumps(kept).encode())
        self.say(f"measured: {json.dumps(kept)}")

    def _supernode(self, folder: Path) -> list[str]:
        command = ["flower-supernode", "--superlink", self.bundle.server]
        if not self.bundle.secure:
            return [*command, "--insecure"]
        trust, key = str(folder / "ca.crt"), str(folder / "key")
        return [*command, "--root-certificates", trust, "--auth-supernode-private-key", key]

    def _config(self, folder: Path) -> str:
        said = {**self.own, "folder": str(folder / MEMORY), "machine": str(folder / MACHINE)}
        words = [f"{key}={json.dumps(value)}" for key, value in said.items() if value]
        return " ".join([f"device={self.bundle.device}", *words])

    def _ended(self, code: int) -> None:
        self.say(f"the SuperNode ended ({code}); it is started again")


def bandwidth(bundle: Bundle) -> float:
    """Bytes a second to the server and back, by the gate's echo; without end if nobody there knows it."""
    host, _, port = bundle.server.rpartition(":")
    line: http.client.HTTPConnection
    if bundle.secure:
        trust = ssl.create_default_context(cafile=str(bundle.folder / "ca.crt"))
        line = http.client.HTTPSConnection(host, int(port), timeout=60, context=trust)
    else:
        line = http.client.HTTPConnection(host, int(port), timeout=60)
    try:
        line.request("POST", "/fedloom/echo", b"")  # the handshake is not part of it
        if line.getresponse().read() != b"":
            return math.inf
        body, began = os.urandom(SENT), time.monotonic()
        line.request("POST", "/fedloom/echo", body)
        same = line.getresponse().read() == body
        return 2 * SENT / (time.monotonic() - began) if same else math.inf
    except (OSError, http.client.HTTPException):
        return math.inf
    finally:
        line.close()
