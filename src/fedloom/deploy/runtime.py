"""What a device needs to answer requests, assembled on the device from the recipe that comes with every request."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from ..data import DataBroken, Dataset
from ..engines import ClientData
from ..flower.versions import VERSION, VERSION_KEY
from ..recipe.errors import recipe_error
from ..recipe.load import load
from ..recipe.paths import resolve_data_folder
from ..recipe.registries import Registries, import_file
from ..runs.build import assemble, build_task_registry
from ..runs.data import devices_own_data
from ..runs.experiment import Experiment

if TYPE_CHECKING:
    from ..flower.apps import ClientRuntime


NodeConfig = Mapping[str, Any]
"""Settings of a node: `device`, its index in the fleet; `data-dir`; `folder`, for its state; `with`, comma-separated
files that register names; `load`, a file whose `load()` returns its data; `machine`, a file with its measurements."""


def build_runtime(recipe: Mapping[str, Any], config: NodeConfig) -> "ClientRuntime":
    """The runtime of one device.

    Its examples are its part of the recipe's partition, as in a simulation, or with `partition.kind = "own"` all that
    it finds.
    """
    from ..flower.apps import ClientRuntime

    data, own_load = str(config.get("data-dir", "")), str(config.get("load", ""))
    experiment = _assemble(json.dumps(recipe), data, extension_files(config), own_load, torch.get_default_dtype())
    name, engine, evaluator = experiment.fleet.name(device_index(config)), experiment.simulator, experiment.evaluator
    if devices_own_data(experiment.loaded):
        engine = replace(engine, client_data=_whole_dataset(experiment, name))
        evaluator = replace(evaluator, tests=("local",))  # no other device shares its test set
    folder = Path(str(config.get("folder", "devices"))).expanduser()
    return ClientRuntime(
        name,
        engine,
        experiment.fleet,
        build_task_registry(experiment.method, evaluator),
        folder,
        experiment.compression,
    )


def _whole_dataset(experiment: Experiment, name: str) -> ClientData:
    data, simulated = experiment.dataset, experiment.simulator.client_data
    return ClientData(
        data,
        {name: torch.arange(len(data.train))},
        {name: torch.arange(len(data.test))},
        simulated.sizes,
        simulated.seed,
    )


@lru_cache(maxsize=4)
def _assemble(recipe: str, data: str, files: tuple[str, ...], own_load: str, precision: torch.dtype) -> Experiment:
    """Cached: a process may answer many requests of one run. `precision` is part of the key."""
    registries, document = load_extensions(files), json.loads(recipe)
    if own_load:
        name = document["data"]["dataset"]
        own = override_dataset(registries.datasets.get(name), import_load(Path(own_load)))
        registries = registries.with_names(datasets={name: own})
    return assemble(load(document, registries), registries, resolve_data_folder(data))


def describe_device(config: NodeConfig) -> dict[str, Any]:
    """What a device reports about itself before it takes part in a run."""
    info: dict[str, Any] = {"index": device_index(config), VERSION_KEY: VERSION}
    if config.get("machine"):
        info["machine"] = json.loads(Path(str(config["machine"])).read_text("utf-8"))
    return info


def device_index(config: NodeConfig) -> int:
    return int(config["device"] if "device" in config else config["partition-id"])  # the latter is set by Flower


def extension_files(config: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(name for name in str(config.get("with", "")).split(",") if name)


def load_extensions(files: tuple[str, ...]) -> Registries:
    """The built-in names and those that these files register."""
    registries = Registries()
    for file in files:
        registries = registries.with_file(Path(file))
    return registries


def import_load(path: Path) -> Callable[[], Dataset]:
    """The function `load` of a file, by which a device reads its own data."""
    function = getattr(import_file(path), "load", None)
    if not callable(function):
        hint = "def load() -> Dataset, as in docs/tutorials/own_data.md"
        raise recipe_error(path, "LOAD_MISSING", f"there is no function load in {path}", hint)
    return cast("Callable[[], Dataset]", function)


def override_dataset(
    original: Callable[..., Dataset] | None, load_own: Callable[[], Dataset]
) -> Callable[..., Dataset]:
    """A data set with the settings of the original, all ignored, that returns the device's own data."""

    def read(**settings: Any) -> Dataset:
        found = load_own()
        if not isinstance(found, Dataset):  # a device may lack classes, so its labels do not tell how many there are
            hint = "Return fedloom.data.as_dataset(..., classes=10) with the number of classes of the fleet."
            raise DataBroken(f"load() returned {type(found).__name__}, not a Dataset", hint)
        return found

    return wraps(original)(read) if original else read
