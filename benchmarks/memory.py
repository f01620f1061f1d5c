"""Peak memory of a run: of the process itself, and of the largest of its workers."""

import multiprocessing
import os
import re
import resource
import sys
from pathlib import Path


def peaks() -> dict[str, float]:
    """In megabytes, while the workers are alive. Pages that a worker shares with its parent count for both."""
    workers = [_peak(child.pid) for child in multiprocessing.active_children()]
    return {"megabytes": round(_peak(None), 1), "worker_megabytes": round(max(workers, default=0.0), 1)}


def of_session(leader: int) -> float:
    """Megabytes that all processes of a session have now, shared pages counted once."""
    total = 0
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if os.getsid(int(place.name)) == leader:
                found = re.search(r"^Pss:\s*(\d+) kB", (place / "smaps_rollup").read_text(), re.MULTILINE)
                total += int(found[1]) if found else 0
        except OSError:  # it has just ended
            continue
    return total * 1024 / 1e6


def _peak(pid: int | None) -> float:
    """The high-water mark of the process's own memory; what getrusage says of a fresh process includes its parent's."""
    try:
        said = Path(f"/proc/{pid or 'self'}/status").read_text()
    except OSError:
        return 0.0 if pid else _used()
    found = re.search(r"VmHWM:\s*(\d+) kB", said)
    return int(found[1]) * 1024 / 1e6 if found else 0.0


def _used() -> float:
    """Where there is no /proc; macOS counts bytes, others kilobytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e6
