"""Who is on duty in a folder, a fleet's server or a device, and how things stand there."""

import json
import os
import tomllib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ..files import write_whole
from ..fleet import number_name
from ..runs.folder import read_manifest
from .registry import BUNDLE, FleetRegistry, problem, read_book, read_bundle

STATE = "duty.json"


@contextmanager
def on_duty(folder: Path, **said: Any) -> Iterator[None]:
    """Noted in a folder while it lasts; refused if somebody is on duty there."""
    if duty(folder):
        raise problem(folder, "RUNNING", "it is running already", f"fedloom deploy stop {folder}")
    write_whole(folder / STATE, json.dumps({**said, "pid": os.getpid()}).encode())
    try:
        yield
    finally:
        write_whole(folder / STATE, json.dumps({**said, "pid": 0}).encode())


def duty(folder: Path) -> dict[str, Any] | None:
    """Whoever is; None: nobody, or somebody who has been killed."""
    from ..flower.processes import alive, command_of

    said = last_duty(folder)
    pid = int(said.get("pid", 0))
    return said if alive(pid) and "fedloom" in command_of(pid) else None  # or it is somebody else's number by now


def last_duty(folder: Path) -> dict[str, Any]:
    """Whoever is, or was last."""
    with suppress(OSError, ValueError):
        return dict(json.loads((folder / STATE).read_text("utf-8")))
    return {}


def how_it_is(folder: Path) -> dict[str, Any]:
    """`said`, for people, and for a fleet with a run what is known of every device."""
    found = duty(folder)
    if (folder / BUNDLE).exists():
        name = read_bundle(folder).name
        return {"running": found is not None, "said": f"{name} {'is running' if found else 'is not running'}"}
    book, last = read_book(folder), last_duty(folder).get("run")
    run = Path(last) if last else None
    told = {"running": found is not None, "run": last, "devices": _devices(book, run)}
    here = f"{book.server}: {'a server is running' if found else 'no server is running'}"
    if run is None:
        return {**told, "said": here}
    rounds = [int(one["round"]) for one in lines(run / "timings.jsonl")]
    state = read_manifest(run)["status"] if run.exists() else "waiting for devices"
    return {**told, "state": state, "said": f"{here}; {run}: {state}, after round {max(rounds, default=0)}"}


def _devices(book: FleetRegistry, run: Path | None) -> list[dict[str, Any]]:
    recipe = run / "recipe.toml" if run else None
    given = tomllib.loads(recipe.read_text("utf-8"))["fleet"].get("device_tiers", []) if recipe and recipe.exists() else []
    heard: dict[str, int] = {}
    for line in lines(run / "participation.jsonl") if run else ():
        heard |= dict.fromkeys(line["devices"], line["round"]) if line["outcome"] == "admitted" else {}
    refused = Counter(line.get("device") for line in (lines(run / "events.jsonl") if run else ()))
    found = []
    for number, entry in enumerate(book.entries):
        name, tier = number_name(number, len(book.entries)), given[number] if given else entry.cap
        found.append({"name": entry.name, "tier": tier, "heard": heard.get(name), "refused": refused[name]})
    return found


def lines(path: Path) -> Iterator[dict[str, Any]]:
    """Of a file of JSON lines that somebody may be writing."""
    with suppress(OSError):
        for line in path.read_text("utf-8").splitlines():
            with suppress(ValueError):
                yield json.loads(line)
