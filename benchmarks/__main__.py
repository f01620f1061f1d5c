"""python -m benchmarks [peers|scaling|full_size|against]: fedloom's time relative to the plain loop, interleaved.

`peers` measures other systems on the same workload, `scaling` how time and memory grow, `full_size` a round of papers'
recipes, `against` the same by this code and an earlier commit's; each has --help.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any

import torch

from benchmarks import memory
from benchmarks.output import format_table, write_output
from benchmarks.profiling import profile_call
from benchmarks.scenarios import SCENARIOS, Scenario
from fedloom.engines import keep_freed_memory

OTHERS = {
    "peers": "benchmarks.peers.compare",
    "scaling": "benchmarks.scaling",
    "full_size": "benchmarks.full_size",
    "against": "benchmarks.against",
}
"""Benchmarks beside the scenarios, imported only when they are asked for."""


@contextmanager
def in_other_process(run: Callable[[], None]) -> Iterator[Callable[[], float]]:
    """Time one side in another process, so that the allocator settings of the other side do not apply to it."""
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()

    def serve() -> None:
        while theirs.recv_bytes():
            theirs.send_bytes(str(time_call(run)).encode())

    process = fork.Process(target=serve, daemon=True)
    process.start()

    def ask() -> float:
        ours.send_bytes(b"go")
        return float(ours.recv_bytes())

    try:
        yield ask
    finally:
        process.kill()
        process.join()


def measure_ratios(ours: Callable[[], None], theirs: Callable[[], None], repeats: int) -> list[float]:
    """Ratios of neighboring runs: the speed of a shared machine drifts."""
    with in_other_process(theirs) as run_theirs:
        keep_freed_memory()
        ours()  # first calls fill caches
        run_theirs()
        return [time_call(ours) / run_theirs() for _ in range(repeats)]


def time_call(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def run_in_fresh_process(make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Run it in a fresh process, so that a scenario inherits nothing from the one before."""
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()
    process = fork.Process(target=lambda: theirs.send_bytes(json.dumps(make()).encode()))
    process.start()
    theirs.close()
    result: dict[str, Any] = json.loads(ours.recv_bytes())
    process.join()
    return result


def measure(scenario: Scenario, repeats: int, workers: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    with scenario.sides(workers) as sides:
        if sides.theirs:
            numbers = [ratio / sides.work for ratio in measure_ratios(sides.ours, sides.theirs, repeats)]
        else:
            sides.ours()
            numbers = [time_call(sides.ours) * scenario.scale for _ in range(repeats)]
        return {**summarize(scenario, numbers), **memory.peak_memory()}


def summarize(scenario: Scenario, numbers: list[float]) -> dict[str, Any]:
    middle = statistics.median(numbers)
    return {
        "name": scenario.name,
        "ratio": round(middle, 4),
        "must": round(scenario.must, 4),
        "moonshot": round(scenario.moonshot, 4),
        "low": round(min(numbers), 4),
        "high": round(max(numbers), 4),
        "met": middle <= scenario.must,
    }


def profile_scenario(scenario: Scenario) -> dict[str, Any]:
    """Profile with one process: a profiler does not see workers."""
    keep_freed_memory()
    with scenario.sides(1) as sides:
        return {"name": scenario.name, **profile_call(sides.ours)}


def select_scenarios(name: str | None, results: list[dict[str, Any]]) -> list[Scenario]:
    """The scenarios to profile: by name, or those that missed their goal."""
    if name == "missed":
        missed = {scenario["name"] for scenario in results if not scenario["met"]}
        return [scenario for scenario in SCENARIOS if scenario.name in missed]
    return [scenario for scenario in SCENARIOS if scenario.name == name]


def format_scenarios(results: list[dict[str, Any]]) -> str:
    keys = ("ratio", "low", "high", "must", "moonshot")
    rows = [
        [scenario["name"], *(f"{scenario[key]:.3f}" for key in keys), f"{scenario['megabytes']:.0f}",
         f"{scenario['worker_megabytes']:.0f}", "met" if scenario["met"] else "missed"]
        for scenario in results
    ]  # fmt: skip
    return format_table(["scenario", *keys, "MB", "MB per worker", ""], rows) if rows else ""


def format_profile(scenario: dict[str, Any]) -> str:
    def lines(kind: str) -> str:
        rows = [[r["name"], str(r["calls"]), f"{r['self_ms']:.1f}", f"{r['share']:.1%}"] for r in scenario[kind]]
        return format_table([kind, "calls", "own ms", "share"], rows)

    head = f"\n{scenario['name']}, one process: {scenario['seconds']:.3f} s without the profiler"
    return f"{head}\n{lines('operations')}\n\n{lines('functions')}"


def parse_scenario(prefix: str) -> str:
    """A scenario by a prefix of its name."""
    known = ["missed", *(scenario.name for scenario in SCENARIOS)]
    names = [prefix] if prefix in known else [name for name in known if name.startswith(prefix)]
    if len(names) != 1:
        listed = ", ".join(map(repr, known))
        raise argparse.ArgumentTypeError(f"{prefix!r} matches {len(names)} of: {listed}")
    return names[0]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="three repeats instead of five")
    parser.add_argument("--format", choices=("text", "json"), default="text")
    parser.add_argument("--workers", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument(
        "--profile", metavar="SCENARIO", type=parse_scenario,
        help="profile one scenario only; 'missed': measure all, then profile those that missed their goal",
    )  # fmt: skip
    return parser.parse_args()


def run_scenarios(options: argparse.Namespace) -> None:
    repeats, only = 3 if options.quick else 5, options.profile not in (None, "missed")
    results = (
        []
        if only
        else [run_in_fresh_process(partial(measure, scenario, repeats, options.workers)) for scenario in SCENARIOS]
    )
    profiles = [
        run_in_fresh_process(partial(profile_scenario, scenario))
        for scenario in select_scenarios(options.profile, results)
    ]
    data = {"scenarios": results, **({"profile": profiles} if options.profile else {})}
    write_output(
        "\n".join([format_scenarios(results), *map(format_profile, profiles)]).lstrip("\n"), data, options.format
    )


def main() -> None:
    torch.set_num_threads(1)
    module = OTHERS.get(next(iter(sys.argv[1:]), ""))
    if module:
        import_module(module).main(sys.argv[2:])
    else:
        run_scenarios(parse_arguments())


if __name__ == "__main__":
    main()
