"""What a finished run's method took from its devices, and how much of their data that gives away."""

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from ..evaluation.inversion import Inversion, invert, span_of
from ..fleet import Tier
from ..models import Model
from ..recipe.errors import RecipeError, RecipeIssue
from ..recipe.load import load
from ..recipe.registry import Registry
from ..runs.build import Experiment, assemble
from ..runs.final_models import SHARED
from ..runs.folder import read_manifest
from ..runs.loop import one_thread
from ..tensors import Tensors

STATISTICS_OF = 200  # examples


@dataclass(frozen=True)
class Audit:
    method: str
    leaves: str
    stays: str
    features_of: str  # the part of a net whose features leave devices; empty: none do
    acknowledged: bool
    inversion: Inversion | None = None


def audit(folder: Path, tables: Registry, data: Path, examples: int, steps: int) -> Audit:
    if not (folder / "manifest.json").is_file() or read_manifest(folder).get("status") != "finished":
        hint = "fedloom run my.toml --out my-run makes one"
        raise RecipeError(
            [RecipeIssue((), "RUN_FOLDER", "this is not the folder of a finished run", hint)], str(folder)
        )
    experiment = assemble(load(folder / "recipe.toml", tables), tables, data)
    method, recipe = experiment.method, experiment.loaded.recipe
    with one_thread():
        measured = _measured(experiment, folder, examples, steps) if method.ships else None
    return Audit(
        recipe.method.name, method.leaves, method.keeps, method.ships,
        recipe.privacy.acknowledge_feature_sharing, measured,
    )  # fmt: skip


def _measured(experiment: Experiment, folder: Path, examples: int, steps: int) -> Inversion:
    """On the first device's examples: of the features its extractor makes, with the weights that the server has; else
    with those all devices began with."""
    part, tier, train = experiment.method.ships, experiment.fleet.largest, experiment.dataset.train
    own = torch.from_numpy(experiment.partition.train[0])
    prepared = experiment.dataset.preparation(train.x[own[:STATISTICS_OF]])
    child = tier.model.part(part)
    weights = _with_statistics(child, _extractor(folder, tier, part, experiment.loaded.recipe.seed), prepared)
    span = span_of(experiment.dataset.preparation, train.x.shape[1:], train.x.dtype)
    return invert(child, weights, prepared[:examples], span, steps)


def _extractor(folder: Path, tier: Tier, part: str, seed: int) -> dict[str, Tensor]:
    held = load_file(folder / SHARED) if (folder / SHARED).is_file() else {}
    names = [name for name in tier.model.shapes() if name.startswith(f"{part}.")]
    whole = {**tier.model.initial(seed), **({name: held[name] for name in names} if set(names) <= held.keys() else {})}
    return tier.model.part_weights(part, whole)


def _with_statistics(model: Model, weights: Tensors, x: Tensor) -> dict[str, Tensor]:
    block = {name: weight.unsqueeze(0) for name, weight in weights.items()}
    with torch.no_grad():
        seen = model.batch_statistics(block, x.unsqueeze(0)) if model.statistics() else {}
    return {**weights, **{name: one[0] for name, one in seen.items()}}
