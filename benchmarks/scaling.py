"""python -m benchmarks scaling: how seconds per round and peak memory grow along one axis, with a process per cell."""

import argparse
import os
import statistics
from typing import Any

from benchmarks.isolated import run_module
from benchmarks.output import format_table, progress, write_output

Cell = dict[str, Any]

BASE: Cell = {"levels": "de", "fleet": 100, "active": 30, "steps": 4, "rounds": 4, "workers": 2}
SMALL: Cell = {"levels": "e", "fleet": 32, "active": 16, "steps": 1, "rounds": 2, "workers": 2}


def axes(quick: bool, cores: int) -> list[tuple[str, Any, Cell]]:
    """(axis, value on it, cell); all other settings are those of the base."""
    base = {**(SMALL if quick else BASE), "workers": min(2, cores)}
    full = 16 if quick else 100
    values: dict[str, list[tuple[Any, Cell]]] = {
        "active devices": [(n, {"active": n}) for n in ((4, 16) if quick else (10, 30, 100))],
        "devices in the fleet": [
            (n, {"fleet": n, "active": full}) for n in ((16, 160) if quick else (100, 1_000, 10_000))
        ],
        "rounds": [(n, {"rounds": n}) for n in ((2, 3) if quick else (2, 4, 8))],
        "width": [(level, {"levels": level}) for level in ("ed" if quick else "edcba")],
        "workers": [(n, {"workers": n}) for n in range(1, min(2, cores) + 1)],
    }
    return [(axis, value, {**base, **change}) for axis, cells in values.items() for value, change in cells]


def measure(cells: list[tuple[str, Any, Cell]], repeats: int) -> list[dict[str, Any]]:
    """Repeat over all cells in turn, not cell by cell: the speed of a shared machine drifts."""
    results: list[list[dict[str, Any]]] = [[] for _ in cells]
    for repeat in range(repeats):
        for (axis, value, cell), repeated in zip(cells, results, strict=True):
            progress(f"repeat {repeat + 1} of {repeats}: {axis} {value}")
            repeated.append(run_module("benchmarks.cell", cell))
    return [summarize(*cell, repeated) for cell, repeated in zip(cells, results, strict=True)]


def summarize(axis: str, value: Any, cell: Cell, results: list[dict[str, Any]]) -> dict[str, Any]:
    seconds = [statistics.median(result["rounds"][1:]) for result in results]  # the first round fills caches
    return {
        "axis": axis,
        "value": value,
        "seconds_per_round": round(statistics.median(seconds), 4),
        "low": round(min(seconds), 4),
        "high": round(max(seconds), 4),
        "first": round(statistics.median(result["rounds"][0] for result in results), 4),
        "megabytes": statistics.median(result["megabytes"] for result in results),
        "worker_megabytes": statistics.median(result["worker_megabytes"] for result in results),
        "cell": cell,
    }


def format_rows(rows: list[dict[str, Any]]) -> str:
    header = ["axis", "value", "round s", "low", "high", "first s", "MB", "MB per worker"]
    keys = ("seconds_per_round", "low", "high", "first")
    cells = [
        [row["axis"], str(row["value"]), *(f"{row[key]:.3f}" for key in keys), f"{row['megabytes']:.0f}",
         f"{row['worker_megabytes']:.0f}"]
        for row in rows
    ]  # fmt: skip
    return format_table(header, cells)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks scaling", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="tiny cells, once: a smoke test")
    parser.add_argument("--format", choices=("text", "json"), default="text")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args(arguments)
    rows = measure(axes(options.quick, os.cpu_count() or 1), 1 if options.quick else options.repeats)
    write_output(format_rows(rows), {"scaling": rows}, options.format)
