"""python -m benchmarks peers: seconds a round of fedloom, the ordinary loop and other systems, on equal work."""

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks.apart import Failed, ask
from benchmarks.output import progress, say, table
from benchmarks.peers.work import Block

WORKS = [Block("CNN e", (4, 8, 16, 32)), Block("CNN c", (16, 32, 64, 128))]
NEEDS = {"flower": ("flwr", "ray"), "pfl": ("pfl",)}

Seconds = list[list[float]]
"""Of every repeat, of every round."""


@dataclass
class Side:
    """One system on one piece of work."""

    peer: str
    module: str
    python: str = sys.executable
    status: str = "ok"
    version: str = ""
    loss: float | None = None


def sides(flower: str | None, pfl: str | None) -> list[Side]:
    found = [Side("plain", "ordinary"), Side("fedloom", "loom")]
    for peer, python in (("flower", flower), ("pfl", pfl)):
        able = has(python or sys.executable, NEEDS[peer])
        found.append(Side(peer, peer, python or sys.executable, "ok" if able else "not installed"))
    return found


def has(python: str, modules: Sequence[str]) -> bool:
    """Whether an interpreter finds all of these modules."""
    code = f"import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, {list(modules)!r})))"
    try:
        return subprocess.run([python, "-c", code], capture_output=True, cwd="/").returncode == 0
    except OSError:
        return False


def measured(work: Block, runners: list[Side], repeats: int) -> list[dict[str, Any]]:
    """All sides in turn, again and again: the machine is shared, and its speed moves."""
    seconds: dict[str, Seconds] = {side.peer: [] for side in runners}
    for repeat in range(repeats):
        for side in runners:
            if side.status == "ok":
                progress(f"{work.name}, {work.workers} at once, repeat {repeat + 1} of {repeats}: {side.peer}")
                seconds[side.peer] += run(work, side)
    return [record(work, side, seconds) for side in runners]


def run(work: Block, side: Side) -> Seconds:
    try:
        found = ask(f"benchmarks.peers.{side.module}", asdict(work), side.python)
    except Failed as why:
        if side.peer in NEEDS:
            side.status = f"failed: {why}"
            return []
        raise
    side.version, side.loss = found["version"], found["loss"]
    return [found["rounds"]]


def record(work: Block, side: Side, seconds: dict[str, Seconds]) -> dict[str, Any]:
    facts = {
        "work": work.name, "devices": work.devices, "steps": work.steps, "workers": work.workers, "peer": side.peer,
        "version": side.version, "status": side.status,
    }  # fmt: skip
    if side.status != "ok":
        return facts
    own = [later(one) for one in seconds[side.peer]]
    return {
        **facts,
        "first": round(statistics.median(one[0] for one in seconds[side.peer]), 3),
        "seconds_per_round": round(statistics.median(own), 4),
        "low": round(min(own), 4),
        "high": round(max(own), 4),
        "over_plain": ratio(own, seconds["plain"]),
        "fedloom_over": ratio([later(one) for one in seconds["fedloom"]], seconds[side.peer]),
        "loss": round(side.loss or 0.0, 4),
    }


def later(rounds: list[float]) -> float:
    """Seconds a round once it runs."""
    return statistics.median(rounds[1:])


def ratio(ours: list[float], theirs: Seconds) -> float:
    """The median over pairs of neighbouring runs."""
    return round(statistics.median(a / later(b) for a, b in zip(ours, theirs, strict=True)), 4)


def text(found: list[dict[str, Any]]) -> str:
    head = ["work", "at once", "system", "version", "first s", "round s", "low", "high", "/ plain", "fedloom /", "loss"]
    return table(head, [_row(one) for one in found], left=4) + "\n" + "\n".join(_absent(found))


def _row(one: dict[str, Any]) -> list[str]:
    names = [one["work"], str(one["workers"]), one["peer"]]
    if one["status"] != "ok":
        return [*names, one["status"].split(":")[0], *[""] * 7]
    numbers = [f"{one['first']:.2f}", *(f"{one[key]:.3f}" for key in ("seconds_per_round", "low", "high"))]
    return [*names, one["version"], *numbers, *(f"{one[key]:.3f}" for key in ("over_plain", "fedloom_over", "loss"))]


def _absent(found: list[dict[str, Any]]) -> list[str]:
    failed = {f"{one['peer']} {one['status']}" for one in found if one["status"].startswith("failed")}
    absent = {one["peer"] for one in found if one["status"] == "not installed"}
    hints = [f"{peer}: name an interpreter that has it with --{peer}-python" for peer in sorted(absent)]
    return sorted(failed) + hints


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks peers", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="tiny work, once: only whether everything runs")
    parser.add_argument("--format", choices=("text", "json"), default="text")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--workers", type=int, nargs="+", default=sorted({1, min(2, os.cpu_count() or 1)}))
    parser.add_argument("--flower-python", metavar="PATH", help="an interpreter with flwr[simulation]")
    parser.add_argument("--pfl-python", metavar="PATH", help="an interpreter with pfl and torch")
    said = parser.parse_args(arguments)
    make_blocks = [replace(work, devices=16, steps=1, rounds=2) for work in WORKS] if said.quick else WORKS
    found = []
    for work in make_blocks:
        for workers in said.workers[-1:] if said.quick else said.workers:
            runners = sides(said.flower_python, said.pfl_python)
            found += measured(replace(work, workers=workers), runners, 1 if said.quick else said.repeats)
    say(text(found), {"peers": found}, said.format)
