"""Run a fleet's server: Flower's programs, the proxy, and the server app, which resumes from its last checkpoint
whenever it ends."""

import json
import logging
import os
import ssl
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from ..files import read_json_lines, write_atomic
from ..recipe.errors import RecipeError, recipe_error
from ..runs.checkpoint import FOLDER, Checkpoints
from ..runs.faults import NoQuorum
from ..runs.folder import read_manifest
from ..runs.recorder import NothingAdmitted
from .keys import Authority, is_loopback, make_key_check
from .processes import Certificates, FlowerCommandError, SuperLinkProcess, command_line, is_alive, stop_tree
from .proxy import AuthProxy, ProxyConfig, start_proxy
from .registry import PROXY_LOG, FleetRegistry

logger = logging.getLogger(__name__)

LAUNCH_FILE = "app.json"
POLL_INTERVAL = 0.5  # seconds
LAUNCH_TIMEOUT = 180.0  # seconds from Flower's promise to start the server app until it reports itself
MAX_FUTILE_STARTS = 3  # starts in a row without a new round

PROJECT = """[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "fedloom-app"
version = "1.0.0"
description = "Runs fedloom on Flower"
license = "Apache-2.0"
dependencies = []

[tool.hatch.build.targets.wheel]
packages = ["."]

[tool.flwr.app]
publisher = "fedloom"

[tool.flwr.app.components]
serverapp = "{module}:server"
clientapp = "{module}:client"

[tool.flwr.app.config]
recipe = ""
out = ""
data-dir = ""
with = ""
fleet = ""
launch = ""
"""


def write_app(folder: Path, module: str = "fedloom.deploy.apps") -> Path:
    """Write the project folder that `flwr run` takes.

    It holds no code: `module` has the apps `server` and `client`, and is installed on every node. The settings of a run
    come with its --run-config.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pyproject.toml").write_text(PROJECT.format(module=module), encoding="utf-8")
    return folder


class SupervisionError(Exception):
    """The server app ended and would end again if it were restarted."""

    def __init__(self, message: str, too_few_devices: bool = False):
        super().__init__(message)
        self.too_few_devices = too_few_devices


@dataclass
class ServerSupervisor:
    registry: FleetRegistry
    out: Path
    config: Mapping[str, str]  # of the server app: recipe, data-dir, with
    _launch: str = ""  # identifies the last start of the server app
    _run: str = ""  # Flower's run id
    _launched: float = 0.0
    _futile_starts: int = 0
    _saved_round: int = -1  # when the server app was last started
    _logged_rounds: int = 0

    def run(self) -> None:
        """Run until the experiment has finished."""
        if self.is_finished():
            logger.info("%s has already finished", self.out)
            return
        check_certificates(self.registry)
        home, log = self.registry.folder / "flower", self.registry.folder / PROXY_LOG
        if not self.out.exists():
            log.unlink(missing_ok=True)  # its rejections belong to an earlier run
        self._stop_leftover_app()
        superlink = SuperLinkProcess(home, _certificates(self.registry))
        proxy = None
        try:
            superlink.start()
            proxy = start_fleet_proxy(self.registry, superlink.port)
            logger.info("waiting for devices at %s", self.registry.server)
            self._register(superlink)
            app = write_app(home / "app")
            while not self.is_finished():
                superlink.restart_if_ended()
                self._log_rounds()
                if not self._is_app_running():
                    self._start_app(superlink, app)
                time.sleep(POLL_INTERVAL)
            self._log_rounds()
        finally:
            if proxy is not None:
                proxy.shutdown()
            superlink.stop()

    def is_finished(self) -> bool:
        with suppress(OSError, ValueError):
            return bool(read_manifest(self.out)["status"] == "finished")
        return False

    def _register(self, superlink: SuperLinkProcess) -> None:
        if not self.registry.secure:
            return
        known = {device.name: device.node for device in self.registry.devices if device.node is not None}
        keys = {device.name: device.key for device in self.registry.devices if device.key}
        self.registry = self.registry.with_nodes(superlink.register(keys, known))
        self.registry.write()

    def _is_app_running(self) -> bool:
        """True also while the server app may still be starting."""
        if not self._launch:
            return False
        report = self._read_launch()
        if report.get("launch") == self._launch:
            return is_alive(int(report["pid"]))
        return time.monotonic() - self._launched < LAUNCH_TIMEOUT

    def _read_launch(self) -> dict[str, Any]:
        """What the server app last reported about itself."""
        with suppress(OSError, ValueError):
            return dict(json.loads((self.registry.folder / LAUNCH_FILE).read_text("utf-8")))
        return {}

    def _stop_leftover_app(self) -> None:
        """Stop the server app of a supervisor that was killed: two of them must not write to one run."""
        pid = int(self._read_launch().get("pid", 0))
        if "flwr" in command_line(pid):
            stop_tree(pid)

    def _start_app(self, superlink: SuperLinkProcess, app: Path) -> None:
        """Start the server app; it resumes from the last checkpoint if there is one."""
        saved = read_saved_round(self.out)
        if self._launch:
            failure = self._read_launch().get("failure")
            if failure:
                raise SupervisionError(failure["message"], failure["kind"] == NoQuorum.__name__)
            self._futile_starts = self._futile_starts + 1 if saved == self._saved_round else 0
            logger.warning("the server app ended; resuming after round %d", saved)
        if self._futile_starts >= MAX_FUTILE_STARTS:
            log = superlink.folder / "flower-superexec.log"
            raise SupervisionError(f"it ended {MAX_FUTILE_STARTS} times without completing a round: see {log}")
        self._saved_round, self._launch = saved, uuid4().hex
        try:
            if self._run:
                with suppress(FlowerCommandError):  # a run that ended cannot be stopped
                    superlink.abandon(self._run)
            config = {**self.config, "out": str(self.out.resolve()), "fleet": str(self.registry.folder.resolve())}
            self._run = superlink.launch(app, {**config, "launch": self._launch})
            self._launched = time.monotonic()
        except FlowerCommandError as error:  # the SuperLink may just be restarting
            logger.warning("%s", error)
            self._launch = ""

    def _log_rounds(self) -> None:
        for line in list(read_json_lines(self.out / "timings.jsonl"))[self._logged_rounds :]:
            self._logged_rounds += 1
            logger.info("round %d  %.1f s", line["round"], line["seconds"])


@contextmanager
def report_launch(folder: Path, launch: str) -> Iterator[None]:
    """Report the server app's process to its supervisor, and failures that a restart would repeat."""
    report: dict[str, Any] = {"pid": os.getpid(), "launch": launch}
    write_atomic(folder / LAUNCH_FILE, json.dumps(report).encode())
    try:
        yield
    except (RecipeError, NoQuorum, NothingAdmitted) as error:
        failure = {"kind": type(error).__name__, "message": str(error)}
        write_atomic(folder / LAUNCH_FILE, json.dumps({**report, "failure": failure}).encode())
        raise


def read_saved_round(out: Path) -> int:
    checkpoint = Checkpoints(out / FOLDER).read_newest() if (out / FOLDER).exists() else None
    return checkpoint.number if checkpoint else 0


def check_certificates(registry: FleetRegistry) -> None:
    """Warn of certificates that end soon; raise if one has ended, because no device would connect."""
    for certificate in Authority(registry.folder).ends() if registry.secure else ():
        option = " --authority" if certificate.file == "ca.crt" else ""
        hint = f"fedloom deploy renew {registry.folder}{option}"
        if certificate.has_ended:
            raise recipe_error(registry.folder, "CERTIFICATE", f"the certificate {certificate}", hint)
        if certificate.ends_soon:
            logger.warning("the certificate %s, in %d days: %s", certificate, certificate.days_left, hint)


def start_fleet_proxy(registry: FleetRegistry, port: int) -> AuthProxy:
    """Start the proxy in front of the SuperLink at this port."""
    inner = outer = is_registered = None
    if registry.secure:
        authority = Authority(registry.folder)
        outer = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        outer.minimum_version = ssl.TLSVersion.TLSv1_2
        outer.load_cert_chain(authority.server_certificate, authority.server_key)
        inner = ssl.create_default_context(cafile=str(authority.certificate))
        is_registered = make_key_check(device.key for device in registry.devices if device.key)
    host = "127.0.0.1" if is_loopback(registry.host) else ""
    trust = Authority(registry.folder).certificate if registry.secure else None
    config = ProxyConfig(("127.0.0.1", port), registry.folder / PROXY_LOG, outer, inner, is_registered, trust)
    return start_proxy((host, registry.port), config)


def _certificates(registry: FleetRegistry) -> Certificates | None:
    files = Authority(registry.folder)
    return Certificates(files.certificate, files.server_certificate, files.server_key) if registry.secure else None
