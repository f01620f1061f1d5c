"""fedloom: federated learning for devices that cannot all run the same model."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from .analysis.run import Run
    from .data import Dataset
    from .methods import Method
    from .models import Family


__version__ = "0.1.0"


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
    """Run a recipe, from a file or a mapping, and return the finished run. The tables add your own names to its; the
    number of workers, processes of this machine, changes nothing but the time."""
    from .analysis.run import Run  # torch is heavy, and importing fedloom is not
    from .deploy.remote import attach_engine
    from .recipe.load import load
    from .recipe.paths import resolve_data_folder, choose_output_folder
    from .recipe.registry import Registry
    from .runs.build import assemble
    from .runs.recorder import recorded

    registry = Registry().with_names(methods, models, datasets)
    loaded = load(recipe, registry, sets)
    data = resolve_data_folder(data_dir)
    folder = choose_output_folder(out, loaded.recipe.method.name)
    experiment = attach_engine(assemble(loaded, registry, data, workers=workers), registry, data, folder)
    for _ in recorded(experiment, folder):
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
    """Finish a run from its last checkpoint: the same bits as if it had never stopped."""
    from .analysis.run import Run
    from .deploy.remote import attach_engine
    from .recipe.paths import resolve_data_folder
    from .recipe.registry import Registry
    from .runs.recorder import recorded
    from .runs.resume import reopened

    registry, place, data = Registry().with_names(methods, models, datasets), Path(folder), resolve_data_folder(data_dir)
    experiment, since = reopened(place, registry, data, workers, warnings.warn, attach_engine)
    for _ in recorded(experiment, place, since):
        pass
    return Run(place, registry, data)


def open(
    folder: str | Path,
    *,
    methods: Mapping[str, type[Method]] | None = None,
    models: Mapping[str, Family] | None = None,
    datasets: Mapping[str, Callable[..., Dataset]] | None = None,
    data_dir: str | Path | None = None,
) -> Run:
    """A run that is there already: its rows, its models."""
    from .analysis.run import Run
    from .recipe.paths import resolve_data_folder
    from .recipe.registry import Registry

    return Run(Path(folder), Registry().with_names(methods, models, datasets), resolve_data_folder(data_dir))


def load(folder: str | Path, *, models: Mapping[str, Family] | None = None) -> nn.Module:
    """A model that was exported to safetensors."""
    from .analysis.export_run import load_exported
    from .recipe.registry import Registry

    return load_exported(Path(folder), Registry().with_names(models=models))
