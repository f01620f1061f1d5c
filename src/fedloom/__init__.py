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
    from .deploy.remote import engaged
    from .recipe.load import load
    from .recipe.paths import data_folder, fresh_folder
    from .recipe.registry import Registry
    from .runs.build import assemble
    from .runs.recorder import recorded

    tables = Registry().and_also(methods, models, datasets)
    loaded = load(recipe, tables, sets)
    data = data_folder(data_dir)
    folder = fresh_folder(out, loaded.recipe.method.name)
    experiment = engaged(assemble(loaded, tables, data, workers=workers), tables, data, folder)
    for _ in recorded(experiment, folder):
        pass
    return Run(folder, tables, data)


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
    from .deploy.remote import engaged
    from .recipe.paths import data_folder
    from .recipe.registry import Registry
    from .runs.recorder import recorded
    from .runs.resume import reopened

    tables, place, data = Registry().and_also(methods, models, datasets), Path(folder), data_folder(data_dir)
    experiment, since = reopened(place, tables, data, workers, warnings.warn, engaged)
    for _ in recorded(experiment, place, since):
        pass
    return Run(place, tables, data)


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
    from .recipe.paths import data_folder
    from .recipe.registry import Registry

    return Run(Path(folder), Registry().and_also(methods, models, datasets), data_folder(data_dir))


def load(folder: str | Path, *, models: Mapping[str, Family] | None = None) -> nn.Module:
    """A model that was exported to safetensors."""
    from .analysis.export_run import load_exported
    from .recipe.registry import Registry

    return load_exported(Path(folder), Registry().and_also(models=models))
