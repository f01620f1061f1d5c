"""fedloom: federated learning for devices that cannot all run the same model.

Importing it is cheap: functions import torch and the rest of the package when they are called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import logs

if TYPE_CHECKING:
    from torch import nn

    from .analysis.run import Run
    from .data import Dataset
    from .methods import Method
    from .models import Family


__version__ = "0.1.0"
__all__ = ["load", "logs", "open", "resume", "run"]


def run(
    recipe: str | Path | Mapping[str, Any],
    *,
    methods: Mapping[str, type[Method]] | None = None,
    models: Mapping[str, Family] | None = None,
    datasets: Mapping[str, Callable[..., Dataset]] | None = None,
    sets: Sequence[str] = (),
    out: str | Path | None = None,
    data_dir: str | Path | None = None,
    workers: int = 1,
) -> Run:
    """Run a recipe and return the finished run.

    Parameters
    ----------
    recipe : a TOML file, or the same as a mapping.
    methods, models, datasets : names of your own, added to those that the recipe may use.
    sets : changes to the recipe, e.g. `["training.epochs=2"]`.
    out : the run's folder, which must not exist yet; default: a new one in ./runs.
    data_dir : folder of the data sets; default: FEDLOOM_DATA, then ./data.
    workers : processes on this machine. Results do not depend on it.
    """
    from .analysis.run import Run
    from .deploy.remote import attach_engine
    from .recipe.load import load
    from .recipe.paths import choose_output_folder, resolve_data_folder
    from .recipe.registry import Registry
    from .runs.build import assemble
    from .runs.recorder import record_rounds

    registry = Registry().with_names(methods, models, datasets)
    loaded = load(recipe, registry, sets)
    data, folder = resolve_data_folder(data_dir), choose_output_folder(out, loaded.recipe.method.name)
    experiment = attach_engine(assemble(loaded, registry, data, workers=workers), registry, data, folder)
    for _ in record_rounds(experiment, folder):
        pass
    return Run(folder, registry, data)


def resume(
    folder: str | Path,
    *,
    methods: Mapping[str, type[Method]] | None = None,
    models: Mapping[str, Family] | None = None,
    datasets: Mapping[str, Callable[..., Dataset]] | None = None,
    data_dir: str | Path | None = None,
    workers: int = 1,
) -> Run:
    """Finish a run from its last checkpoint: the same bits as if it had never stopped. Parameters as in `run`."""
    from .analysis.run import Run
    from .deploy.remote import attach_engine
    from .recipe.paths import resolve_data_folder
    from .recipe.registry import Registry
    from .runs.recorder import record_rounds
    from .runs.resume import reopen_run

    registry, path = Registry().with_names(methods, models, datasets), Path(folder)
    data = resolve_data_folder(data_dir)
    experiment, since = reopen_run(path, registry, data, workers, attach_engine)
    for _ in record_rounds(experiment, path, since):
        pass
    return Run(path, registry, data)


def open(
    folder: str | Path,
    *,
    methods: Mapping[str, type[Method]] | None = None,
    models: Mapping[str, Family] | None = None,
    datasets: Mapping[str, Callable[..., Dataset]] | None = None,
    data_dir: str | Path | None = None,
) -> Run:
    """Open the folder of a run: its rows and models. Parameters as in `run`."""
    from .analysis.run import Run
    from .recipe.paths import resolve_data_folder
    from .recipe.registry import Registry

    return Run(Path(folder), Registry().with_names(methods, models, datasets), resolve_data_folder(data_dir))


def load(folder: str | Path, *, models: Mapping[str, Family] | None = None) -> nn.Module:
    """Load a model that was exported to safetensors."""
    from .analysis.export_run import load_exported
    from .recipe.registry import Registry

    return load_exported(Path(folder), Registry().with_names(models=models))
