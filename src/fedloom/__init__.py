"""fedloom: federated learning for devices that cannot all run the same model."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .data import Dataset
    from .experiment import Run
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
    from .experiment import Run, Tables, assemble, load, recorded  # torch is heavy, and importing fedloom is not
    from .experiment.places import data_folder, fresh_folder

    tables = Tables().and_also(methods, models, datasets)
    loaded = load(recipe, tables, sets)
    experiment = assemble(loaded, tables, data_folder(data_dir), workers=workers)
    folder = fresh_folder(out, loaded.recipe.method.name)
    for _ in recorded(experiment, folder):
        pass
    return Run(folder)


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
    from .experiment import Run, Tables, recorded
    from .experiment.places import data_folder
    from .experiment.resume import reopened

    tables, place = Tables().and_also(methods, models, datasets), Path(folder)
    experiment, since = reopened(place, tables, data_folder(data_dir), workers, warnings.warn)
    for _ in recorded(experiment, place, since):
        pass
    return Run(place)
