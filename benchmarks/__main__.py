"""python -m benchmarks [--quick] [--format json]: fedloom's time over the ordinary loop's, interleaved in one run."""

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks.scenarios import TRAININGS, aggregation, bench, overhead
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


def interleaved(ours: Callable[[], None], theirs: Callable[[], None], repeats: int) -> list[float]:
    """Ratios, each of two neighbouring runs: the machine is shared, and its speed moves."""
    with elsewhere(theirs) as ordinary:
        keep_the_heap()
        ours(), ordinary()  # first calls build and prove what is cached
        return [timed(ours) / ordinary() for _ in range(repeats)]


def timed(run: Callable[[], None]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def scenarios_one_by_one(repeats: int, workers: int) -> list[dict[str, Any]]:
    """Each in a fresh process, so that none inherits what another left behind."""
    fork = multiprocessing.get_context("fork")
    found = []
    for number in range(len(TRAININGS) + 2):
        ours, theirs = fork.Pipe()
        process = fork.Process(target=lambda n=number, link=theirs: link.send_bytes(_measured(n, repeats, workers)))
        process.start()
        found.append(json.loads(ours.recv_bytes()))
        process.join()
    return found


def _measured(number: int, repeats: int, workers: int) -> bytes:
    torch.set_num_threads(1)
    return json.dumps(scenario(number, repeats, workers)).encode()


def scenario(number: int, repeats: int, workers: int) -> dict[str, Any]:
    if number < len(TRAININGS):
        one = TRAININGS[number]
        with bench(one, workers) as sides:
            return record(one.name, interleaved(sides.ours, sides.theirs, repeats), one.must, one.moonshot)
    if number == len(TRAININGS):
        return record("aggregation against index lists", interleaved(*aggregation(), repeats), 1 / 30, 1 / 80)
    return record("overhead, ms a device (not a ratio)", [overhead() for _ in range(repeats)], 5.0, 0.5)


def record(name: str, ratios: list[float], must: float, moonshot: float) -> dict[str, Any]:
    middle = statistics.median(ratios)
    return {
        "name": name, "ratio": round(middle, 4), "must": round(must, 4), "moonshot": round(moonshot, 4),
        "low": round(min(ratios), 4), "high": round(max(ratios), 4), "met": middle <= must,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="three repeats instead of five")
    parser.add_argument("--format", choices=("text", "json"), default="text")
    parser.add_argument("--workers", type=int, default=min(2, os.cpu_count() or 1))
    said = parser.parse_args()
    torch.set_num_threads(1)
    found = scenarios_one_by_one(3 if said.quick else 5, said.workers)
    if said.format == "json":
        json.dump({"schema_version": 1, "status": "ok", "data": {"scenarios": found}}, sys.stdout, indent=2)
        sys.stdout.write("\n")
        return
    sys.stdout.write(f"{'scenario':38} {'ratio':>8} {'low':>8} {'high':>8} {'must':>8} {'moonshot':>8}\n")
    for one in found:
        numbers = " ".join(f"{one[key]:8.3f}" for key in ("ratio", "low", "high", "must", "moonshot"))
        sys.stdout.write(f"{one['name']:38} {numbers}  {'met' if one['met'] else 'missed'}\n")


if __name__ == "__main__":
    main()
