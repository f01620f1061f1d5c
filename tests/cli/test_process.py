"""The command as a process: the entry point, the time of --help, and a real Ctrl-C."""

import json
import os
import signal
import subprocess
import sys
import time

WITHOUT_TORCH = """
import sys
from fedloom.cli.app import main
try:
    main(sys.argv[1:])
finally:
    heavy = {"torch", "numpy", "matplotlib"} & sys.modules.keys()
    sys.stderr.write(",".join(sorted(heavy)))
"""


def environment():
    return {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120", "TERM": "dumb"}


def test_help_is_fast_and_imports_nothing_heavy(tmp_path):
    times = []
    for _ in range(3):
        began = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "fedloom", "--help"],
            capture_output=True, text=True, cwd=tmp_path, env=environment(), check=True,
        )  # fmt: skip
        times.append(time.perf_counter() - began)
    assert min(times) < 1.5
    assert done.stderr == ""
    for verb in ("run", "compare", "plan", "check", "list", "init", "doctor"):
        assert f" {verb} " in done.stdout
    for arguments in (["--help"], ["run", "--help"]):
        done = subprocess.run(
            [sys.executable, "-c", WITHOUT_TORCH, *arguments],
            capture_output=True, text=True, cwd=tmp_path, env=environment(), check=True,
        )  # fmt: skip
        assert "Usage" in done.stdout
        assert done.stderr == ""
    assert list(tmp_path.iterdir()) == []


def test_run_process_finishes_with_json(tmp_path, write):
    write()
    done = subprocess.run(
        [sys.executable, "-m", "fedloom", "run", "my.toml", "--format", "json"],
        capture_output=True, text=True, cwd=tmp_path, env=environment(), check=False,
    )  # fmt: skip
    assert done.returncode == 0
    content = json.loads(done.stdout)
    assert (content["schema_version"], content["status"]) == (1, "ok")
    folder = tmp_path / content["data"]["run"]
    assert folder.parent == tmp_path / "runs"
    assert json.loads((folder / "manifest.json").read_text())["status"] == "finished"
    assert [line.split("  ")[1] for line in done.stderr.splitlines()] == ["round 1/2", "round 2/2"]


def test_run_process_sigint_is_exit_130(tmp_path, write):
    write(("rounds = 2", "rounds = 100000"))
    running = subprocess.Popen(
        [sys.executable, "-m", "fedloom", "run", "my.toml", "--out", "run", "--format", "json"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=environment(),
    )  # fmt: skip
    try:
        first = running.stderr.readline()
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=30)
    finally:
        running.kill()
    assert "round      1/100000" in first
    assert running.returncode == 130
    assert json.loads(out)["error_code"] == "INTERRUPTED"
    assert "Traceback" not in err
    assert json.loads((tmp_path / "run" / "manifest.json").read_text())["status"] == "interrupted"
