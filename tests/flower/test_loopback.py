"""A real SuperLink and three SuperNodes: methods learn what they learn in process. Every message costs the start of a
Python process, so all methods share one fleet and one run of Flower's; and the whole table takes ten minutes and more,
so `make test-flower` has it, and `make test-slow` one of each kind."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fedloom.deploy.server import write_app
from fedloom.flower.client_state import ClientStateFiles
from fedloom.methods import METHODS
from fedloom.models import MODELS
from fedloom.recipe.errors import RecipeError
from fedloom.recipe.load import load
from fedloom.recipe.registry import Registry
from fedloom.recipe.toml import dumps
from fedloom.runs.build import assemble
from fedloom.runs.checkpoint import FOLDER, Checkpoints
from fedloom.runs.recorder import recorded
from fedloom.tensors import Parcel
from tests.conftest import LESSER, SMALL, TINY, TOKENS
from tests.superlink import fleet

DEVICES = 3
SECONDS = 3000.0

APP = '''"""All recipes of a folder, one after the other, in double precision."""

from pathlib import Path

import torch

from fedloom.flower.apps import server_app
from fedloom.recipe.load import load
from fedloom.recipe.registry import Registry
from fedloom.runs.build import assemble
from fedloom.runs.recorder import recorded
from fedloom.deploy.remote import over_flower, build_node_registry
from fedloom.deploy.apps import client


def play(grid, config):
    torch.set_default_dtype(torch.float64)
    folder, nodes = Path(config["recipe"]), None
    for recipe in sorted(folder.glob("*.toml")):
        made = assemble(load(recipe, Registry()), Registry(), folder)
        nodes = nodes or build_node_registry(grid, made.fleet)
        for _ in recorded(over_flower(made, nodes), Path(config["out"]) / recipe.stem):
            pass


server = server_app(play)
'''


def document(name: str, family: str, tiers: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "rounds": 2,
        "data": {
            "dataset": "digits", "devices": DEVICES, "max_examples": 12, "test_examples": 20,
            "public": {"examples": 20}, "partition": {"kind": "quantity", "alpha": 2.0},
        },
        "model": {"family": family, **TINY[family]},
        "tiers": tiers,
        "training": {"batch_size": 4, "optimizer": {"kind": "sgd", "learning_rate": 0.1, "momentum": 0.9}},
        "method": {"name": name, **SMALL.get(name, {}), **({"last_round": False} if name == "fedhenn" else {})},
        "evaluation": {"every": 2, "tests": ["global"], "candidates": ["server"]},
    }  # fmt: skip


def sizes(family: str) -> Iterator[list[dict[str, Any]]]:
    """Two tiers, or one."""
    first, second = {"name": "a", "share": 0.5}, {"name": "b", "share": 0.5, **LESSER.get(family, {})}
    yield [first, {**second, "width": 0.5}]
    yield [first, second]
    yield [{**first, "share": 1.0}]


def recipe_for(name: str, folder: Path) -> dict[str, Any]:
    """The first that the method does not refuse."""
    families = ["convnet", "splitnet", *sorted(set(MODELS) - set(TOKENS))]
    for made in (document(name, family, tiers) for family in families for tiers in sizes(family)):
        try:
            assemble(load(made, Registry()), Registry(), folder)
        except RecipeError:
            continue
        return made
    raise AssertionError(f"no recipe for {name}")


def memories(disks: Path, run: str) -> dict[str, Parcel]:
    found = {}
    for place in disks.glob(f"*/{run}/*"):
        newest = max(path.name for path in place.glob("*.memory"))
        entry = ClientStateFiles(place).read((int(newest[:6]), int(newest[7:11])))
        assert entry is not None and entry.task is not None
        found[place.name] = entry.task
    return found


OF_EACH_KIND = ("heterofl", "fedhen", "efedsup", "fedhenn", "fedin")


@pytest.mark.parametrize(
    "methods",
    [pytest.param(OF_EACH_KIND, marks=pytest.mark.slow), pytest.param(tuple(METHODS), marks=pytest.mark.at_length)],
    ids=["of-each-kind", "all"],
)
@pytest.mark.usefixtures("double")
def test_methods_on_a_real_fleet(
    methods: tuple[str, ...], tmp_path: Path, difference: Callable[[Parcel, Parcel], float]
) -> None:
    recipes, out, disks = tmp_path / "recipes", tmp_path / "out", tmp_path / "disks"
    recipes.mkdir()
    for name in methods:
        (recipes / f"{name}.toml").write_text(dumps(recipe_for(name, tmp_path)), encoding="utf-8")
    nodes = [
        {"device": number, "folder": str(disks / str(number)), "data-dir": str(tmp_path)} for number in range(DEVICES)
    ]
    with fleet(tmp_path / "flower", nodes) as ours:
        said = ours.run(write_app(tmp_path / "app", APP), {"recipe": str(recipes), "out": str(out)}, SECONDS)
    found = {}
    for name in methods:
        assert (out / name).exists(), said
        here = assemble(load(recipes / f"{name}.toml", Registry()), Registry(), tmp_path)
        for _ in recorded(here, tmp_path / "here" / name):
            pass
        one, other = (Checkpoints(folder / name / FOLDER).newest() for folder in (out, tmp_path / "here"))
        assert one is not None and other is not None
        kept = memories(disks, one.about["standing"]["others"].get("run", "none"))
        assert kept.keys() == here.memory.committed.keys()
        apart = [difference(one.server, other.server)]
        apart += [difference(kept[device], here.memory.committed[device]) for device in kept]
        found[name] = max(apart)
        assert (out / name / "events.jsonl").read_text() == "", name
    print({name: f"{apart:.1e}" for name, apart in found.items()})
    assert {name: apart for name, apart in found.items() if not apart <= 1e-8} == {}
