"""A run's folder is written by one process at a time."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import fedloom
from fedloom.recipe.errors import RecipeError
from fedloom.runs.folder import read_manifest, read_rows
from fedloom.runs.lock import lock_run
from tests.chaos import recipe


def test_lock_run_second_holder_is_refused_and_the_next_is_not(tmp_path: Path) -> None:
    with lock_run(tmp_path), pytest.raises(RecipeError, match="RUN_LOCKED"), lock_run(tmp_path):
        raise AssertionError("both hold it")
    with lock_run(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_lock_run_ends_with_a_killed_process(tmp_path: Path) -> None:
    hold = f"with lock_run(Path({str(tmp_path)!r})):\n    print('held', flush=True)\n    time.sleep(60)\n"
    source = f"import time\nfrom pathlib import Path\nfrom fedloom.runs.lock import lock_run\n{hold}"
    process = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        with pytest.raises(RecipeError, match="RUN_LOCKED"), lock_run(tmp_path):
            raise AssertionError("both hold it")
    finally:
        process.kill()
        process.communicate()
    with lock_run(tmp_path):
        pass


def test_lock_run_forked_worker_does_not_hold_the_lock_of_its_killed_parent(tmp_path: Path) -> None:
    source = (
        "import os, sys, time\nfrom pathlib import Path\nfrom fedloom.runs.lock import lock_run\n"
        f"with lock_run(Path({str(tmp_path)!r})):\n"
        "    if not os.fork():\n        print(os.getpid(), flush=True)\n"
        "    time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    worker = int(parent.stdout.readline())
    try:
        with pytest.raises(RecipeError, match="RUN_LOCKED"), lock_run(tmp_path):
            raise AssertionError("both hold it")
        parent.kill()
        parent.wait()
        os.kill(worker, 0)  # it still runs
        with lock_run(tmp_path):
            pass
    finally:
        os.kill(worker, signal.SIGKILL)
        parent.kill()
        parent.communicate()


def test_resume_of_a_run_that_is_going_on_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    document: dict[str, Any] = recipe("heterofl", rounds=3)
    running = fedloom.Simulation.from_recipe(document)
    folder, rounds = running.folder, running.rounds()
    next(rounds)
    before = [repr(row) for row in read_rows(folder)]
    with pytest.raises(RecipeError, match="RUN_LOCKED"):
        fedloom.resume(folder)
    assert read_manifest(folder)["status"] == "running"
    assert [repr(row) for row in read_rows(folder)] == before
    list(rounds)
    assert read_manifest(folder)["status"] == "finished"
