"""What a device has, put together on the device itself from the recipe that comes with every question."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from ..data import Dataset
from ..engines import ClientData
from ..recipe.errors import RecipeError, RecipeIssue
from ..recipe.load import load
from ..recipe.paths import data_folder
from ..recipe.registry import Registry, module_of
from ..runs.build import Experiment, assemble, finder, simulation
from ..runs.compression import build_codec
from ..runs.data import holds_its_own

if TYPE_CHECKING:
    from ..flower.client import ClientRuntime


Config = Mapping[str, Any]
"""Of a node, as whoever started it has said: `device`, its number in the fleet; `data-dir`; `folder`, for what it
remembers; `with`, files of own names with commas between; `load`, a file whose `load()` gives its data; `machine`, a
file of what it has measured of itself."""


def runtime_of(recipe: Mapping[str, Any], config: Config) -> "ClientRuntime":
    """A device's examples are its part of the recipe's data, as in a simulation; or all that it finds."""
    from ..flower.client import ClientRuntime

    data = str(config.get("data-dir", ""))
    own = str(config.get("load", ""))
    made = _assembled(json.dumps(recipe), data, files_of(config), own, torch.get_default_dtype())
    name, engine, evaluator = made.fleet.name(number_of(config)), simulation(made), made.evaluator
    if holds_its_own(made.loaded):
        engine = replace(engine, client_data=_all_of_it(made, name))
        evaluator = replace(evaluator, tests=("local",))  # what a device finds is nobody else's test
    codec = build_codec(made.loaded.recipe)
    folder = Path(str(config.get("folder", "devices"))).expanduser()
    return ClientRuntime(name, engine, made.fleet, finder(made.method, evaluator), folder, codec)


def _all_of_it(made: Experiment, name: str) -> ClientData:
    data, sizes = made.dataset, simulation(made).client_data.sizes
    return ClientData(data, {name: torch.arange(len(data.train))}, {name: torch.arange(len(data.test))}, sizes)


def introduced(config: Config) -> Config:
    """What a device says of itself before it knows of any run."""
    said: dict[str, Any] = {"index": number_of(config)}
    if config.get("machine"):
        said["machine"] = json.loads(Path(str(config["machine"])).read_text("utf-8"))
    return said


def number_of(config: Config) -> int:
    return int(config["device"] if "device" in config else config["partition-id"])  # the latter is Flower's own word


def files_of(config: Config) -> tuple[str, ...]:
    return tuple(name for name in str(config.get("with", "")).split(",") if name)


def loader(path: Path) -> Callable[[], Dataset]:
    """A file's `load`, by which a device reads what is its own alone."""
    found = getattr(module_of(path), "load", None)
    if not callable(found):
        hint = "def load() -> Dataset, as in docs/add_a_dataset.md"
        raise RecipeError([RecipeIssue((), "LOAD_MISSING", f"there is no function load in {path}", hint)], str(path))
    return cast("Callable[[], Dataset]", found)


def in_place_of(usual: Callable[..., Dataset] | None, own: Callable[[], Dataset]) -> Callable[..., Dataset]:
    """Takes whatever settings the recipe's data set takes, and needs none."""

    def read(**settings: Any) -> Dataset:
        return own()

    return wraps(usual)(read) if usual else read


def tables_of(files: tuple[str, ...]) -> Registry:
    tables = Registry()
    for file in files:
        tables = tables.with_file(Path(file))
    return tables


@lru_cache(maxsize=4)
def _assembled(recipe: str, data: str, files: tuple[str, ...], own: str, precision: torch.dtype) -> Experiment:
    """Once for many questions, where a process lives that long."""
    tables, said = tables_of(files), json.loads(recipe)
    if own:
        name = said["data"]["dataset"]
        tables = tables.and_also(datasets={name: in_place_of(tables.datasets.get(name), loader(Path(own)))})
    return assemble(load(said, tables), tables, data_folder(data))
