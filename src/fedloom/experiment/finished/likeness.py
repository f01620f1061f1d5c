"""How alike trained models see the same test examples, layer by layer: two runs', or those of one run's tiers."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from ...engines import Memory
from ...evaluation.cka import cka_map, features
from ...fleet import Carried, DeviceModel, Tier
from ...tensors import Parcel
from ..assembly.assemble import Experiment, assemble
from ..recipes.problems import Problem, RecipeError, nearest
from ..recipes.tables import Tables
from ..running.run import one_thread
from .carried import carried
from .supernet import finished_recipe


@dataclass(frozen=True)
class Likeness:
    """`values[i][j]`: linear CKA of the first model's layer i and the second's layer j."""

    rows: list[str]
    columns: list[str]
    values: list[list[float]]


def likeness(first: Path, second: Path, tier: str | None, examples: int, tables: Tables, data: Path) -> Likeness:
    with one_thread():
        one, other = (_features(folder, tier, examples, tables, data) for folder in (first, second))
    if len(next(iter(one.values()))) != len(next(iter(other.values()))):
        raise RecipeError([Problem((), "RUN_DATA", "the two runs have different test examples")], str(second))
    return Likeness(list(one), list(other), cka_map(one, other))


FILE = "likeness.json"
EXAMPLES = 128


def tiers_alike(experiment: Experiment, server: Parcel, number: int, folder: Path) -> list[dict[str, Any]]:
    """Every tier's model after the last round, of this number, against the largest tier's: the one that the server
    has, else that of one of its devices."""
    largest = experiment.fleet.largest.name
    x = experiment.dataset.preparation(experiment.dataset.test.x[:EXAMPLES])
    found = {
        tier.name: _of_server(tier, folder) or _of_device(tier, experiment, server, number)
        for tier in experiment.fleet.served
    }
    seen = {name: features(*one, x) for name, one in found.items() if one}
    if not seen.get(largest):
        return []
    return [
        {"tier": name, "against": largest, "layers": list(seen[name]), "layers_against": list(seen[largest]),
         "cka": _plain(cka_map(seen[name], seen[largest]))}
        for name in seen
        if seen[name]
    ]  # fmt: skip


def _of_server(tier: Tier, folder: Path) -> Carried | None:
    file = folder / "models" / f"{tier.name}.safetensors"
    return (tier.model, load_file(file)) if file.is_file() else None


def _of_device(tier: Tier, experiment: Experiment, server: Parcel, number: int) -> Carried | None:
    """Of the tier's first device that has learned, if any has. A device that is none of this process shows nothing."""
    candidates = [
        one
        for one in experiment.method.candidates(server).values()
        if isinstance(one, DeviceModel) and (not one.tiers or tier.name in one.tiers)
    ]
    devices = [device for device in experiment.fleet.devices(number) if device.tier == tier.name]
    if not candidates or not devices or not isinstance(experiment.memory, Memory):
        return None
    learned = experiment.memory.committed
    device = next((one for one in devices if one.name in learned), devices[0])
    return carried(experiment, device, candidates[0], number)


def _plain(values: list[list[float]]) -> list[list[float | None]]:
    """What sees no difference between examples is like nothing."""
    return [[None if math.isnan(one) else round(one, 6) for one in line] for line in values]


def _features(folder: Path, tier: str | None, examples: int, tables: Tables, data: Path) -> dict[str, Tensor]:
    experiment = assemble(finished_recipe(folder, tables), tables, data)
    tiers = {one.name: one.model for one in experiment.fleet.served}
    name = tier or experiment.fleet.largest.name
    if name not in tiers:
        raise RecipeError([Problem((), "TIER_NAME", f"there is no tier {name!r}", nearest(name, tiers))], str(folder))
    x = experiment.dataset.preparation(experiment.dataset.test.x[:examples])
    return features(tiers[name], load_file(folder / "models" / f"{name}.safetensors"), x)
