"""Run an experiment on Flower's messages, with devices simulated on Ray or with real ones.

Method, admission gate, checkpoints and rows are those of any run. Devices keep their state on their own disks.
"""

import json
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..engines import InlineExecutor, Refusal
from ..fleet import Fleet
from ..flower.versions import VERSION, VERSION_KEY, explain_versions, is_compatible
from ..recipe.errors import RecipeIssue
from ..recipe.load import LoadedRecipe
from ..recipe.registries import KINDS, Registries
from ..registry import settable_parameters
from ..runs.experiment import Experiment
from ..settings import NonNegative
from .runtime import NodeConfig, build_runtime, describe_device, load_extensions

if TYPE_CHECKING:
    from ..flower.apps import ClientRuntime
    from ..flower.messages import Grid
    from ..flower.nodes import IdentifyNode, NodeRegistry


logger = logging.getLogger(__name__)

SIMULATED_FAULTS = ("dropout", "stragglers", "outages", "corrupt")  # only in process
DEVICES = "devices"  # subfolder of a run for the state of simulated devices


def attach_engine(experiment: Experiment, registries: Registries, data: Path, folder: Path) -> Experiment:
    """The experiment with the engine that its recipe names, for a run in this folder."""
    config = experiment.loaded.recipe.engine
    build = registries.engines[config.kind]
    passed = {
        "simulator": experiment.simulator, "experiment": experiment, "registries": registries, "data": data,
        "folder": folder,
    }  # fmt: skip
    named = settable_parameters(build)
    engine = build(**{name: value for name, value in passed.items() if name in named}, **config.settings)
    return engine if isinstance(engine, Experiment) else replace(experiment, engine=engine)


def flower_simulation(
    experiment: Experiment, registries: Registries, data: Path, folder: Path, num_gpus: NonNegative | None = None
) -> Experiment:
    """Devices simulated by Flower on Ray, for fleets that are larger than one machine.

    Parameters
    ----------
    experiment : the experiment.
    registries : the names that its recipe uses.
    data : the folder of the data sets.
    folder : that of the run.
    num_gpus : the share of a GPU that each process of Ray gets; None: a whole one if `engine.device` is CUDA's.
    """
    _require_flower(experiment)
    if num_gpus is None:
        num_gpus = float(experiment.simulator.compute.torch_device.type == "cuda")
    return _attach_ray(experiment, registries, data, folder, num_gpus)


def flower_fleet(experiment: Experiment) -> Experiment:
    """Real devices, reached over Flower: `fedloom deploy server` serves them."""
    _require_flower(experiment)
    hint = "fedloom deploy server serves it; --engine flower-sim simulates it"
    issue = RecipeIssue(("engine", "kind"), "DEPLOYMENT", "this recipe is for real devices", hint)
    raise experiment.loaded.error(issue)


def check_engine(loaded: LoadedRecipe, registries: Registries) -> None:
    """Raise if the engine that a recipe names would refuse the recipe."""
    if registries.engines[loaded.recipe.engine.kind] in (flower_simulation, flower_fleet):
        check_faults(loaded)


def _require_flower(experiment: Experiment) -> None:
    if find_spec("flwr") is None:
        message, hint = "Flower is not installed", "pip install 'fedloom[flower]'"
        raise experiment.loaded.error(RecipeIssue(("engine", "kind"), "EXTRA_MISSING", message, hint))


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

    find = require_same_version(identify or partial(device_by_index, fleet))
    return NodeRegistry(MessageClient(grid, restarts=restarts), find, fleet.size)


def require_same_version(identify: "IdentifyNode") -> "IdentifyNode":
    """Identify nodes, and refuse those with another major or minor version of fedloom; log other patch versions."""

    def checked(node: int, info: dict[str, Any]) -> str | Refusal | None:
        name, version = identify(node, info), info.get(VERSION_KEY)
        if not isinstance(name, str):
            return name
        if not is_compatible(version):
            return Refusal(name, "VERSION", explain_versions(version, is_server=True))
        if version != VERSION:
            logger.info("device %s: %s", name, explain_versions(version, is_server=True))
        return name

    return checked


def attach_flower(
    experiment: Experiment, nodes: "NodeRegistry", on_close: Callable[[], None] = lambda: None
) -> Experiment:
    """The same experiment with the devices of a node registry."""
    from ..flower.engine import Flower

    loaded = experiment.loaded
    check_faults(loaded)
    # after the server was restarted, a device first finishes what it was asked before
    nodes.reply_timeout = max(nodes.reply_timeout, loaded.recipe.faults.deadline or 0.0)
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


def _attach_ray(
    experiment: Experiment, registries: Registries, data: Path, folder: Path, num_gpus: float
) -> Experiment:
    check_faults(experiment.loaded)
    _check_names(experiment, registries)
    from ..flower.apps import client_app
    from ..flower.ray import RayGrid  # slow to import, so check the recipe first

    settings = {
        "data-dir": str(data.resolve()),
        "folder": str((folder / DEVICES).resolve()),
        "with": ",".join(str(file) for file in registries.files),
    }
    app = client_app(partial(_build_ray_runtime, settings), describe_device)
    grid = RayGrid(app, experiment.fleet.size, num_gpus)
    return attach_flower(experiment, build_node_registry(grid, experiment.fleet), grid.close)


def _build_ray_runtime(settings: NodeConfig, recipe: Mapping[str, Any], config: NodeConfig) -> "ClientRuntime":
    return build_runtime(recipe, {**config, **settings})


def device_by_index(fleet: Fleet, node: int, info: Mapping[str, Any]) -> str | None:
    """The name of the device whose index a node reports; None if there is no such device."""
    index = info.get("index")
    return fleet.name(index) if type(index) is int and 0 <= index < fleet.size else None


def check_faults(loaded: LoadedRecipe) -> None:
    """Raise if a recipe simulates faults of devices that have faults of their own."""
    for key in SIMULATED_FAULTS:
        if getattr(loaded.recipe.faults, key):
            message = f"{key} simulates faults in one process; devices on Flower have faults of their own"
            raise loaded.error(RecipeIssue(("faults", key), "SIMULATION_ONLY", message, "leave it out"))


def _check_names(experiment: Experiment, registries: Registries) -> None:
    """Raise if the experiment uses names that were registered in this process and not by a file."""
    known = load_extensions(tuple(str(file) for file in registries.files))
    for kind in KINDS:
        unknown = set(getattr(registries, kind)) - set(getattr(known, kind))
        if unknown:
            message = f"{sorted(unknown)[0]!r} is registered in this process only"
            hint = "put it into a file and name the file with --with"
            raise experiment.loaded.error(RecipeIssue(("engine", "kind"), "OWN_NAMES", message, hint))
