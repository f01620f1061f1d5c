"""Flower's simulation on Ray, run by the commands a user types."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fedloom.deploy.processes import flower_environment
from fedloom.flower.apps import ClientApp
from fedloom.flower.ray import RayGrid
from fedloom.recipe.load import dumps
from fedloom.runs.folder import read_manifest
from tests import chaos

BIN = Path(sys.executable).parent


def document(**changes: Any) -> dict[str, Any]:
    settings = {
        **chaos.recipe("heterofl", 2),
        "fleet": {"participation": 1.0},
        "engine": {"devices_per_block": 1},
        **changes,
    }
    return {**settings, "data": {**settings["data"], "devices": 20}}


def fedloom(*arguments: str, home: Path) -> dict[str, Any]:
    command = [str(BIN / "fedloom"), *arguments, "--format", "json", "--quiet"]
    done = subprocess.run(command, env=flower_environment(home), cwd=home, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    data: dict[str, Any] = json.loads(done.stdout)["data"]
    return data


@pytest.mark.slow
@pytest.mark.parametrize("family", ["heterofl", "fedhenn"])
def test_ray_twenty_devices_give_the_sha256_of_in_process(family: str, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(dumps(document(**chaos.FAMILIES[family])), encoding="utf-8")
    fedloom("run", str(recipe), "--out", "here", home=tmp_path)
    fedloom("run", str(recipe), "--engine", "flower-sim", "--out", "there", home=tmp_path)
    assert read_manifest(tmp_path / "there")["sha256"] == read_manifest(tmp_path / "here")["sha256"]
    assert (tmp_path / "there" / "rows.jsonl").read_text() == (tmp_path / "here" / "rows.jsonl").read_text()
    assert (tmp_path / "there" / "events.jsonl").read_text() == ""
    state_files = sorted((tmp_path / "there" / "devices").glob("*/*/*.state"))
    assert bool(state_files) == (family == "fedhenn")


WITH_LOOM = """\
from fedloom.methods.heterofl import HeteroFL
from fedloom.testing import accelerator

accelerator()  # in every process of Ray
METHODS = {"heterofl_on_loom": HeteroFL}
"""


@pytest.mark.slow
def test_ray_on_accelerator_gives_the_sha256_of_the_cpu(tmp_path: Path) -> None:
    recipe, file = tmp_path / "recipe.toml", tmp_path / "loom.py"
    recipe.write_text(dumps(document(**chaos.FAMILIES["heterofl"])), encoding="utf-8")
    file.write_text(WITH_LOOM, encoding="utf-8")
    fedloom("run", str(recipe), "--out", "here", home=tmp_path)
    on_loom = ("--engine", "flower-sim", "--device", "loom", "--with", str(file))
    fedloom("run", str(recipe), "--out", "there", *on_loom, home=tmp_path)
    assert read_manifest(tmp_path / "there")["sha256"] == read_manifest(tmp_path / "here")["sha256"]
    assert (tmp_path / "there" / "rows.jsonl").read_text() == (tmp_path / "here" / "rows.jsonl").read_text()
    assert (tmp_path / "there" / "events.jsonl").read_text() == ""


def test_ray_processes_get_gpus_where_the_device_is_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr("fedloom.flower.ray.run_simulation", lambda *_, backend_config: given.append(backend_config))
    grid = RayGrid(ClientApp(), 2, num_gpus=0.5)
    grid._run()
    assert given[0]["client_resources"] == {"num_cpus": 1, "num_gpus": 0.5}
