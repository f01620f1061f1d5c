"""Run an experiment on Flower's messages, with devices simulated on Ray or with real ones.

Method, admission gate, checkpoints and rows are those of any run. Devices keep their state on their own disks.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..engines import InlineExecutor
from ..fleet import Fleet
from ..recipe.errors import RecipeIssue
from ..recipe.registry import Registry
from ..runs.experiment import Experiment
from .runtime import NodeConfig, build_runtime, describe_device, load_extensions

if TYPE_CHECKING:
    from ..flower.apps import ClientRuntime
    from ..flower.messages import Grid
    from ..flower.nodes import IdentifyNode, NodeRegistry


SIMULATED_FAULTS = ("dropout", "stragglers", "outages", "corrupt")  # only in process
DEVICES = "devices"  # subfolder of a run for the state of simulated devices


def attach_engine(experiment: Experiment, registry: Registry, data: Path, folder: Path) -> Experiment:
    """The experiment with the engine that its recipe names, for a run in this folder."""
    loaded = experiment.loaded
    match loaded.recipe.engine.kind:
        case "in_process":
            return experiment
        case _ if find_spec("flwr") is None:
            message, hint = "Flower is not installed", "pip install 'fedloom[flower]'"
            raise loaded.error(RecipeIssue(("engine", "kind"), "EXTRA_MISSING", message, hint))
        case "flower":
            hint = "fedloom deploy server serves it; --engine flower-sim simulates it"
            raise loaded.error(RecipeIssue(("engine", "kind"), "DEPLOYMENT", "this recipe is for real devices", hint))
        case _:
            return _attach_ray(experiment, registry, data, folder)


def build_node_registry(
    grid: "Grid", fleet: Fleet, identify: "IdentifyNode | None" = None, restarts: Callable[[], int] = lambda: 0
) -> "NodeRegistry":
    """The nodes reached over a grid.

    Parameters
    ----------
    identify
        Resolves a node to a device; by default the one whose index the node reports.
    restarts
        How often the SuperLink has restarted so far; messages in flight may then be lost.
    """
    from ..flower.messages import MessageClient
    from ..flower.nodes import NodeRegistry

    return NodeRegistry(MessageClient(grid, restarts=restarts), identify or partial(device_by_index, fleet), fleet.size)


def attach_flower(
    experiment: Experiment, nodes: "NodeRegistry", on_close: Callable[[], None] = lambda: None
) -> Experiment:
    """The same experiment with the devices of a node registry."""
    from ..flower.engine import Flower

    loaded = experiment.loaded
    _check_faults(experiment)
    engine = Flower(
        inner=replace(experiment.simulator, executor=InlineExecutor()),  # forking is not safe with Flower's threads
        nodes=nodes,
        recipe=json.loads(json.dumps(loaded.recipe.document())),
        run=lambda: experiment.state.run_id,
        default_timeout=loaded.recipe.faults.deadline or math.inf,
        on_close=on_close,
    )
    faults = replace(experiment.faults, simulated=False)
    return replace(experiment, engine=engine, client_states=engine.client_states, faults=faults)


def _attach_ray(experiment: Experiment, registry: Registry, data: Path, folder: Path) -> Experiment:
    _check_faults(experiment)
    _check_names(experiment, registry)
    from ..flower.apps import client_app
    from ..flower.ray import RayGrid  # slow to import, so check the recipe first

    settings = {
        "data-dir": str(data.resolve()),
        "folder": str((folder / DEVICES).resolve()),
        "with": ",".join(str(file) for file in registry.files),
    }
    grid = RayGrid(client_app(partial(_build_ray_runtime, settings), describe_device), experiment.fleet.size)
    return attach_flower(experiment, build_node_registry(grid, experiment.fleet), grid.close)


def _build_ray_runtime(settings: NodeConfig, recipe: Mapping[str, Any], config: NodeConfig) -> "ClientRuntime":
    return build_runtime(recipe, {**config, **settings})


def device_by_index(fleet: Fleet, node: int, info: Mapping[str, Any]) -> str | None:
    """The name of the device whose index a node reports; None if there is no such device."""
    index = info.get("index")
    return fleet.name(index) if type(index) is int and 0 <= index < fleet.size else None


def _check_faults(experiment: Experiment) -> None:
    loaded = experiment.loaded
    for key in SIMULATED_FAULTS:
        if getattr(loaded.recipe.faults, key):
            message = f"{key} simulates faults in one process; devices on Flower have faults of their own"
            raise loaded.error(RecipeIssue(("faults", key), "SIMULATION_ONLY", message, "leave it out"))


def _check_names(experiment: Experiment, registry: Registry) -> None:
    """Raise if the experiment uses names that were registered in this process and not by a file."""
    known = load_extensions(tuple(str(file) for file in registry.files))
    for table in ("methods", "models", "datasets"):
        unknown = getattr(registry, table).keys() - getattr(known, table).keys()
        if unknown:
            message = f"{sorted(unknown)[0]!r} is registered in this process only"
            hint = "put it into a file and name the file with --with"
            raise experiment.loaded.error(RecipeIssue(("engine", "kind"), "OWN_NAMES", message, hint))
