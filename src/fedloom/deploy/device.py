"""Run a device of a real fleet: measure its hardware once, then keep its SuperNode running."""

import http.client
import json
import logging
import math
import os
import ssl
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from ..analysis.planning import probe
from ..files import write_atomic
from .processes import SupervisedProcess, find_free_port, flower_environment
from .proxy import ECHO
from .registry import DeviceBundle

logger = logging.getLogger(__name__)

MACHINE_FILE, STATE_FOLDER = "machine.json", "state"
PROBE_SIZE = 1 << 20  # bytes sent to measure the bandwidth
POLL_INTERVAL = 0.5  # seconds


@dataclass
class DeviceSupervisor:
    bundle: DeviceBundle
    settings: Mapping[str, str]  # data-dir, with, load

    def run(self) -> None:
        """Run until interrupted."""
        folder = self.bundle.folder.resolve()
        self._measure(folder)
        home = folder / "flower"
        command = [*self._supernode_command(folder), "--port", str(find_free_port())]
        command += ["--node-config", self._node_config(folder)]
        node = SupervisedProcess(command, home / "flower-supernode.log", flower_environment(home), self._on_exit)
        logger.info("%s connects to %s", self.bundle.name, self.bundle.server)
        try:
            while True:
                node.restart_if_ended()
                time.sleep(POLL_INTERVAL)
        finally:
            node.stop()

    def _measure(self, folder: Path) -> None:
        if (folder / MACHINE_FILE).exists():
            return
        measured = asdict(probe(self.bundle.name, {}))
        measured["bandwidth"] = measure_bandwidth(self.bundle)
        finite = {key: value for key, value in measured.items() if isinstance(value, float) and math.isfinite(value)}
        write_atomic(folder / MACHINE_FILE, json.dumps(finite).encode())
        logger.info("measured: %s", json.dumps(finite))

    def _supernode_command(self, folder: Path) -> list[str]:
        command = ["flower-supernode", "--superlink", self.bundle.server]
        if not self.bundle.secure:
            return [*command, "--insecure"]
        trust, key = str(folder / "ca.crt"), str(folder / "key")
        return [*command, "--root-certificates", trust, "--auth-supernode-private-key", key]

    def _node_config(self, folder: Path) -> str:
        config = {**self.settings, "folder": str(folder / STATE_FOLDER), "machine": str(folder / MACHINE_FILE)}
        pairs = [f"{key}={json.dumps(value)}" for key, value in config.items() if value]
        return " ".join([f"device={self.bundle.index}", *pairs])

    def _on_exit(self, code: int) -> None:
        logger.warning("the SuperNode ended with exit code %d; restarting it", code)


def measure_bandwidth(bundle: DeviceBundle) -> float:
    """Bytes per second to the server and back, measured by the proxy's echo; infinite if there is no echo."""
    host, _, port = bundle.server.rpartition(":")
    connection: http.client.HTTPConnection
    if bundle.secure:
        trust = ssl.create_default_context(cafile=str(bundle.folder / "ca.crt"))
        connection = http.client.HTTPSConnection(host, int(port), timeout=60, context=trust)
    else:
        connection = http.client.HTTPConnection(host, int(port), timeout=60)
    try:
        connection.request("POST", ECHO, b"")  # keeps the handshake out of the measurement
        if connection.getresponse().read() != b"":
            return math.inf
        body, start = os.urandom(PROBE_SIZE), time.monotonic()
        connection.request("POST", ECHO, body)
        is_echo = connection.getresponse().read() == body
        return 2 * PROBE_SIZE / (time.monotonic() - start) if is_echo else math.inf
    except (OSError, http.client.HTTPException):
        return math.inf
    finally:
        connection.close()
