"""python -m benchmarks scaling: how seconds a round and peak memory grow, one axis at a time, a process a cell."""

import argparse
import os
import statistics
from typing import Any

from benchmarks.apart import ask
from benchmarks.output import progress, say, table

Cell = dict[str, Any]

BASE: Cell = {"levels": "de", "fleet": 100, "active": 30, "steps": 4, "rounds": 4, "workers": 2}
SMALL: Cell = {"levels": "e", "fleet": 32, "active": 16, "steps": 1, "rounds": 2, "workers": 2}


def axes(quick: bool, cores: int) -> list[tuple[str, Any, Cell]]:
    """(axis, its value, the cell); everything else is as in the base."""
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


def measured(cells: list[tuple[str, Any, Cell]], repeats: int) -> list[dict[str, Any]]:
    """All cells in turn, again and again: the machine is shared, and its speed moves."""
    found: list[list[dict[str, Any]]] = [[] for _ in cells]
    for repeat in range(repeats):
        for (axis, value, cell), answers in zip(cells, found, strict=True):
            progress(f"repeat {repeat + 1} of {repeats}: {axis} {value}")
            answers.append(ask("benchmarks.cell", cell))
    return [
        record(axis, value, cell, answers) for (axis, value, cell), answers in zip(cells, found, strict=True)
    ]  # fmt: skip


def record(axis: str, value: Any, cell: Cell, answers: list[dict[str, Any]]) -> dict[str, Any]:
    later = [statistics.median(one["rounds"][1:]) for one in answers]
    return {
        "axis": axis,
        "value": value,
        "seconds_per_round": round(statistics.median(later), 4),
        "low": round(min(later), 4),
        "high": round(max(later), 4),
        "first": round(statistics.median(one["rounds"][0] for one in answers), 4),
        "megabytes": statistics.median(one["megabytes"] for one in answers),
        "worker_megabytes": statistics.median(one["worker_megabytes"] for one in answers),
        "cell": cell,
    }


def text(found: list[dict[str, Any]]) -> str:
    head = ["axis", "value", "round s", "low", "high", "first s", "MB", "MB a worker"]
    keys = ("seconds_per_round", "low", "high", "first")
    rows = [
        [one["axis"], str(one["value"]), *(f"{one[key]:.3f}" for key in keys), f"{one['megabytes']:.0f}",
         f"{one['worker_megabytes']:.0f}"]
        for one in found
    ]  # fmt: skip
    return table(head, rows)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks scaling", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="tiny cells, once: only whether everything runs")
    parser.add_argument("--format", choices=("text", "json"), default="text")
    parser.add_argument("--repeats", type=int, default=3)
    said = parser.parse_args(arguments)
    found = measured(axes(said.quick, os.cpu_count() or 1), 1 if said.quick else said.repeats)
    say(text(found), {"scaling": found}, said.format)
