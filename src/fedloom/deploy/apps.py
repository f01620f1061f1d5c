"""A run with real devices, and a device of one, as the two halves of a Flower app."""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ..recipe.errors import RecipeIssue
from ..recipe.load import Loaded, load
from ..recipe.paths import data_folder
from ..recipe.registry import Registry
from ..runs.build import Experiment, assemble, refuse_deployment
from ..runs.folder import read_manifest
from ..runs.recorder import recorded
from ..runs.resume import standing_of
from .registry import GATE_LOG, FleetRegistry, read_book
from .remote import over_flower, roster_over
from .runtime import Config, files_of, introduced, runtime_of, tables_of
from .server import watched_over
from .tier_assignment import by_key, rejected_connections, seated

if TYPE_CHECKING:
    from ..flower.apps import ClientApp, ServerApp
    from ..flower.messages import Grid
    from ..flower.nodes import NodeRegistry


def serve(grid: "Grid", config: Config) -> None:
    """A run with real devices, as the server half of a Flower app: `recipe`, `out` (gone on with if it is there),
    `data-dir`, `with`; and `fleet`, the folder of a fleet whose devices are known by their keys."""
    watch = watched_over(Path(str(config["fleet"])), str(config["launch"])) if config.get("launch") else nullcontext()
    with watch:
        _served(grid, config)


def _served(grid: "Grid", config: Config) -> None:
    tables, folder = tables_of(files_of(config)), Path(str(config["out"]))
    data = data_folder(str(config.get("data-dir", "")))
    begun = folder.exists()
    if begun and read_manifest(folder)["status"] == "finished":  # whoever restarts what has ended need not know
        return
    experiment = assemble(load(folder / "recipe.toml" if begun else str(config["recipe"]), tables), tables, data)
    refuse_deployment(experiment.loaded, experiment.method)
    _refuse_pooled(experiment)
    if config.get("fleet"):
        experiment, roster = _introduced(experiment, tables, data, grid, Path(str(config["fleet"])), begun)
    else:
        roster = roster_over(grid, experiment.fleet)
    served = replace(over_flower(experiment, roster), deployed=True)
    since = standing_of(folder, served, lambda said: None) if begun else None
    for _ in recorded(served, folder, since):
        pass


def _introduced(
    experiment: Experiment, tables: Registry, data: Path, grid: "Grid", home: Path, begun: bool
) -> "tuple[Experiment, NodeRegistry]":
    """With devices that are known by their keys, each in the tier it is given when the run begins."""
    from ..flower.superlink import breaks_in

    book = read_book(home)
    refuse_other_size(experiment.loaded, book)
    roster = roster_over(grid, experiment.fleet, by_key(book, experiment.fleet))
    if not begun:
        seen = roster.meet()
        loaded = seated(experiment.loaded, tables, data, experiment.fleet, book, seen)
        experiment = assemble(loaded, tables, data)
    roster.turned_away = partial(rejected_connections, home / GATE_LOG, experiment.standing)
    roster.post.breaks = partial(breaks_in, home / "flower")
    return experiment, roster


def refuse_other_size(loaded: Loaded, book: FleetRegistry) -> None:
    size, known = loaded.recipe.data.devices, len(book.entries)
    if size != known:
        said = f"the recipe has {size} devices, the fleet {known}"
        raise loaded.error(RecipeIssue(("data", "devices"), "FLEET_SIZE", said, f"--set data.devices={known}"))


def _refuse_pooled(experiment: Experiment) -> None:
    """Raise if batches would have to mix what different devices hold."""
    loaded = experiment.loaded
    pooled = experiment.evaluator.statistics.query == "pooled"
    if pooled and any(tier.model.statistics() for tier in experiment.fleet.active_tiers):
        said = "the statistics of static batch norm are pooled, which only a simulation can"
        hint = 'set evaluation.statistics = { query = "per_device" }, or model.normalization = "group"'
        raise loaded.error(RecipeIssue(("evaluation", "statistics"), "SIMULATION_ONLY", said, hint))


def flower_server() -> "ServerApp":
    from ..flower.apps import server_app

    return server_app(serve)


def flower_client() -> "ClientApp":
    from ..flower.apps import client_app

    return client_app(runtime_of, introduced)
