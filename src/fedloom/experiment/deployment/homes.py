"""What a device has, put together on the device itself from the recipe that comes with every question."""

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...engines import Shelf
from ..assembly.assemble import Experiment, assemble, finder, simulation
from ..assembly.coding import build_codec
from ..assembly.sources import holds_its_own
from ..recipes.load import load
from ..recipes.places import data_folder
from ..recipes.tables import Tables

if TYPE_CHECKING:
    from ...engines.flower.device import Home

Config = Mapping[str, Any]
"""Of a node, as whoever started it has said: `device`, its number in the fleet; `data-dir`; `folder`, for what it
remembers; `with`, files of own names with commas between."""


def home_of(recipe: Mapping[str, Any], config: Config) -> "Home":
    """A device's examples are its part of the recipe's data, as in a simulation; or all that it finds."""
    from ...engines.flower.device import Home

    data = str(config.get("data-dir", ""))
    made = _assembled(json.dumps(recipe), data, files_of(config), torch.get_default_dtype())
    name, engine, judge = made.fleet.name(number_of(config)), simulation(made), made.judge
    if holds_its_own(made.loaded):
        engine = replace(engine, shelf=_all_of_it(made, name))
        judge = replace(judge, tests=("local",))  # what a device finds is nobody else's test
    codec = build_codec(made.loaded.recipe)
    folder = Path(str(config.get("folder", "devices"))).expanduser()
    return Home(name, engine, made.fleet, finder(made.method, judge), folder, codec)


def _all_of_it(made: Experiment, name: str) -> Shelf:
    data, sizes = made.dataset, simulation(made).shelf.sizes
    return Shelf(data, {name: torch.arange(len(data.train))}, {name: torch.arange(len(data.test))}, sizes)


def introduced(config: Config) -> Config:
    """What a device says of itself before it knows of any run."""
    return {"index": number_of(config)}


def number_of(config: Config) -> int:
    return int(config["device"] if "device" in config else config["partition-id"])  # the latter is Flower's own word


def files_of(config: Config) -> tuple[str, ...]:
    return tuple(name for name in str(config.get("with", "")).split(",") if name)


def tables_of(files: tuple[str, ...]) -> Tables:
    tables = Tables()
    for file in files:
        tables = tables.with_file(Path(file))
    return tables


@lru_cache(maxsize=4)
def _assembled(recipe: str, data: str, files: tuple[str, ...], precision: torch.dtype) -> Experiment:
    """Once for many questions, where a process lives that long."""
    tables = tables_of(files)
    return assemble(load(json.loads(recipe), tables), tables, data_folder(data))
