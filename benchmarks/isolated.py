"""Run a module of this package in a fresh process: it reads a task as JSON, its last line is the result."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


class ProcessFailed(Exception):  # noqa: N818 - named for what is wrong
    """The process ended without a result."""


def run_module(module: str, task: dict[str, Any], python: str = sys.executable, limit: float = 3600) -> dict[str, Any]:
    """The result of `python -m module` for this task."""
    process = subprocess.Popen(
        [python, "-m", module], cwd=ROOT, env=environment(ROOT), text=True, start_new_session=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        output, errors = process.communicate(json.dumps(task), timeout=limit)
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)  # its own children too
        if isinstance(error, subprocess.TimeoutExpired):
            raise ProcessFailed(f"no result within {limit:.0f} s") from None
        raise
    if process.returncode:
        raise ProcessFailed(_last_line(errors) or f"exit code {process.returncode}")
    try:
        result: dict[str, Any] = json.loads(_last_line(output))
    except json.JSONDecodeError:
        raise ProcessFailed(_last_line(errors) or "no result") from None
    return result


def read_input() -> dict[str, Any]:
    """The task, read by the module."""
    task: dict[str, Any] = json.load(sys.stdin)
    return task


def write_result(result: dict[str, Any]) -> None:
    sys.stdout.write("\n" + json.dumps(result) + "\n")
    sys.stdout.flush()


def environment(tree: Path) -> dict[str, str]:
    """For a process that imports the package and the benchmarks of a source tree, whatever is installed."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(tree), str(tree / "src")])}


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1].strip()
