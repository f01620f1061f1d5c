"""Profile a scenario in one process: torch's operators and Python's functions by their own time."""

import cProfile
import pstats
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

TOP = 12


def profile_call(run: Callable[[], None]) -> dict[str, Any]:
    """The longest by own time, with their share. The cost of the profiler itself is included."""
    run()  # the first call fills caches
    start = time.perf_counter()
    run()
    seconds = time.perf_counter() - start
    return {"seconds": round(seconds, 4), "operations": profile_operations(run), "functions": profile_functions(run)}


def profile_operations(run: Callable[[], None]) -> list[dict[str, Any]]:
    """torch's operators; the last row is the time outside of them, mostly Python."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        start = time.perf_counter()
        run()
        wall = (time.perf_counter() - start) * 1e3
    rows = [(row.key, row.count, row.self_cpu_time_total / 1e3) for row in profiler.key_averages()]
    rows.sort(key=lambda row: -row[2])
    inside = sum(ms for _, _, ms in rows)
    outside = ("outside of operators", 1, max(wall - inside, 0.0))
    return [_row(*row, max(wall, inside)) for row in [*rows[:TOP], outside]]


def profile_functions(run: Callable[[], None]) -> list[dict[str, Any]]:
    profiler = cProfile.Profile()
    profiler.runcall(run)
    stats: dict[tuple[str, int, str], tuple[int, int, float, float, Any]] = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
    rows = [(_name(*location), calls, own * 1e3) for location, (_, calls, own, _, _) in stats.items()]
    rows.sort(key=lambda row: -row[2])
    total = sum(ms for _, _, ms in rows)
    return [_row(*row, total) for row in rows[:TOP]]


def _name(file: str, line: int, function: str) -> str:
    return function if file == "~" else f"{Path(file).name}:{line} {function}"


def _row(name: str, calls: int, ms: float, total: float) -> dict[str, Any]:
    return {"name": name, "calls": calls, "self_ms": round(ms, 2), "share": round(ms / total, 4)}
