"""The trained models of a finished run: a tier's, one that a device keeps, or a sub-net of so many multiply-adds.

The model that a device keeps, looked at: with it the device is judged, statistics of its own examples included.

Which model of a run is wanted, and for what kind of input.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from safetensors.torch import load_file
from torch import Tensor

from ..fleet import Device, DeviceModel
from ..models import Model, cost
from ..recipe.errors import RecipeError, RecipeIssue, nearest
from ..recipe.load import load
from ..recipe.registry import Registry
from ..runs.build import Experiment, assemble, simulation
from ..runs.checkpoint import FOLDER, Checkpoints
from ..runs.final_models import carried
from ..runs.folder import read_manifest, read_rows
from ..runs.loop import one_thread
from ..runs.recorder import put_back
from ..tensors import Tensors
from .subnets import Budget, open_supernet, search

Input = Literal["stored", "prepared"]
"""Examples as they are stored, prepared inside the exported file; or as the model itself takes them."""


@dataclass(frozen=True)
class ModelSelector:
    """One of the three; else the largest tier's."""

    tier: str | None = None
    device: str | None = None
    macs: int | None = None


SUBNETS = 500  # that are drawn to find the largest


@dataclass(frozen=True)
class Trained:
    """A model with its weights and the statistics it is judged with, and what the run says of it."""

    name: str  # fit for a file
    candidate: str
    tier: str
    device: str
    model: Model
    weights: Tensors
    round: int
    judged: Mapping[str, Mapping[str, float]]  # test -> metric -> value
    own_tests: Tensor | None = None  # rows of the test set, where it is one device's


def finished(folder: Path, tables: Registry, data: Path) -> Experiment:
    """A finished run opened again, with the data that it was made with."""
    if not (folder / "manifest.json").is_file():
        raise wrong(folder, "RUN_FOLDER", "this is not the folder of a run", "fedloom run my.toml --out RUN makes one")
    said = read_manifest(folder)
    if said.get("status") != "finished":
        raise wrong(folder, "RUN_FOLDER", f"this run is {said.get('status')}", "fedloom resume finishes it")
    experiment = assemble(load(folder / "recipe.toml", tables), tables, data)
    if experiment.dataset.fingerprint() != said.get("data"):
        why = "the data is not what the run was made with, so what was measured would mean nothing"
        raise wrong(folder, "RUN_DATA", why, "say its --data-dir")
    return experiment


def trained(folder: Path, experiment: Experiment, selector: ModelSelector, tables: Registry, data: Path) -> Trained:
    if selector.device is not None:
        return _of_device(folder, experiment, selector.device)
    if selector.macs is not None:
        return _of_size(folder, experiment, selector.macs, tables, data)
    return _of_tier(folder, experiment, selector.tier)


def _of_tier(folder: Path, experiment: Experiment, said: str | None) -> Trained:
    """Of the largest, if none is said."""
    tiers = {tier.name: tier for tier in experiment.fleet.active_tiers}
    name = said or experiment.fleet.largest.name
    if name not in tiers:
        raise wrong(folder, "TIER_NAME", f"there is no tier {name!r}", nearest(name, tiers))
    file = folder / "models" / f"{name}.safetensors"
    if not file.is_file():
        why = f"{experiment.loaded.recipe.method.name} has no model for a whole tier: every device keeps its own"
        raise wrong(folder, "TIER_MODEL", why, f"say --device {experiment.fleet.name(0)}")
    last, judged = _judged(folder, "server", name, "")
    return Trained(name, "server", name, "", tiers[name].model, load_file(file), last, judged)


def _of_device(folder: Path, experiment: Experiment, said: str) -> Trained:
    noticed: list[str] = []
    point = Checkpoints(folder / FOLDER).newest(noticed.append)
    if point is None:
        why = f"there is no checkpoint in which devices' models could be found {' '.join(noticed)}".strip()
        raise wrong(folder, "CHECKPOINT_MISSING", why)
    device = _named(folder, experiment, said, point.number)
    candidates = {
        name: one
        for name, one in experiment.method.eval_targets(point.server).items()
        if isinstance(one, DeviceModel) and (not one.tiers or device.tier in one.tiers)
    }
    if not candidates:
        why = f"{experiment.loaded.recipe.method.name} keeps no model on device {device.name}: it has its tier's"
        raise wrong(folder, "DEVICE_MODEL", why, f"say --tier {device.tier}")
    name, candidate = next(iter(candidates.items()))
    put_back(experiment, point)
    with one_thread():
        model, weights = carried(experiment, device, candidate, point.number)
    last, judged = _judged(folder, name, device.tier, device.name)
    rows = simulation(experiment).client_data.tests(device)
    return Trained(f"device-{device.name}", name, device.tier, device.name, model, weights, last, judged, rows)


def _named(folder: Path, experiment: Experiment, said: str, round_number: int) -> Device:
    fleet = experiment.fleet
    if not said.isdecimal() or int(said) >= fleet.size:
        why = f"there is no device {said!r}"
        raise wrong(folder, "DEVICE_NAME", why, f"devices are {fleet.name(0)} to {fleet.name(fleet.size - 1)}")
    return fleet.device(int(said), round_number)


def _of_size(folder: Path, experiment: Experiment, macs: int, tables: Registry, data: Path) -> Trained:
    """The one with most multiply-adds, and of those the most parameters, of many that take no more."""
    budget = Budget("macs", macs)
    sought = search(open_supernet(folder, tables, data), SUBNETS, 0, budget)
    able = [net for net in sought.nets if budget.fits(net)]
    net = max(able, key=lambda one: (cost(one).macs, cost(one).parameters))
    equal = [tier.name for tier in experiment.fleet.active_tiers if tier.model.is_the_same_as(net)]
    if equal:
        return _of_tier(folder, experiment, equal[0])
    weights, last = sought.weights(net), experiment.loaded.recipe.rounds
    return Trained(f"macs-{cost(net).macs}", "server", "", "", net, weights, last, {})


def _judged(folder: Path, candidate: str, tier: str, device: str) -> tuple[int, dict[str, dict[str, float]]]:
    """The last round in which it was judged, and how."""
    rows = [row for row in read_rows(folder) if (row.candidate, row.tier, row.device) == (candidate, tier, device)]
    last, found = max((row.round for row in rows), default=0), dict[str, dict[str, float]]()
    for row in rows:
        if row.round == last:
            found.setdefault(row.test, {})[row.metric] = row.value
    return last, found


def wrong(place: Path, code: str, said: str, hint: str = "") -> RecipeError:
    return RecipeError([RecipeIssue((), code, said, hint)], str(place))
