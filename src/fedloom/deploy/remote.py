"""An experiment whose devices are asked by Flower's messages: simulated ones on Ray, or real ones.

Method, gate, checkpoints and rows are those of any run. Devices keep what they remember on their own disks.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from ..engines.in_process import one_after_the_other
from ..fleet import Fleet
from ..recipe.errors import RecipeIssue
from ..recipe.registry import Registry
from ..runs.build import Experiment, simulation
from .runtime import Config, introduced, runtime_of, tables_of

if TYPE_CHECKING:
    from ..flower.messages import Grid
    from ..flower.nodes import NodeRegistry, Place


MADE_UP = ("dropout", "stragglers", "outages", "corrupt")  # faults that only a simulation in one process has
DEVICES = "devices"  # in a run's folder, where simulated ones have their disks


def engaged(experiment: Experiment, tables: Registry, data: Path, folder: Path) -> Experiment:
    """With the engine that its recipe names, for a run in this folder."""
    loaded = experiment.loaded
    match loaded.recipe.engine.kind:
        case "in_process":
            return experiment
        case _ if find_spec("flwr") is None:
            said, hint = "Flower is not installed", "pip install 'fedloom[flower]'"
            raise loaded.error(RecipeIssue(("engine", "kind"), "EXTRA_MISSING", said, hint))
        case "flower":
            hint = "fedloom deploy server serves it; --engine flower-sim simulates it"
            raise loaded.error(RecipeIssue(("engine", "kind"), "DEPLOYMENT", "this recipe is for real devices", hint))
        case _:
            return _on_ray(experiment, tables, data, folder)


def roster_over(grid: "Grid", fleet: Fleet, place: "Place | None" = None) -> "NodeRegistry":
    """Who is reached over a grid; `place` says which device a node is, by default that of the number it names."""
    from ..flower.messages import MessageClient
    from ..flower.nodes import NodeRegistry

    return NodeRegistry(MessageClient(grid), place or partial(numbered, fleet), fleet.size)


def over_flower(
    experiment: Experiment, roster: "NodeRegistry", hang_up: Callable[[], None] = lambda: None
) -> Experiment:
    """The same experiment with the devices on a roster."""
    from ..flower.engine import Flower

    loaded, standing = experiment.loaded, experiment.standing
    _refuse_made_up(experiment)
    engine = Flower(
        inner=replace(simulation(experiment), carry=one_after_the_other),  # Flower's threads do not bear a fork
        roster=roster,
        recipe=json.loads(json.dumps(loaded.recipe.document())),
        run=lambda: str(standing.others.setdefault("run", uuid4().hex)),
        patience=loaded.recipe.faults.deadline or math.inf,
        hang_up=hang_up,
    )
    return replace(experiment, engine=engine, faults=replace(experiment.faults, engine=engine))


def _on_ray(experiment: Experiment, tables: Registry, data: Path, folder: Path) -> Experiment:
    _refuse_made_up(experiment)
    _refuse_unnamed(experiment, tables)
    from ..flower.apps import client_app
    from ..flower.ray import RayGrid  # heavy, so what is refused is refused first

    own = {
        "data-dir": str(data.resolve()),
        "folder": str((folder / DEVICES).resolve()),
        "with": ",".join(str(file) for file in tables.files),
    }
    grid = RayGrid(client_app(partial(_home_on_ray, own), introduced), experiment.fleet.size)
    return over_flower(experiment, roster_over(grid, experiment.fleet), grid.close)


def _home_on_ray(own: Config, recipe: Mapping[str, Any], config: Config) -> Any:
    return runtime_of(recipe, {**config, **own})


def numbered(fleet: Fleet, node: int, said: Mapping[str, Any]) -> str | None:
    number = said.get("index")
    return fleet.name(number) if type(number) is int and 0 <= number < fleet.size else None


def _refuse_made_up(experiment: Experiment) -> None:
    loaded = experiment.loaded
    part = loaded.recipe.faults
    for key in MADE_UP:
        if getattr(part, key):
            said = f"{key} is made up, and only for simulations in one process; these devices have faults of their own"
            raise loaded.error(RecipeIssue(("faults", key), "SIMULATION_ONLY", said, "leave it out"))


def _refuse_unnamed(experiment: Experiment, tables: Registry) -> None:
    """Other machines know only names that come from files."""
    known = tables_of(tuple(str(file) for file in tables.files))
    for name in ("methods", "models", "datasets"):
        unknown = getattr(tables, name).keys() - getattr(known, name).keys()
        if unknown:
            said = f"{sorted(unknown)[0]!r} is known to this process alone"
            hint = "put it into a file and name that by --with"
            raise experiment.loaded.error(RecipeIssue(("engine", "kind"), "OWN_NAMES", said, hint))
