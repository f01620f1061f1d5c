"""Peak memory of a run: of the process itself, and of the largest of its workers."""

import multiprocessing
import os
import re
import resource
import sys
from pathlib import Path


def peak_memory() -> dict[str, float]:
    """Peak megabytes of this process and of its largest living worker. Shared pages count for both."""
    workers = [_peak(child.pid) for child in multiprocessing.active_children()]
    return {"megabytes": round(_peak(None), 1), "worker_megabytes": round(max(workers, default=0.0), 1)}


def session_memory(leader: int) -> float:
    """Megabytes that all processes of a session use now, shared pages counted once."""
    total = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.getsid(int(process.name)) == leader:
                match = re.search(r"^Pss:\s*(\d+) kB", (process / "smaps_rollup").read_text(), re.MULTILINE)
                total += int(match[1]) if match else 0
        except OSError:  # it has just ended
            continue
    return total * 1024 / 1e6


def _peak(pid: int | None) -> float:
    """Peak resident memory. Not by getrusage, which includes the parent's for a fresh process."""
    try:
        status = Path(f"/proc/{pid or 'self'}/status").read_text()
    except OSError:
        return 0.0 if pid else _max_rss()
    match = re.search(r"VmHWM:\s*(\d+) kB", status)
    return int(match[1]) * 1024 / 1e6 if match else 0.0


def _max_rss() -> float:
    """For systems without /proc. macOS counts bytes, others kilobytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e6
