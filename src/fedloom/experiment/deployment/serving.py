"""A run with real devices, and a device of one, as the two halves of a Flower app."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ...reporting import read_manifest
from ..assembly.assemble import Experiment, assemble, refuse_deployment
from ..recipes.load import load
from ..recipes.places import data_folder
from ..recipes.problems import Problem
from ..running.record import recorded
from ..running.resume import standing_of
from .homes import Config, files_of, home_of, introduced, tables_of
from .remote import over_flower, roster_over

if TYPE_CHECKING:
    from ...engines.flower.apps import ClientApp, ServerApp
    from ...engines.flower.post import Grid


def serve(grid: "Grid", config: Config) -> None:
    """A run with real devices, as the server half of a Flower app: `recipe`, `out` (gone on with if it is there),
    `data-dir`, `with`."""
    tables, folder = tables_of(files_of(config)), Path(str(config["out"]))
    data = data_folder(str(config.get("data-dir", "")))
    begun = folder.exists()
    if begun and read_manifest(folder)["status"] == "finished":  # whoever restarts what has ended need not know
        return
    loaded = load(folder / "recipe.toml" if begun else str(config["recipe"]), tables)
    experiment = assemble(loaded, tables, data)
    refuse_deployment(loaded, experiment.method)
    _refuse_pooled(experiment)
    served = replace(over_flower(experiment, roster_over(grid, experiment.fleet)), deployed=True)
    since = standing_of(folder, served, lambda said: None) if begun else None
    for _ in recorded(served, folder, since):
        pass


def _refuse_pooled(experiment: Experiment) -> None:
    """Raise if batches would have to mix what different devices hold."""
    loaded = experiment.loaded
    pooled = experiment.judge.statistics.query == "pooled"
    if pooled and any(tier.model.statistics() for tier in experiment.fleet.served):
        said = "the statistics of static batch norm are pooled, which only a simulation can"
        hint = 'set evaluation.statistics = { query = "per_device" }, or model.normalisation = "group"'
        raise loaded.error(Problem(("evaluation", "statistics"), "SIMULATION_ONLY", said, hint))


def flower_server() -> "ServerApp":
    from ...engines.flower.apps import server_app

    return server_app(serve)


def flower_client() -> "ClientApp":
    from ...engines.flower.apps import client_app

    return client_app(home_of, introduced)
