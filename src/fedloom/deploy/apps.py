"""The two Flower apps of a deployment: `server` runs the experiment, `client` answers its requests on a device."""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

from ..evaluation import BatchNormStatistics
from ..fleet import Fleet
from ..flower.apps import Config, client_app, server_app
from ..flower.messages import Grid
from ..recipe.errors import RecipeIssue
from ..recipe.load import LoadedRecipe, load
from ..recipe.paths import resolve_data_folder
from ..runs.build import assemble, build, check_deployment
from ..runs.data import data_spec_of, read_data
from ..runs.folder import read_manifest
from ..runs.recorder import record_rounds
from ..runs.resume import read_resume_point
from .processes import count_restarts
from .proxy import read_rejected_connections
from .registry import PROXY_LOG, read_fleet_registry
from .remote import attach_flower, build_node_registry
from .runtime import build_runtime, describe_device, extension_files, load_extensions
from .server import report_launch
from .tier_assignment import assign_tiers, identify_by_key


def serve(grid: Grid, config: Config) -> None:
    """Run an experiment with real devices.

    `config` has `recipe`, `out` (resumed if it exists), `data-dir` and `with`; and for a fleet whose devices are known
    by their keys `fleet`, its folder, and `launch`, by which its supervisor recognizes this process.
    """
    fleet_folder = Path(str(config["fleet"])) if config.get("fleet") else None
    launch = str(config.get("launch", ""))
    with report_launch(fleet_folder, launch) if fleet_folder and launch else nullcontext():
        _serve(grid, config, fleet_folder)


def _serve(grid: Grid, config: Config, fleet_folder: Path | None) -> None:
    registries, out = load_extensions(extension_files(config)), Path(str(config["out"]))
    data, exists = resolve_data_folder(str(config.get("data-dir", ""))), out.exists()
    if exists and read_manifest(out)["status"] == "finished":
        return
    loaded = load(out / "recipe.toml" if exists else str(config["recipe"]), registries)
    dataset = read_data(loaded, registries, data)
    fleet, method = build(loaded, registries, data_spec_of(dataset))
    check_deployment(loaded, method)
    _check_statistics(loaded, fleet)
    if fleet_folder is None:
        nodes = build_node_registry(grid, fleet)
    else:
        enrolled = read_fleet_registry(fleet_folder)
        enrolled.check_size(loaded)
        restarts = partial(count_restarts, fleet_folder / "flower")
        nodes = build_node_registry(grid, fleet, identify_by_key(enrolled, fleet), restarts)
        if not exists:  # a resumed run keeps the tiers in its recipe
            loaded = assign_tiers(loaded, registries, data, fleet, enrolled, nodes.meet())
    experiment = assemble(loaded, registries, data, dataset)
    if fleet_folder is not None:
        rejected = partial(read_rejected_connections, fleet_folder / PROXY_LOG, experiment.state)
        nodes = replace(nodes, read_rejected=rejected)
    experiment = replace(attach_flower(experiment, nodes), deployed=True)
    since = read_resume_point(out, experiment) if exists else None
    for _ in record_rounds(experiment, out, since):
        pass


def _check_statistics(loaded: LoadedRecipe, fleet: Fleet) -> None:
    """Raise if batch norm statistics would need batches with examples of several devices."""
    query = BatchNormStatistics(**loaded.recipe.evaluation.statistics).query
    if query == "pooled" and any(tier.model.statistics() for tier in fleet.active_tiers):
        message = "static batch norm with pooled statistics needs the examples of all devices in one place"
        hint = 'set evaluation.statistics = { query = "per_device" }, or model.normalization = "group"'
        raise loaded.error(RecipeIssue(("evaluation", "statistics"), "SIMULATION_ONLY", message, hint))


client = client_app(build_runtime, describe_device)
server = server_app(serve)
