"""The trained models of a finished run: of a tier, of one device, or a subnet within a budget of multiply-adds."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from ..evaluation.cka import cka_map, features
from ..fleet import Device, DeviceModel
from ..methods import headline_test
from ..models import Model, compute_cost
from ..recipe.errors import recipe_error
from ..recipe.registries import Registries
from ..registry import suggest
from ..results import Record, Result
from ..runs.checkpoint import FOLDER, Checkpoints
from ..runs.experiment import Experiment
from ..runs.final_models import load_device_model
from ..runs.folder import read_rows
from ..runs.loop import eval_targets, single_thread
from ..runs.recorder import restore_experiment
from ..runs.resume import open_finished_run
from ..tensors import Tensors
from ..wording import pluralize
from .subnets import UNTRAINED, Budget, open_supernet, start_search


@dataclass(frozen=True)
class ModelSelector:
    """At most one of the three; without any, the largest tier's model."""

    tier: str | None = None
    device: str | None = None
    macs: int | None = None


SUBNETS = 500  # sampled to find the largest within a budget


@dataclass(frozen=True)
class TrainedModel:
    """A model with its weights, batch-norm statistics included, and the metrics that the run recorded."""

    name: str  # for files
    candidate: str
    tier: str
    device: str
    model: Model
    weights: Tensors
    round: int
    metrics: Mapping[str, Mapping[str, float]]  # test -> metric -> value
    local_tests: Tensor | None = None  # rows of the test set that the device holds
    is_trained: bool = True  # False: a slice of the trained model, of a size that was never trained


def select_model(
    folder: Path, experiment: Experiment, selector: ModelSelector, registries: Registries, data: Path
) -> TrainedModel:
    if selector.device is not None:
        return _device_model(folder, experiment, selector.device)
    if selector.macs is not None:
        return _subnet_model(folder, experiment, selector.macs, registries, data)
    return _tier_model(folder, experiment, selector.tier)


def _tier_model(folder: Path, experiment: Experiment, tier: str | None) -> TrainedModel:
    tiers = {tier.name: tier for tier in experiment.fleet.active_tiers}
    name = tier or experiment.fleet.largest.name
    if name not in tiers:
        raise recipe_error(folder, "TIER_NAME", f"there is no tier {name!r}", suggest(name, tiers))
    file = folder / "models" / f"{name}.safetensors"
    if not file.is_file():
        message = f"{experiment.loaded.recipe.method.name} has no model per tier: every device keeps its own"
        raise recipe_error(folder, "TIER_MODEL", message, f"pass --device {experiment.fleet.name(0)}")
    last, metrics = _read_metrics(folder, "server", name, "")
    return TrainedModel(name, "server", name, "", tiers[name].model, load_file(file), last, metrics)


def _device_model(folder: Path, experiment: Experiment, name: str) -> TrainedModel:
    checkpoint = Checkpoints(folder / FOLDER).read_newest()
    if checkpoint is None:
        message = "there is no usable checkpoint, which holds the devices' models"
        raise recipe_error(folder, "CHECKPOINT_MISSING", message)
    device = _find_device(folder, experiment, name, checkpoint.number)
    targets = {
        candidate: target
        for candidate, target in eval_targets(experiment, checkpoint.server).items()
        if isinstance(target, DeviceModel) and (not target.tiers or device.tier in target.tiers)
    }
    if not targets:
        message = f"{experiment.loaded.recipe.method.name} keeps no model on device {device.name}: it uses its tier's"
        raise recipe_error(folder, "DEVICE_MODEL", message, f"pass --tier {device.tier}")
    candidate, target = next(iter(targets.items()))
    restore_experiment(experiment, checkpoint)
    with single_thread():
        model, weights = load_device_model(experiment, device, target, checkpoint.number)
    last, metrics = _read_metrics(folder, candidate, device.tier, device.name)
    rows = experiment.simulator.client_data.tests(device)
    return TrainedModel(
        f"device-{device.name}", candidate, device.tier, device.name, model, weights, last, metrics, rows
    )


def _find_device(folder: Path, experiment: Experiment, name: str, round_number: int) -> Device:
    fleet = experiment.fleet
    if not name.isdecimal() or int(name) >= fleet.size:
        hint = f"devices are {fleet.name(0)} to {fleet.name(fleet.size - 1)}"
        raise recipe_error(folder, "DEVICE_NAME", f"there is no device {name!r}", hint)
    return fleet.device(int(name), round_number)


def _subnet_model(folder: Path, experiment: Experiment, macs: int, registries: Registries, data: Path) -> TrainedModel:
    """The largest of the sampled subnets that fit: most multiply-adds, then most parameters."""
    budget = Budget("macs", macs)
    search = start_search(open_supernet(folder, registries, data), SUBNETS, 0, budget)
    fitting = [net for net in search.nets if budget.fits(net)]
    net = max(fitting, key=lambda net: (compute_cost(net).macs, compute_cost(net).parameters))
    equal = [tier.name for tier in experiment.fleet.active_tiers if tier.model.is_equivalent(net)]
    if equal:
        return _tier_model(folder, experiment, equal[0])
    weights, last = search.weights(net), experiment.loaded.recipe.rounds
    is_trained = search.supernet.training_of(net) != UNTRAINED
    name = f"macs-{compute_cost(net).macs}"
    return TrainedModel(name, "server", "", "", net, weights, last, {}, is_trained=is_trained)


def _read_metrics(folder: Path, candidate: str, tier: str, device: str) -> tuple[int, dict[str, dict[str, float]]]:
    """The last round in which the model was evaluated, and its metrics by test."""
    rows = [row for row in read_rows(folder) if (row.candidate, row.tier, row.device) == (candidate, tier, device)]
    last, metrics = max((row.round for row in rows), default=0), dict[str, dict[str, float]]()
    for row in rows:
        if row.round == last:
            metrics.setdefault(row.test, {})[row.metric] = row.value
    headline = headline_test("personalized" if device else "global", metrics)
    return last, dict(sorted(metrics.items(), key=lambda one: one[0] != headline))


@dataclass(frozen=True, repr=False)
class CkaMap(Result):
    """How similarly the layers of two models represent the same examples.

    Parameters
    ----------
    rows : layers of the first model.
    columns : layers of the second.
    values : `values[i][j]`, linear CKA of the first model's layer i and the second's layer j.
    first, second : what the models are.
    examples : the number of test examples.
    """

    rows: list[str]
    columns: list[str]
    values: list[list[float]]
    first: str = "one model"
    second: str = "another"
    examples: int = 0

    @property
    def title(self) -> str:
        models = f"the layers of {self.first} (rows) with those of {self.second} (columns)"
        return (
            f"linear CKA of {models} on {pluralize(self.examples, 'test example')}; 1: equal up to rotation and scale"
        )

    def records(self) -> list[Record]:
        return [
            {"layer": name, **dict(zip(self.columns, line, strict=True))}
            for name, line in zip(self.rows, self.values, strict=True)
        ]

    def content(self) -> dict[str, Any]:
        return {"rows": self.rows, "columns": self.columns, "cka": self.values}


def compute_cka(
    first: Path, second: Path, tier: str | None, examples: int, registries: Registries, data: Path
) -> CkaMap:
    with single_thread():
        one, two = (_layer_features(folder, tier, examples, registries, data) for folder in (first, second))
    (first_tier, rows), (second_tier, columns) = one, two
    count = len(next(iter(rows.values())))
    if count != len(next(iter(columns.values()))):
        raise recipe_error(second, "RUN_DATA", "the two runs have different test examples")
    names = f"{first}, tier {first_tier}", f"{second}, tier {second_tier}"
    return CkaMap(list(rows), list(columns), cka_map(rows, columns), *names, count)


def _layer_features(
    folder: Path, tier: str | None, examples: int, registries: Registries, data: Path
) -> tuple[str, dict[str, Tensor]]:
    """The tier, and the features of its model by layer."""
    experiment = open_finished_run(folder, registries, data, from_result=True)
    tiers = {tier.name: tier.model for tier in experiment.fleet.active_tiers}
    name = tier or experiment.fleet.largest.name
    if name not in tiers:
        raise recipe_error(folder, "TIER_NAME", f"there is no tier {name!r}", suggest(name, tiers))
    x = experiment.dataset.preparation(experiment.dataset.test.x[:examples])
    weights = load_file(folder / "models" / f"{name}.safetensors")
    return name, features(tiers[name], weights, x, with_logits=True, compute=experiment.simulator.compute)
