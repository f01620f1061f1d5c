"""resume and verify, as a user calls them."""

import json
import os
import signal
import subprocess
import sys

import pytest

from fedloom.runs.folder import read_manifest

# a method that sends its process the signal STOP in the third round
STOPPED = """
import os
from fedloom.methods import METHODS as KNOWN

class Stopped(KNOWN["heterofl"]):
    def round(self, server, context):
        made = super().round(server, context)
        if context.number == 3 and "STOP" in os.environ:
            os.kill(os.getpid(), int(os.environ["STOP"]))
        return made

METHODS = {"stopped": Stopped}
"""


@pytest.fixture
def saving(write):
    return write(("rounds = 2", "rounds = 5\n[checkpoints]\nevery = 1\n"))


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_resume_interrupted_run_gives_the_same_bits(number, write, fedloom, tmp_path):
    recipe = write(("rounds = 2", "rounds = 5\n[checkpoints]\nevery = 1\n"), ('name = "heterofl"', 'name = "stopped"'))
    (tmp_path / "own.py").write_text(STOPPED)
    command = ["run", str(recipe), "--with", "own.py", "--workers", "2", "--quiet", "--out"]
    done = subprocess.run(
        [sys.executable, "-m", "fedloom", *command, "runs/one"],
        cwd=tmp_path, env={**os.environ, "STOP": str(int(number))}, capture_output=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 130
    one, whole = (tmp_path / name for name in ("runs/one", "whole"))
    assert read_manifest(one)["status"] == "interrupted"
    assert fedloom(*command, "whole").code == 0
    done = fedloom("resume", "--with", "own.py", "--format", "json")  # the newest in ./runs
    assert done.code == 0
    assert (done.data["run"], done.data["since"]) == ("runs/one", 2)
    assert "continues after round 2" in done.err
    assert read_manifest(one)["status"] == "finished"
    assert read_manifest(one)["sha256"] == read_manifest(whole)["sha256"]
    assert (one / "rows.jsonl").read_bytes() == (whole / "rows.jsonl").read_bytes()


def test_verify_finished_run_finds_differences(saving, fedloom, tmp_path):
    fedloom("run", saving, "--set", "rounds=3", "--out", "run", "--quiet")
    done = fedloom("verify", "run", "--rounds", "2")
    assert (done.code, done.out) == (0, "2 rounds after round 1 replayed: the same to the bit\n")
    manifest = tmp_path / "run" / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "sha256": "0"}))
    done = fedloom("verify", "run", "--format", "json", "--quiet")
    assert done.code == 1
    assert done.data["differences"][0].startswith("sha256: 0 then, ")


@pytest.mark.parametrize("verb", ["resume", "verify"])
def test_resume_and_verify_other_folder_is_refused(verb, fedloom, tmp_path):
    done = fedloom(verb, tmp_path)
    assert (done.code, done.issues[0].code) == (4, "RUN_FOLDER")
    assert fedloom(verb).code == 4  # ./runs is empty too


def test_resume_finished_run_is_refused(saving, fedloom):
    fedloom("run", saving, "--set", "rounds=1", "--out", "run", "--quiet")
    assert fedloom("resume", "run").issues[0].code == "RUN_FINISHED"
