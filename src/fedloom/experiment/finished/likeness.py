"""How alike trained models see the same test examples, layer by layer: two runs', or those of one run's tiers."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from ...evaluation.cka import cka_map, features
from ..assembly.assemble import Experiment, assemble
from ..recipes.problems import Problem, RecipeError, nearest
from ..recipes.tables import Tables
from ..running.run import one_thread
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


def tiers_alike(experiment: Experiment, folder: Path) -> list[dict[str, Any]]:
    """Every tier's model against the largest tier's, as far as the server has them."""
    largest = experiment.fleet.largest.name
    models = {tier.name: tier.model for tier in experiment.fleet.served}
    files = {name: folder / "models" / f"{name}.safetensors" for name in models}
    if not all(file.is_file() for file in files.values()):
        return []
    x = experiment.dataset.preparation(experiment.dataset.test.x[:EXAMPLES])
    seen = {name: features(model, load_file(files[name]), x) for name, model in models.items()}
    return [
        {"tier": name, "against": largest, "layers": list(seen[name]), "layers_against": list(seen[largest]),
         "cka": _plain(cka_map(seen[name], seen[largest]))}
        for name in seen
        if seen[name] and seen[largest]
    ]  # fmt: skip


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
