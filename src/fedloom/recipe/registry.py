"""The names a recipe can use: the project's own, and a user's."""

import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..data import DATASETS, Dataset
from ..methods import METHODS, Method
from ..models import MODELS, Family
from .errors import RecipeError, RecipeIssue


@dataclass(frozen=True)
class Registry:
    methods: Mapping[str, type[Method]] = field(default_factory=lambda: METHODS)
    models: Mapping[str, Family] = field(default_factory=lambda: MODELS)
    datasets: Mapping[str, Callable[..., Dataset]] = field(default_factory=lambda: DATASETS)
    files: tuple[Path, ...] = ()  # a user's own, where these names come from

    def and_also(
        self,
        methods: Mapping[str, type[Method]] | None = None,
        models: Mapping[str, Family] | None = None,
        datasets: Mapping[str, Callable[..., Dataset]] | None = None,
    ) -> "Registry":
        """These and a user's own; of equal names the user's wins."""
        return Registry(
            {**self.methods, **(methods or {})},
            {**self.models, **(models or {})},
            {**self.datasets, **(datasets or {})},
            self.files,
        )

    def with_file(self, path: Path) -> "Registry":
        """A Python file's METHODS, MODELS and DATASETS beside the known ones."""
        module = module_of(path)
        found = {name: getattr(module, name.upper(), None) for name in ("methods", "models", "datasets")}
        if not any(found.values()):
            hint = "define METHODS, MODELS or DATASETS in it: a dict from a name to your class or function"
            raise RecipeError([RecipeIssue((), "WITH_EMPTY", f"{path} adds no name", hint)], str(path))
        for name, entries in found.items():
            if entries is not None and not _is_table(entries):
                said = f"{name.upper()} must be a dict from names to {'classes' if name == 'methods' else 'functions'}"
                raise RecipeError([RecipeIssue((), "WITH_FORM", said)], str(path))
        return replace(self.and_also(**found), files=(*self.files, path.resolve()))


def _is_table(entries: Any) -> bool:
    return isinstance(entries, Mapping) and all(isinstance(k, str) and callable(v) for k, v in entries.items())


def module_of(path: Path) -> Any:
    """A user's Python file, read once."""
    if not path.is_file():
        raise RecipeError([RecipeIssue((), "FILE_MISSING", f"there is no file {path}")], str(path))
    name = f"fedloom_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise RecipeError([RecipeIssue((), "WITH_FORM", f"{path} is not a Python file")], str(path))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up by name
    sys.path.insert(0, str(path.parent.resolve()))  # so that it can import what lies beside it
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        problem = RecipeIssue((), "WITH_FAILED", f"{type(error).__name__} while it was read: {error}")
        raise RecipeError([problem], str(path)) from error
    finally:
        sys.path.pop(0)
    return module
