"""Measure in a fresh process: a module of this package reads its work as JSON and answers with a last line of JSON."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


class Failed(Exception):  # noqa: N818 - named for what is wrong
    """The process ended without an answer."""


def ask(module: str, work: dict[str, Any], python: str = sys.executable, limit: float = 3600) -> dict[str, Any]:
    """What `python -m module` makes of the work."""
    process = subprocess.Popen(
        [python, "-m", module], cwd=ROOT, env=_environment(), text=True, start_new_session=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        said, complaints = process.communicate(json.dumps(work), timeout=limit)
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)  # its own children too
        if isinstance(error, subprocess.TimeoutExpired):
            raise Failed(f"no answer within {limit:.0f} s") from None
        raise
    if process.returncode:
        raise Failed(_last_line(complaints) or f"exit code {process.returncode}")
    try:
        answer: dict[str, Any] = json.loads(_last_line(said))
    except json.JSONDecodeError:
        raise Failed(_last_line(complaints) or "no answer") from None
    return answer


def read() -> dict[str, Any]:
    """The work, on the other side."""
    work: dict[str, Any] = json.load(sys.stdin)
    return work


def answer(found: dict[str, Any]) -> None:
    sys.stdout.write("\n" + json.dumps(found) + "\n")
    sys.stdout.flush()


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1].strip()
