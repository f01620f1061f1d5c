"""How alike trained models see the same test examples, layer by layer: two runs', or those of one run's tiers."""

from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from ..evaluation.cka import cka_map, features
from ..recipe.errors import RecipeError, RecipeIssue, nearest
from ..recipe.registry import Registry
from ..runs.build import assemble
from ..runs.loop import one_thread
from .subnets import finished_recipe


@dataclass(frozen=True)
class CkaMap:
    """`values[i][j]`: linear CKA of the first model's layer i and the second's layer j."""

    rows: list[str]
    columns: list[str]
    values: list[list[float]]


def cka(first: Path, second: Path, tier: str | None, examples: int, tables: Registry, data: Path) -> CkaMap:
    with one_thread():
        one, other = (_features(folder, tier, examples, tables, data) for folder in (first, second))
    if len(next(iter(one.values()))) != len(next(iter(other.values()))):
        raise RecipeError([RecipeIssue((), "RUN_DATA", "the two runs have different test examples")], str(second))
    return CkaMap(list(one), list(other), cka_map(one, other))


def _features(folder: Path, tier: str | None, examples: int, tables: Registry, data: Path) -> dict[str, Tensor]:
    experiment = assemble(finished_recipe(folder, tables), tables, data)
    tiers = {one.name: one.model for one in experiment.fleet.active_tiers}
    name = tier or experiment.fleet.largest.name
    if name not in tiers:
        raise RecipeError(
            [RecipeIssue((), "TIER_NAME", f"there is no tier {name!r}", nearest(name, tiers))], str(folder)
        )
    x = experiment.dataset.preparation(experiment.dataset.test.x[:examples])
    return features(tiers[name], load_file(folder / "models" / f"{name}.safetensors"), x)
