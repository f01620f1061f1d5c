"""The names a recipe can use: methods, model families and data sets, built in or added by the user."""

import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..data import DATASETS, Dataset
from ..methods import METHODS, Method
from ..models import MODELS, Family
from .errors import recipe_error


@dataclass(frozen=True)
class Registry:
    methods: Mapping[str, type[Method]] = field(default_factory=lambda: METHODS)
    models: Mapping[str, Family] = field(default_factory=lambda: MODELS)
    datasets: Mapping[str, Callable[..., Dataset]] = field(default_factory=lambda: DATASETS)
    files: tuple[Path, ...] = ()  # Python files that names were added from

    def with_names(
        self,
        methods: Mapping[str, type[Method]] | None = None,
        models: Mapping[str, Family] | None = None,
        datasets: Mapping[str, Callable[..., Dataset]] | None = None,
    ) -> "Registry":
        """A registry with further names; they take precedence over equal names of this one."""
        return Registry(
            {**self.methods, **(methods or {})},
            {**self.models, **(models or {})},
            {**self.datasets, **(datasets or {})},
            self.files,
        )

    def with_file(self, path: Path) -> "Registry":
        """A registry with the METHODS, MODELS and DATASETS that a Python file defines."""
        module = import_file(path)
        added = {name: getattr(module, name.upper(), None) for name in ("methods", "models", "datasets")}
        if not any(added.values()):
            hint = "define METHODS, MODELS or DATASETS in it: a dict from a name to your class or function"
            raise recipe_error(path, "WITH_EMPTY", f"{path} adds no name", hint)
        for name, entries in added.items():
            if entries is not None and not _is_name_table(entries):
                kind = "classes" if name == "methods" else "functions"
                raise recipe_error(path, "WITH_FORM", f"{name.upper()} must be a dict from names to {kind}")
        return replace(self.with_names(**added), files=(*self.files, path.resolve()))


def _is_name_table(entries: Any) -> bool:
    return isinstance(entries, Mapping) and all(isinstance(k, str) and callable(v) for k, v in entries.items())


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
