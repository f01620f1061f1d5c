"""A real SuperLink and three SuperNodes give the results of in-process runs.

Every message starts a Python process, so all methods share one run of Flower. All methods take more than ten minutes:
they are in `make test-flower`, one of each kind is in `make test-slow`.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fedloom.deploy.server import write_app
from fedloom.flower.client_state import ClientStateFiles
from fedloom.methods import METHODS
from fedloom.models import MODELS
from fedloom.recipe.errors import RecipeError
from fedloom.recipe.load import dumps, load
from fedloom.recipe.registries import Registries
from fedloom.runs.build import assemble
from fedloom.runs.checkpoint import FOLDER, Checkpoints
from fedloom.runs.recorder import record_rounds
from fedloom.tensors import Parcel
from fedloom.testing.world import SMALLER_SETTINGS as LESSER
from fedloom.testing.world import TINY_METHODS
from fedloom.testing.world import TINY_SETTINGS as TINY
from tests.conftest import TOKENS
from tests.superlink import fleet

DEVICES = 3
SECONDS = 3000.0

APP = '''"""Run all recipes of a folder, one after the other, in double precision."""

from pathlib import Path

import torch

from fedloom.flower.apps import client_app, server_app
from fedloom.recipe.load import load
from fedloom.recipe.registries import Registries
from fedloom.runs.build import assemble
from fedloom.runs.recorder import record_rounds
from fedloom.deploy.remote import attach_flower, build_node_registry
from fedloom.deploy.runtime import build_runtime, describe_device


def run_all(grid, config):
    torch.set_default_dtype(torch.float64)
    folder, nodes = Path(config["recipe"]), None
    for recipe in sorted(folder.glob("*.toml")):
        experiment = assemble(load(recipe, Registries()), Registries(), folder)
        nodes = nodes or build_node_registry(grid, experiment.fleet)
        for _ in record_rounds(attach_flower(experiment, nodes), Path(config["out"]) / recipe.stem):
            pass


client = client_app(build_runtime, describe_device)
server = server_app(run_all)
'''


def build_document(name: str, family: str, tiers: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "rounds": 2,
        "data": {
            "dataset": "digits", "devices": DEVICES, "max_examples": 12, "test_examples": 20,
            "public": {"examples": 20}, "partition": {"kind": "quantity", "alpha": 2.0},
        },
        "model": {"family": family, **TINY[family]},
        "tiers": tiers,
        "training": {"batch_size": 4, "optimizer": {"kind": "sgd", "lr": 0.1, "momentum": 0.9}},
        "method": {"name": name, **TINY_METHODS.get(name, {}), **({"last_round": False} if name == "fedhenn" else {})},
        "evaluation": {"every": 2, "tests": ["global"], "candidates": ["server"]},
    }  # fmt: skip


def tier_choices(family: str) -> Iterator[list[dict[str, Any]]]:
    """Two tiers of different width, two tiers, one tier."""
    first, second = {"name": "a", "share": 0.5}, {"name": "b", "share": 0.5, **LESSER.get(family, {})}
    yield [first, {**second, "width": 0.5}]
    yield [first, second]
    yield [{**first, "share": 1.0}]


def recipe_for(name: str, folder: Path) -> dict[str, Any]:
    """The first recipe that the method does not refuse."""
    families = ["convnet", "splitnet", *sorted(set(MODELS) - set(TOKENS))]
    for candidate in (build_document(name, family, tiers) for family in families for tiers in tier_choices(family)):
        try:
            assemble(load(candidate, Registries()), Registries(), folder)
        except RecipeError:
            continue
        return candidate
    raise AssertionError(f"no recipe for {name}")


def read_client_states(disks: Path, run: str) -> dict[str, Parcel]:
    states = {}
    for folder in disks.glob(f"*/{run}/*"):
        newest = max(path.name for path in folder.glob("*.state"))
        saved = ClientStateFiles(folder).read((int(newest[:6]), int(newest[7:11])))
        assert saved is not None and saved.task is not None
        states[folder.name] = saved.task
    return states


OF_EACH_KIND = ("heterofl", "fedhen", "efedsup", "fedhenn", "fedin")


@pytest.mark.parametrize(
    "methods",
    [pytest.param(OF_EACH_KIND, marks=pytest.mark.slow), pytest.param(tuple(METHODS), marks=pytest.mark.at_length)],
    ids=["of-each-kind", "all"],
)
@pytest.mark.usefixtures("double")
def test_superlink_methods_equal_in_process(
    methods: tuple[str, ...], tmp_path: Path, difference: Callable[[Parcel, Parcel], float]
) -> None:
    recipes, out, disks = tmp_path / "recipes", tmp_path / "out", tmp_path / "disks"
    recipes.mkdir()
    for name in methods:
        (recipes / f"{name}.toml").write_text(dumps(recipe_for(name, tmp_path)), encoding="utf-8")
    nodes = [
        {"device": number, "folder": str(disks / str(number)), "data-dir": str(tmp_path)} for number in range(DEVICES)
    ]
    app = write_app(tmp_path / "app", "all_recipes")
    (app / "all_recipes.py").write_text(APP, encoding="utf-8")
    with fleet(tmp_path / "flower", nodes) as running:
        output = running.run(app, {"recipe": str(recipes), "out": str(out)}, SECONDS)
    differences = {}
    for name in methods:
        assert (out / name).exists(), output
        here = assemble(load(recipes / f"{name}.toml", Registries()), Registries(), tmp_path)
        for _ in record_rounds(here, tmp_path / "here" / name):
            pass
        there, local = (Checkpoints(folder / name / FOLDER).read_newest() for folder in (out, tmp_path / "here"))
        assert there is not None and local is not None
        states = read_client_states(disks, there.about["state"]["run_id"])
        assert states.keys() == here.client_states.committed.keys()
        distances = [difference(there.server, local.server)]
        distances += [difference(states[device], here.client_states.committed[device]) for device in states]
        differences[name] = max(distances)
        assert (out / name / "events.jsonl").read_text() == "", name
    print({name: f"{distance:.1e}" for name, distance in differences.items()})
    assert {name: distance for name, distance in differences.items() if not distance <= 1e-8} == {}
