"""python -m benchmarks [peers|scaling|full_size]: fedloom's time over the ordinary loop's, interleaved in one run.

`peers` measures other systems on equal work, `scaling` how time and memory grow, `full_size` a round of each paper's
recipe; each has its own --help.
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
from typing import Any

import torch

from benchmarks import memory
from benchmarks.output import say, table
from benchmarks.profiling import where
from benchmarks.scenarios import SCENARIOS, Scenario
from fedloom.engines import keep_the_heap


@contextmanager
def elsewhere(run: Callable[[], None]) -> Iterator[Callable[[], float]]:
    """Time a side in a process of its own, which knows nothing of the settings of the other side's memory."""
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()

    def serve() -> None:
        while theirs.recv_bytes():
            theirs.send_bytes(str(timed(run)).encode())

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


def interleaved(ours: Callable[[], None], theirs: Callable[[], None], repeats: int) -> list[float]:
    """Ratios, each of two neighbouring runs: the machine is shared, and its speed moves."""
    with elsewhere(theirs) as ordinary:
        keep_the_heap()
        ours()  # first calls build and prove what is cached
        ordinary()
        return [timed(ours) / ordinary() for _ in range(repeats)]


def timed(run: Callable[[], None]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def apart(make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """In a fresh process, so that nothing is inherited from what another scenario left behind."""
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()
    process = fork.Process(target=lambda: theirs.send_bytes(json.dumps(make()).encode()))
    process.start()
    theirs.close()
    found: dict[str, Any] = json.loads(ours.recv_bytes())
    process.join()
    return found


def measured(one: Scenario, repeats: int, workers: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    with one.sides(workers) as sides:
        if sides.theirs:
            numbers = interleaved(sides.ours, sides.theirs, repeats)
        else:
            sides.ours()
            numbers = [timed(sides.ours) * one.scale for _ in range(repeats)]
        return {**record(one, numbers), **memory.peaks()}


def record(one: Scenario, numbers: list[float]) -> dict[str, Any]:
    middle = statistics.median(numbers)
    return {
        "name": one.name, "ratio": round(middle, 4), "must": round(one.must, 4), "moonshot": round(one.moonshot, 4),
        "low": round(min(numbers), 4), "high": round(max(numbers), 4), "met": middle <= one.must,
    }  # fmt: skip


def profiled(one: Scenario) -> dict[str, Any]:
    """In one process: a profiler does not see the workers."""
    keep_the_heap()
    with one.sides(1) as sides:
        return {"name": one.name, **where(sides.ours)}


def chosen(wanted: str | None, found: list[dict[str, Any]]) -> list[Scenario]:
    """The scenarios to look into: by name, or those that missed their goal."""
    if wanted == "missed":
        missed = {one["name"] for one in found if not one["met"]}
        return [one for one in SCENARIOS if one.name in missed]
    return [one for one in SCENARIOS if one.name == wanted]


def text(found: list[dict[str, Any]]) -> str:
    keys = ("ratio", "low", "high", "must", "moonshot")
    rows = [
        [one["name"], *(f"{one[key]:.3f}" for key in keys), f"{one['megabytes']:.0f}",
         f"{one['worker_megabytes']:.0f}", "met" if one["met"] else "missed"]
        for one in found
    ]  # fmt: skip
    return table(["scenario", *keys, "MB", "MB a worker", ""], rows) if rows else ""


def profile_text(one: dict[str, Any]) -> str:
    def lines(kind: str) -> str:
        rows = [[r["name"], str(r["calls"]), f"{r['self_ms']:.1f}", f"{r['share']:.1%}"] for r in one[kind]]
        return table([kind, "calls", "own ms", "share"], rows)

    head = f"\n{one['name']}, one process: {one['seconds']:.3f} s when nobody looks"
    return f"{head}\n{lines('operations')}\n\n{lines('functions')}"


def known(wanted: str) -> str:
    """A scenario by the beginning of its name."""
    names = [name for name in ("missed", *(one.name for one in SCENARIOS)) if name.startswith(wanted)]
    if len(names) != 1:
        every = ", ".join(repr(one.name) for one in SCENARIOS)
        raise argparse.ArgumentTypeError(f"{wanted!r} begins {len(names)} of: 'missed', {every}")
    return names[0]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="three repeats instead of five")
    parser.add_argument("--format", choices=("text", "json"), default="text")
    parser.add_argument("--workers", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument(
        "--profile", metavar="SCENARIO", type=known,
        help="where the time of one goes, and nothing else; 'missed': measure all, then look at what missed its goal",
    )  # fmt: skip
    return parser.parse_args()


def scenarios(said: argparse.Namespace) -> None:
    repeats, only = 3 if said.quick else 5, said.profile not in (None, "missed")
    found = [] if only else [apart(partial(measured, one, repeats, said.workers)) for one in SCENARIOS]
    looked = [apart(partial(profiled, one)) for one in chosen(said.profile, found)]
    data = {"scenarios": found, **({"profile": looked} if said.profile else {})}
    say("\n".join([text(found), *map(profile_text, looked)]).lstrip("\n"), data, said.format)


def main() -> None:
    torch.set_num_threads(1)
    if sys.argv[1:2] == ["peers"]:
        from benchmarks.peers import compare

        compare.main(sys.argv[2:])
    elif sys.argv[1:2] == ["scaling"]:
        from benchmarks import scaling

        scaling.main(sys.argv[2:])
    elif sys.argv[1:2] == ["full_size"]:
        from benchmarks import full_size

        full_size.main(sys.argv[2:])
    else:
        scenarios(arguments())


if __name__ == "__main__":
    main()
