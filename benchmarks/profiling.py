"""Where the time of a scenario goes: torch's operations and Python's functions by their own time, in one process."""

import cProfile
import pstats
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

TOP = 12


def where(run: Callable[[], None]) -> dict[str, Any]:
    """The longest by own time, with their share; the profiler's own cost is part of what it measures."""
    run()  # the first call builds and proves what is cached
    began = time.perf_counter()
    run()
    plainly = time.perf_counter() - began
    return {"seconds": round(plainly, 4), "operations": operations(run), "functions": functions(run)}


def operations(run: Callable[[], None]) -> list[dict[str, Any]]:
    """torch's operations; the last row is all that happened outside of them, mostly Python."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        began = time.perf_counter()
        run()
        wall = (time.perf_counter() - began) * 1e3
    each = [(one.key, one.count, one.self_cpu_time_total / 1e3) for one in seen.key_averages()]
    each.sort(key=lambda one: -one[2])
    inside = sum(ms for _, _, ms in each)
    outside = ("outside of operations", 1, max(wall - inside, 0.0))
    return [_row(*one, max(wall, inside)) for one in [*each[:TOP], outside]]


def functions(run: Callable[[], None]) -> list[dict[str, Any]]:
    seen = cProfile.Profile()
    seen.runcall(run)
    stats: dict[tuple[str, int, str], tuple[int, int, float, float, Any]] = pstats.Stats(seen).stats  # type: ignore[attr-defined]
    each = [(_name(*place), calls, own * 1e3) for place, (_, calls, own, _, _) in stats.items()]
    each.sort(key=lambda one: -one[2])
    total = sum(ms for _, _, ms in each)
    return [_row(*one, total) for one in each[:TOP]]


def _name(file: str, line: int, function: str) -> str:
    return function if file == "~" else f"{Path(file).name}:{line} {function}"


def _row(name: str, calls: int, ms: float, total: float) -> dict[str, Any]:
    return {"name": name, "calls": calls, "self_ms": round(ms, 2), "share": round(ms / total, 4)}
