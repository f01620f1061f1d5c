"""--device and [engine] device: on the fake accelerator, the commands that a user with a GPU types."""

import json
from pathlib import Path

import pytest

from fedloom.runs.folder import read_manifest
from fedloom.testing import accelerator


@pytest.fixture
def loom(write):
    """A recipe, and the fake accelerator."""
    write()
    counted = accelerator()
    counted.reset()
    yield counted
    counted.reset()


def test_run_on_device_has_the_sha256_of_the_cpu_and_says_where(fedloom, loom):
    assert fedloom("run", "my.toml", "--out", "here", "--workers", "1", "--quiet").code == 0
    on_loom = ("--device", "loom")
    assert fedloom("run", "my.toml", "--out", "there", "--workers", "2", "--quiet", *on_loom).code == 0
    here, there = read_manifest(Path("here")), read_manifest(Path("there"))
    assert there["sha256"] == here["sha256"]
    assert Path("there/rows.jsonl").read_text() == Path("here/rows.jsonl").read_text()
    assert (here["compute"]["device"], there["compute"]["device"]) == ("cpu", "loom")
    assert there["compute"]["precision"] == "float32"
    assert there["compute"]["hardware"] == "loom"
    verified = fedloom("verify", "there", "--format", "json")
    assert verified.data["differences"] == []
    assert verified.data["tolerance"] > 0
    assert fedloom("verify", "here", "--format", "json").data["tolerance"] == 0


@pytest.mark.slow
def test_run_that_does_not_fit_says_so_in_manifest_and_progress(fedloom, loom):
    run = ("run", "my.toml", "--set", "engine.devices_per_block=4", "--set", "data.devices=8")
    run = (*run, "--set", "training.last_batch=drop", "--workers", "1")
    assert fedloom(*run, "--out", "here", "--quiet").code == 0
    with loom.memory(largest_tensor=190_000):  # the first map of four devices takes 204,800 bytes
        limited = fedloom(*run, "--out", "there", "--device", "loom")
    assert limited.code == 0
    there = read_manifest(Path("there"))
    assert there["sha256"] == read_manifest(Path("here"))["sha256"]
    assert there["compute"]["devices_at_a_time"] == {"large train": 2}
    assert limited.err.count("4 devices did not fit into the memory of loom") == 1


def test_unknown_device_is_refused_by_name(fedloom, write):
    write()
    for verb in ("run", "check", "calibrate"):
        failed = fedloom(verb, "my.toml", "--device", "cuda:77")
        assert failed.code == 4
        assert "DEVICE_MISSING" in failed.err
        assert "cuda:77" in failed.err


@pytest.mark.parametrize("change", ["engine.device=cuda", "engine.precision=bfloat16", "engine.compile=true"])
def test_lane_kernels_elsewhere_than_on_the_cpu_in_float32_are_refused(fedloom, write, change):
    pytest.importorskip("numba")
    write()
    failed = fedloom("plan", "my.toml", "--set", "engine.kernels=lanes", "--set", change)
    assert failed.code == 4
    assert "KERNELS_DEVICE" in failed.err


def test_plan_on_device_shows_the_memory_of_a_block(fedloom, write):
    write()
    change = ("--set", "engine.devices_per_block=3", "--format", "json")
    (large, _) = fedloom("plan", "my.toml", "--device", "cuda", *change).data["tiers"]
    assert large["block_memory"] == 3 * large["training_memory"]


@pytest.mark.slow
def test_calibrate_on_device_leaves_out_what_does_not_fit(fedloom, loom):
    with loom.memory(largest_tensor=4_000_000):
        found = fedloom("calibrate", "my.toml", "--device", "loom", "--format", "json").data
    assert [one["tier"] for one in found] == ["large", "small"]
    assert all(str(one["best"]) in one["milliseconds"] for one in found)
    assert [max(map(int, one["milliseconds"])) for one in found] == [64, 128]


def test_doctor_device_that_is_missing_is_refused(fedloom):
    failed = fedloom("doctor", "--device", "cuda:77")
    assert failed.code == 4
    assert "DEVICE_MISSING" in failed.err


@pytest.mark.slow
def test_doctor_device_prints_its_whole_table(fedloom, loom):
    result = fedloom("doctor", "--device", "loom")
    assert (result.code, result.err) == (0, "")
    from fedloom.methods import METHODS

    lines = result.out.splitlines()
    assert lines[0].startswith("loom (loom), torch ")
    assert {line.split()[0] for line in lines[2:]} >= {*METHODS, "speed", "largest", "not", "took"}
    tried = [line for line in lines if " on " in line]
    assert len(tried) >= 2 * len(METHODS) - 1
    assert all(" ok " in line and line.rstrip().endswith("yes") for line in tried)
    report = json.loads(fedloom("doctor", "--device", "loom", "--format", "json").out)["data"]
    assert report["passed"]
