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
from typing import Any

from ..analysis.planning import probe
from ..files import write_atomic
from ..flower.versions import VERSION, explain_versions, is_compatible
from ..recipe.errors import recipe_error
from .processes import LogReader, SupervisedProcess, find_free_port, flower_environment
from .proxy import ECHO, HELLO, KEY_HEADER
from .registry import KEYGEN, DeviceBundle

logger = logging.getLogger(__name__)

MACHINE_FILE, STATE_FOLDER = "machine.json", "state"
PROBE_SIZE = 1 << 20  # bytes sent to measure the bandwidth
POLL_INTERVAL = 0.5  # seconds
DAY = 86_400.0  # seconds
WARN_SECONDS = 30 * DAY  # before a certificate ends
HELLO_INTERVAL = DAY  # between two looks at the server's version and authority
WITHDRAWN = "Ignoring message "
"""What a SuperNode logs if a run ends while it receives a message of it. It executes the message all the same and keeps
the reply, which it then sends in place of the next one: from then on every reply is late by one message."""


@dataclass
class DeviceSupervisor:
    bundle: DeviceBundle
    settings: Mapping[str, str]  # data-dir, with, load

    def run(self) -> None:
        """Run until interrupted."""
        folder = self.bundle.folder.resolve()
        check_server(self.bundle)
        self._measure(folder)
        home = folder / "flower"
        command = [*self._supernode_command(folder), "--port", str(find_free_port())]
        command += ["--node-config", self._node_config(folder)]
        node = SupervisedProcess(command, home / "flower-supernode.log", flower_environment(home), self._on_exit)
        log = LogReader(node.log)
        logger.info("%s connects to %s", self.bundle.name, self.bundle.server)
        next_hello = time.monotonic() + HELLO_INTERVAL
        try:
            while True:
                if time.monotonic() >= next_hello:
                    next_hello += HELLO_INTERVAL
                    if check_server(self.bundle):
                        node.stop()  # the next start trusts the renewed authority
                if any(WITHDRAWN in line for line in log.new_lines()):
                    logger.info("a run ended while its message arrived; restarting the SuperNode")
                    node.stop()
                node.restart_if_ended()
                time.sleep(POLL_INTERVAL)
        finally:
            node.stop()

    def _measure(self, folder: Path) -> None:
        """Measure what is not known yet: the server may not have answered when bandwidth was to be measured."""
        path = folder / MACHINE_FILE
        known: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.exists() else {}
        if "bandwidth" in known:
            return
        measured = {**(known or asdict(probe(self.bundle.name, {}))), "bandwidth": measure_bandwidth(self.bundle)}
        finite = {key: value for key, value in measured.items() if isinstance(value, float) and math.isfinite(value)}
        if finite != known:
            write_atomic(path, json.dumps(finite).encode())
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
    connection = _connect(bundle)
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


def check_server(bundle: DeviceBundle) -> bool:
    """Compare versions with the server, and look at key and certificates; True if the authority's was renewed.

    Raises
    ------
    RecipeError
        If the device's key cannot be read, the authority's certificate has ended, or the server has another version.
    """
    if bundle.secure:
        _check_authority(bundle)
        _proof(bundle)
    answer = _say_hello(bundle)
    theirs = answer.get("fedloom")
    if theirs is None:
        if bundle.fedloom and not is_compatible(bundle.fedloom):
            explained = explain_versions(bundle.fedloom, is_server=False)
            logger.warning("the server does not answer; when %s was enrolled: %s", bundle.name, explained)
        return False
    if not is_compatible(theirs):
        message, _, hint = explain_versions(theirs, is_server=False).partition("; ")
        raise recipe_error(bundle.folder, "VERSION", message, hint)
    if theirs != VERSION:
        logger.info("%s", explain_versions(theirs, is_server=False))
    return _adopt_authority(bundle, str(answer.get("authority", "")))


def _check_authority(bundle: DeviceBundle) -> None:
    from .keys import CertificateEnd, read_end

    certificate = CertificateEnd("ca.crt", read_end(bundle.folder / "ca.crt"))
    renewed = f"copy devices/{bundle.name}/ca.crt from the fleet's folder, after fedloom deploy renew FLEET --authority"
    if certificate.has_ended:
        raise recipe_error(bundle.folder, "CERTIFICATE", f"the certificate {certificate}", renewed)
    if certificate.ends_soon:
        message = "the certificate %s, in %d days; a renewed one is fetched from the server, or %s"
        logger.warning(message, certificate, certificate.days_left, renewed)


def _adopt_authority(bundle: DeviceBundle, pem: str) -> bool:
    """Save a renewed certificate of the authority, which must have the key of the one that is trusted already."""
    path = bundle.folder / "ca.crt"
    if not bundle.secure or not pem or pem.encode() == path.read_bytes():
        return False
    from .keys import is_renewed

    if not is_renewed(path.read_bytes(), pem.encode()):
        return False
    write_atomic(path, pem.encode())
    logger.info("the fleet's authority has a new certificate, which %s now trusts", bundle.name)
    return True


def _say_hello(bundle: DeviceBundle) -> dict[str, Any]:
    """The server's version and authority; nothing if it cannot be reached or has no such answer."""
    connection = _connect(bundle)
    try:
        body = json.dumps({"name": bundle.name, "fedloom": VERSION})
        connection.request("POST", HELLO, body, _proof(bundle))
        _warn_of_server_certificate(connection)
        response = connection.getresponse()
        return dict(json.loads(response.read())) if response.status == http.HTTPStatus.OK else {}
    except (OSError, http.client.HTTPException, ValueError, TypeError) as error:
        logger.info("%s does not answer yet: %s", bundle.server, error)
        return {}
    finally:
        connection.close()


def _proof(bundle: DeviceBundle) -> dict[str, str]:
    if not bundle.secure:
        return {}
    from .keys import public_key_header

    path = bundle.folder / "key"
    try:
        return {KEY_HEADER: public_key_header(path)}
    except OSError as error:
        hint = f"copy the private key that belongs to the public key of {bundle.name}'s enrollment to {path}"
        raise recipe_error(bundle.folder, "KEY", f"the device's private key is missing: {error}", hint) from error
    except (ValueError, TypeError) as error:
        message = f"{path} is not a private key in OpenSSH's format without a passphrase"
        raise recipe_error(bundle.folder, "KEY", message, f"create one with: {KEYGEN}") from error


def _warn_of_server_certificate(connection: http.client.HTTPConnection) -> None:
    if not isinstance(connection.sock, ssl.SSLSocket):
        return
    ends = (connection.sock.getpeercert() or {}).get("notAfter")
    left = ssl.cert_time_to_seconds(str(ends)) - time.time()
    if left < WARN_SECONDS:
        logger.warning(
            "the server's certificate ends in %d days: fedloom deploy renew FLEET at the server", left // DAY
        )


def _connect(bundle: DeviceBundle) -> http.client.HTTPConnection:
    host, _, port = bundle.server.rpartition(":")
    if not bundle.secure:
        return http.client.HTTPConnection(host, int(port), timeout=60)
    trust = ssl.create_default_context(cafile=str(bundle.folder / "ca.crt"))
    return http.client.HTTPSConnection(host, int(port), timeout=60, context=trust)
