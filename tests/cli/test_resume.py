"""resume and verify, as a user calls them."""

import json
import signal
import subprocess
import sys
import time

import pytest

from fedloom.reporting import read_manifest


def interrupted(recipe, folder, number):
    """Start a run in a process of its own, send it a signal once it has saved something, and say how it left."""
    command = [sys.executable, "-m", "fedloom", "run", str(recipe), "--out", str(folder), "--workers", "2", "--quiet"]
    running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not (folder / "checkpoints" / "LATEST").is_file() and time.monotonic() < deadline:
        time.sleep(0.01)
    running.send_signal(number)
    return running.wait(timeout=60)


@pytest.fixture
def saving(write):
    return write(("rounds = 2", "rounds = 8\n[checkpoints]\nevery = 1\n"))


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_an_interrupted_run_goes_on(number, saving, fedloom, tmp_path):
    assert interrupted(saving, tmp_path / "runs" / "one", number) == 130
    assert read_manifest(tmp_path / "runs" / "one")["status"] == "interrupted"
    assert fedloom("run", saving, "--out", "whole", "--quiet").code == 0
    done = fedloom("resume", "--format", "json")  # the newest in ./runs
    assert done.code == 0
    assert done.data["run"] == "runs/one"
    assert 1 <= done.data["since"] < 8
    assert f"goes on after round {done.data['since']}" in done.err
    one, whole = (tmp_path / name for name in ("runs/one", "whole"))
    assert read_manifest(one)["status"] == "finished"
    assert read_manifest(one)["sha256"] == read_manifest(whole)["sha256"]
    assert (one / "rows.jsonl").read_bytes() == (whole / "rows.jsonl").read_bytes()


def test_a_finished_run_can_be_verified(saving, fedloom, tmp_path):
    fedloom("run", saving, "--set", "rounds=3", "--out", "run", "--quiet")
    done = fedloom("verify", "run", "--rounds", "2")
    assert (done.code, done.out) == (0, "2 rounds after round 1 played again: the same to the bit\n")
    manifest = tmp_path / "run" / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "sha256": "0"}))
    done = fedloom("verify", "run", "--format", "json", "--quiet")
    assert done.code == 1
    assert done.data["differences"][0].startswith("sha256: 0 then, ")


@pytest.mark.parametrize("verb", ["resume", "verify"])
def test_a_folder_without_run_is_refused(verb, fedloom, tmp_path):
    done = fedloom(verb, tmp_path)
    assert (done.code, done.problems[0].code) == (4, "RUN_FOLDER")
    assert fedloom(verb).code == 4  # nor is there one in ./runs


def test_a_finished_run_is_not_resumed(saving, fedloom):
    fedloom("run", saving, "--set", "rounds=1", "--out", "run", "--quiet")
    assert fedloom("resume", "run").problems[0].code == "RUN_FINISHED"
