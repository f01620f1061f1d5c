"""What a finished run's method uploaded from its devices, and how well their data can be reconstructed from it."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from ..evaluation.inversion import Inversion, invert, pixel_range
from ..fleet import Tier
from ..models import Model
from ..recipe.registries import Registries
from ..results import Record, Result
from ..runs.experiment import Experiment
from ..runs.final_models import SHARED_FILE
from ..runs.loop import single_thread
from ..runs.resume import open_finished_run
from ..tensors import Tensors

STATISTICS_EXAMPLES = 200


@dataclass(frozen=True, repr=False)
class Audit(Result):
    """What left the devices of a run.

    Parameters
    ----------
    method : its name.
    uploads : what leaves a device, in words.
    client_state : what stays on it.
    shared_features : the part of the model whose features are uploaded; "": none.
    acknowledged : whether the recipe says that features may be uploaded.
    inversion : how well inputs were reconstructed from features; None if none are uploaded.
    """

    method: str
    uploads: str
    client_state: str
    shared_features: str
    acknowledged: bool
    inversion: Inversion | None = None

    @property
    def title(self) -> str:
        return f"what left the devices with {self.method}"

    def records(self) -> list[Record]:
        facts = {"leaves": self.uploads, "stays": self.client_state, "features": self.shared_features or "none"}
        rebuilt = {} if self.inversion is None else {"PSNR of rebuilt inputs, dB": self.inversion.psnr}
        return [{"what": what, "": value} for what, value in {**facts, **rebuilt}.items()]

    def content(self) -> dict[str, Any]:
        return asdict(self)


def audit(folder: Path, registries: Registries, data: Path, examples: int, steps: int) -> Audit:
    experiment = open_finished_run(folder, registries, data)
    method, recipe = experiment.method, experiment.loaded.recipe
    with single_thread():
        inversion = _invert_features(experiment, folder, examples, steps) if method.shares_features else None
    return Audit(
        recipe.method.name, method.info.uploads, method.info.client_state, method.shares_features,
        recipe.privacy.acknowledge_feature_sharing, inversion,
    )  # fmt: skip


def _invert_features(experiment: Experiment, folder: Path, examples: int, steps: int) -> Inversion:
    """Reconstruct the first device's examples from the features of its extractor."""
    part, tier, train = experiment.method.shares_features, experiment.fleet.largest, experiment.dataset.train
    rows = torch.from_numpy(experiment.partition.train[0])
    prepared = experiment.dataset.preparation(train.x[rows[:STATISTICS_EXAMPLES]])
    extractor = tier.model.submodel(part)
    weights = _extractor_weights(folder, tier, part, experiment.loaded.recipe.seed)
    limits = pixel_range(experiment.dataset.preparation, train.x.shape[1:], train.x.dtype)
    ready, compute = _with_statistics(extractor, weights, prepared), experiment.simulator.compute
    return invert(extractor, ready, prepared[:examples], limits, steps, compute)


def _extractor_weights(folder: Path, tier: Tier, part: str, seed: int) -> dict[str, Tensor]:
    """The server's weights of the part, or the initial ones if the server does not have it."""
    shared = load_file(folder / SHARED_FILE) if (folder / SHARED_FILE).is_file() else {}
    names = [name for name in tier.model.shapes() if name.startswith(f"{part}.")]
    trained = {name: shared[name] for name in names} if set(names) <= shared.keys() else {}
    return tier.model.submodel_weights(part, {**tier.model.initial_weights(seed), **trained})


def _with_statistics(model: Model, weights: Tensors, x: Tensor) -> dict[str, Tensor]:
    block = {name: weight.unsqueeze(0) for name, weight in weights.items()}
    with torch.no_grad():
        statistics = model.batch_statistics(block, x.unsqueeze(0)) if model.statistics() else {}
    return {**weights, **{name: tensor[0] for name, tensor in statistics.items()}}
