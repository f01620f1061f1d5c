"""python -m benchmarks [--quick] [--format json]: fedloom's time over the ordinary loop's, interleaved in one run."""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.scenarios import TRAININGS, aggregation, bench, overhead


def interleaved(ours: Callable[[], None], theirs: Callable[[], None], repeats: int) -> list[float]:
    """Ratios, each of two neighbouring runs: the machine is shared, and its speed moves."""
    ours(), theirs()  # first calls build and prove what is cached
    return [timed(ours) / timed(theirs) for _ in range(repeats)]


def timed(run: Callable[[], None]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def scenarios(repeats: int, workers: int) -> list[dict[str, Any]]:
    found = []
    for one in TRAININGS:
        with bench(one, workers) as sides:
            ratios = interleaved(sides.ours, sides.theirs, repeats)
        found.append(record(one.name, ratios, one.must, one.moonshot))
    ratios = interleaved(*aggregation(), repeats)
    found.append(record("aggregation against index lists", ratios, 1 / 30, 1 / 80))
    each = [overhead() for _ in range(repeats)]
    found.append(record("overhead, ms a device (not a ratio)", each, 5.0, 0.5))
    return found


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
    found = scenarios(3 if said.quick else 5, said.workers)
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
