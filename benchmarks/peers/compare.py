"""python -m benchmarks peers: seconds per round of fedloom, the plain loop and other systems, on the same workload."""

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks.isolated import ProcessFailed, run_module
from benchmarks.output import format_table, progress, write_output
from benchmarks.peers.workload import Workload

WORKLOADS = [Workload("CNN e", (4, 8, 16, 32)), Workload("CNN c", (16, 32, 64, 128))]
NEEDS = {"flower": ("flwr", "ray"), "pfl": ("pfl",), "fedjax": ("fedjax", "jax", "optax")}

Seconds = list[list[float]]
"""Seconds by repeat, then by round."""


@dataclass
class System:
    """One system, and how it did on one workload."""

    peer: str
    module: str
    python: str = sys.executable
    status: str = "ok"
    version: str = ""
    loss: float | None = None


def find_systems(pythons: Mapping[str, str | None]) -> list[System]:
    """The plain loop, fedloom, and every peer, by the interpreter named for it or by this one."""
    systems = [System("plain", "plain_loop"), System("fedloom", "fedloom_simulation")]
    for peer, needed in NEEDS.items():
        python = pythons.get(peer) or sys.executable
        status = "ok" if has_modules(python, needed) else "not installed"
        systems.append(System(peer, f"{peer}_simulation", python, status))
    return systems


def has_modules(python: str, modules: Sequence[str]) -> bool:
    """True if the interpreter finds all of these modules."""
    code = f"import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, {list(modules)!r})))"
    try:
        return subprocess.run([python, "-c", code], capture_output=True, cwd="/").returncode == 0
    except OSError:
        return False


def measure(workload: Workload, systems: list[System], repeats: int) -> list[dict[str, Any]]:
    """Repeat over all systems in turn: the speed of a shared machine drifts."""
    seconds: dict[str, Seconds] = {system.peer: [] for system in systems}
    for repeat in range(repeats):
        for system in systems:
            if system.status == "ok":
                progress(
                    f"{workload.name}, {workload.workers} at once, repeat {repeat + 1} of {repeats}: {system.peer}"
                )
                seconds[system.peer] += run_system(workload, system)
    return [summarize(workload, system, seconds) for system in systems]


def run_system(workload: Workload, system: System) -> Seconds:
    try:
        result = run_module(f"benchmarks.peers.{system.module}", asdict(workload), system.python)
    except ProcessFailed as error:
        if system.peer in NEEDS:
            system.status = f"failed: {error}"
            return []
        raise
    system.version, system.loss = result["version"], result["loss"]
    return [result["rounds"]]


def summarize(workload: Workload, system: System, seconds: dict[str, Seconds]) -> dict[str, Any]:
    facts = {
        "work": workload.name, "devices": workload.devices, "steps": workload.steps, "workers": workload.workers,
        "peer": system.peer, "version": system.version, "status": system.status,
    }  # fmt: skip
    if system.status != "ok":
        return facts
    times = [steady_seconds(rounds) for rounds in seconds[system.peer]]
    return {
        **facts,
        "first": round(statistics.median(rounds[0] for rounds in seconds[system.peer]), 3),
        "seconds_per_round": round(statistics.median(times), 4),
        "low": round(min(times), 4),
        "high": round(max(times), 4),
        "over_plain": ratio(times, seconds["plain"]),
        "fedloom_over": ratio([steady_seconds(rounds) for rounds in seconds["fedloom"]], seconds[system.peer]),
        "loss": round(system.loss or 0.0, 4),
    }


def steady_seconds(rounds: list[float]) -> float:
    """Seconds per round without the first."""
    return statistics.median(rounds[1:])


def ratio(ours: list[float], theirs: Seconds) -> float:
    """The median over pairs of neighboring runs."""
    return round(statistics.median(a / steady_seconds(b) for a, b in zip(ours, theirs, strict=True)), 4)


def format_rows(results: list[dict[str, Any]]) -> str:
    head = ["work", "at once", "system", "version", "first s", "round s", "low", "high", "/ plain", "fedloom /", "loss"]
    return format_table(head, [_row(one) for one in results], left=4) + "\n" + "\n".join(_hints(results))


def _row(one: dict[str, Any]) -> list[str]:
    names = [one["work"], str(one["workers"]), one["peer"]]
    if one["status"] != "ok":
        return [*names, one["status"].split(":")[0], *[""] * 7]
    numbers = [f"{one['first']:.2f}", *(f"{one[key]:.3f}" for key in ("seconds_per_round", "low", "high"))]
    return [*names, one["version"], *numbers, *(f"{one[key]:.3f}" for key in ("over_plain", "fedloom_over", "loss"))]


def _hints(results: list[dict[str, Any]]) -> list[str]:
    failed = {f"{one['peer']} {one['status']}" for one in results if one["status"].startswith("failed")}
    absent = {one["peer"] for one in results if one["status"] == "not installed"}
    hints = [f"{peer}: name an interpreter that has it with --{peer}-python" for peer in sorted(absent)]
    return sorted(failed) + hints


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks peers", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="tiny workloads, once: a smoke test")
    parser.add_argument("--format", choices=("text", "json"), default="text")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--workers", type=int, nargs="+", default=sorted({1, min(2, os.cpu_count() or 1)}))
    for peer, needed in NEEDS.items():
        modules = ", ".join([*needed, "torch"])
        parser.add_argument(f"--{peer}-python", metavar="PATH", help=f"an interpreter with {modules}")
    options = parser.parse_args(arguments)
    workloads = (
        [replace(workload, devices=16, steps=1, rounds=2) for workload in WORKLOADS] if options.quick else WORKLOADS
    )
    results = []
    for workload in workloads:
        for workers in options.workers[-1:] if options.quick else options.workers:
            systems = find_systems({peer: getattr(options, f"{peer}_python") for peer in NEEDS})
            results += measure(replace(workload, workers=workers), systems, 1 if options.quick else options.repeats)
    write_output(format_rows(results), {"peers": results}, options.format)
