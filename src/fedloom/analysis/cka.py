"""Linear CKA between the layers of two runs' models on the same test examples."""

from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from ..evaluation.cka import cka_map, features
from ..recipe.errors import recipe_error, suggest
from ..recipe.registry import Registry
from ..runs.loop import single_thread
from ..runs.resume import open_finished_run


@dataclass(frozen=True)
class CkaMap:
    """`values[i][j]`: linear CKA of the first model's layer i and the second's layer j."""

    rows: list[str]
    columns: list[str]
    values: list[list[float]]


def compute_cka(first: Path, second: Path, tier: str | None, examples: int, registry: Registry, data: Path) -> CkaMap:
    with single_thread():
        rows, columns = (_features(folder, tier, examples, registry, data) for folder in (first, second))
    if len(next(iter(rows.values()))) != len(next(iter(columns.values()))):
        raise recipe_error(second, "RUN_DATA", "the two runs have different test examples")
    return CkaMap(list(rows), list(columns), cka_map(rows, columns))


def _features(folder: Path, tier: str | None, examples: int, registry: Registry, data: Path) -> dict[str, Tensor]:
    experiment = open_finished_run(folder, registry, data, from_result=True)
    tiers = {tier.name: tier.model for tier in experiment.fleet.active_tiers}
    name = tier or experiment.fleet.largest.name
    if name not in tiers:
        raise recipe_error(folder, "TIER_NAME", f"there is no tier {name!r}", suggest(name, tiers))
    x = experiment.dataset.preparation(experiment.dataset.test.x[:examples])
    return features(tiers[name], load_file(folder / "models" / f"{name}.safetensors"), x)
