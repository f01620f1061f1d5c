"""The pidfile of a fleet's server or of a device, and the status derived from it and from the run's folder."""

import json
import os
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ..files import read_json_lines, write_atomic
from ..fleet import device_name
from ..recipe.errors import recipe_error
from ..runs.folder import read_manifest
from . import processes
from .registry import BUNDLE_FILE, FleetRegistry, read_bundle, read_fleet_registry

PIDFILE = "pidfile.json"


@contextmanager
def hold_pidfile(folder: Path, **details: Any) -> Iterator[None]:
    """Mark a folder as running with these details; raise if it already is."""
    if read_running(folder):
        raise recipe_error(folder, "RUNNING", "it is already running", f"fedloom deploy stop {folder}")
    write_atomic(folder / PIDFILE, json.dumps({**details, "pid": os.getpid()}).encode())
    try:
        yield
    finally:
        write_atomic(folder / PIDFILE, json.dumps({**details, "pid": 0}).encode())


def read_running(folder: Path) -> dict[str, Any] | None:
    """The pidfile of a process that is running; None if it ended or was killed."""
    details = read_pidfile(folder)
    pid = int(details.get("pid", 0))
    # the system may have given the id to another program
    return details if processes.is_alive(pid) and "fedloom" in processes.command_line(pid) else None


def read_pidfile(folder: Path) -> dict[str, Any]:
    """The pidfile of the last process, whether it is running or not."""
    with suppress(OSError, ValueError):
        return dict(json.loads((folder / PIDFILE).read_text("utf-8")))
    return {}


def read_status(folder: Path) -> dict[str, Any]:
    """`running` and a `summary` for people; for a fleet also its last run and the state of every device."""
    is_running = read_running(folder) is not None
    if (folder / BUNDLE_FILE).exists():
        bundle = read_bundle(folder)
        status = {"running": is_running, "certificates": _certificates(folder, bundle.secure, ("ca.crt",))}
        return {**status, "summary": f"{bundle.name} {'is running' if is_running else 'is not running'}"}
    registry, last = read_fleet_registry(folder), read_pidfile(folder).get("run")
    run = Path(last) if last else None
    status = {
        "running": is_running, "run": last, "devices": _device_status(registry, run),
        "certificates": _certificates(folder, registry.secure, ("server.crt", "ca.crt")),
    }  # fmt: skip
    summary = f"{registry.server}: {'a server is running' if is_running else 'no server is running'}"
    if run is None:
        return {**status, "summary": summary}
    rounds = [int(line["round"]) for line in read_json_lines(run / "timings.jsonl")]
    state = read_manifest(run)["status"] if run.exists() else "waiting for devices"
    return {**status, "state": state, "summary": f"{summary}; {run}: {state}, after round {max(rounds, default=0)}"}


def _certificates(folder: Path, secure: bool, names: Sequence[str]) -> list[dict[str, Any]]:
    """When certificates end, and whether that is soon."""
    if not secure:
        return []
    from .keys import CertificateEnd, read_end

    found = [CertificateEnd(name, read_end(folder / name)) for name in names if (folder / name).exists()]
    return [{**one.record(), "soon": one.ends_soon} for one in found]


def _device_status(registry: FleetRegistry, run: Path | None) -> list[dict[str, Any]]:
    recipe = run / "recipe.toml" if run else None
    text = recipe.read_text("utf-8") if recipe and recipe.exists() else ""
    tiers = tomllib.loads(text).get("fleet", {}).get("device_tiers", [])
    last_round: dict[str, int] = {}
    for line in read_json_lines(run / "participation.jsonl") if run else ():
        last_round |= dict.fromkeys(line["devices"], line["round"]) if line["outcome"] == "admitted" else {}
    refusals = Counter(line.get("device") for line in (read_json_lines(run / "events.jsonl") if run else ()))
    status = []
    for index, device in enumerate(registry.devices):
        name, tier = device_name(index, len(registry.devices)), tiers[index] if tiers else device.max_tier
        counts = {"last_round": last_round.get(name), "refusals": refusals[name]}
        status.append({"name": device.name, "tier": tier, **counts})
    return status
