"""The names a recipe can use, of every kind: built in, registered, installed, or added by a user's file."""

import hashlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from ..client import LOSSES, LR_SCHEDULES, OPTIMIZERS, LRSchedule, Optimizer
from ..data import DATASETS, PARTITIONS, PREPARATIONS, TASKS, Dataset, LearningTask, Partition, Preparation
from ..engines import ATTACKS, ENGINES, Attack
from ..engines.compression import COMPRESSORS, Compressor
from ..evaluation.metrics import METRICS, MetricEntry
from ..exporting import FORMATS, Format
from ..fleet.speed import STRAGGLERS, DeviceSpeeds
from ..footprints import RULES, SERVER_OPTIMIZERS, Rule, ServerOptimizer
from ..methods import METHODS, Method
from ..models import MODELS, Family
from ..registry import Layered
from ..tracking import TRACKERS, Tracker
from .errors import recipe_error


def _table(table: Mapping[str, Any]) -> Any:
    return field(default_factory=lambda: table)


@dataclass(frozen=True)
class Registries:
    """A table of names for each kind, and the Python files that names were added from.

    By default the tables are the open registries of the package. `with_names` and `with_file` add names for one recipe.

    Parameters
    ----------
    methods, models, datasets, partitions, preparations, tasks : names and the classes or functions that they stand for.
    optimizers, losses, lr_schedules, aggregation, server_optimizers, compressors, stragglers, engines : the same.
    attacks, metrics, export_formats, trackers : the same.
    files : Python files that names were added from.

    Examples
    --------
    >>> Registries().with_names(methods={"mine": MyMethod})
    """

    methods: Mapping[str, type[Method]] = _table(METHODS)
    models: Mapping[str, Family] = _table(MODELS)
    datasets: Mapping[str, Callable[..., Dataset]] = _table(DATASETS)
    partitions: Mapping[str, Callable[..., Partition]] = _table(PARTITIONS)
    preparations: Mapping[str, Preparation] = _table(PREPARATIONS)
    tasks: Mapping[str, LearningTask] = _table(TASKS)
    optimizers: Mapping[str, Callable[..., Optimizer]] = _table(OPTIMIZERS)
    losses: Mapping[str, Callable[..., Any]] = _table(LOSSES)
    lr_schedules: Mapping[str, Callable[..., LRSchedule]] = _table(LR_SCHEDULES)
    aggregation: Mapping[str, Callable[..., Rule | None]] = _table(RULES)
    server_optimizers: Mapping[str, Callable[..., ServerOptimizer]] = _table(SERVER_OPTIMIZERS)
    compressors: Mapping[str, Callable[..., Compressor]] = _table(COMPRESSORS)
    stragglers: Mapping[str, Callable[..., DeviceSpeeds]] = _table(STRAGGLERS)
    engines: Mapping[str, Callable[..., Any]] = _table(ENGINES)
    attacks: Mapping[str, Callable[..., Attack]] = _table(ATTACKS)
    metrics: Mapping[str, MetricEntry] = _table(METRICS)
    export_formats: Mapping[str, Format] = _table(FORMATS)
    trackers: Mapping[str, Callable[..., Tracker]] = _table(TRACKERS)
    files: tuple[Path, ...] = ()  # Python files that names were added from

    def with_names(self, **added: Mapping[str, Any] | None) -> "Registries":
        """With further names, by kind; they take precedence over equal names.

        Parameters
        ----------
        **added : for each kind, such as `methods`, a mapping from names to classes or functions.
        """
        unknown = added.keys() - set(KINDS)
        if unknown:
            raise TypeError(f"there is no kind {sorted(unknown)[0]!r} of names; there are: {', '.join(KINDS)}")
        tables: dict[str, Any] = {kind: Layered(names, getattr(self, kind)) for kind, names in added.items() if names}
        return replace(self, **tables)

    def with_file(self, path: Path) -> "Registries":
        """With the names that a Python file adds: those of its tables METHODS, MODELS, …, and those it registers.

        Parameters
        ----------
        path : the file, which is executed.
        """
        registered = {kind: set(getattr(Registries(), kind)) for kind in KINDS}
        module = import_file(path)
        added = {kind: getattr(module, kind.upper(), None) for kind in KINDS}
        if not any(added.values()) and all(set(getattr(Registries(), k)) == names for k, names in registered.items()):
            hint = "define METHODS, MODELS, METRICS, … in it: a dict from a name to your class or function"
            raise recipe_error(path, "WITH_EMPTY", f"{path} adds no name", hint)
        for kind, entries in added.items():
            if entries is not None and not _is_name_table(kind, entries):
                noun = "classes" if kind == "methods" else "objects" if kind in NOT_CALLED else "functions"
                raise recipe_error(path, "WITH_FORM", f"{kind.upper()} must be a dict from names to {noun}")
        return replace(self.with_names(**added), files=(*self.files, path.resolve()))

    def file_hashes(self) -> list[dict[str, str]]:
        """The name, path and sha256 of each file, for a run to remember."""
        return [{"name": file.name, "path": str(file), "sha256": hash_file(file)} for file in self.files]


KINDS = tuple(table.name for table in fields(Registries) if table.name != "files")

PASSED = {
    registry.kind: registry.passed for registry in (MODELS, DATASETS, PARTITIONS, STRAGGLERS, METRICS, LOSSES, ENGINES)
}
"""Arguments that fedloom passes itself, by kind: no recipe sets them."""


def hash_file(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


NOT_CALLED = ("preparations", "tasks", "export_formats", "metrics")  # their entries may be objects


def _is_name_table(kind: str, entries: Any) -> bool:
    return isinstance(entries, Mapping) and all(
        isinstance(name, str) and (callable(entry) or kind in NOT_CALLED) for name, entry in entries.items()
    )


def import_file(path: Path) -> Any:
    """Import a user's Python file. It can import modules from its own folder."""
    if not path.is_file():
        raise recipe_error(path, "FILE_MISSING", f"there is no file {path}")
    name = f"fedloom_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise recipe_error(path, "WITH_FORM", f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module by name
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise recipe_error(path, "WITH_FAILED", f"importing it raised {type(error).__name__}: {error}") from error
    finally:
        sys.path.pop(0)
    return module
