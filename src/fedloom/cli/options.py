"""Options that several verbs share, and what follows from them: registry, data folder, workers, the loaded recipe."""

import inspect
import os
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from enum import StrEnum
from functools import cached_property, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from .output import OutputFormat, exits, write, write_json

if TYPE_CHECKING:
    from ..recipe.load import LoadedRecipe
    from ..recipe.registry import Registry


class EqualBudget(StrEnum):
    """What arms of a comparison have spent equally."""

    rounds = "rounds"
    bytes = "bytes"
    seconds = "seconds"


class TrackerName(StrEnum):
    """Where rows can be written to, besides the run's folder."""

    tensorboard = "tensorboard"
    mlflow = "mlflow"


@dataclass(frozen=True)
class Options:
    """The shared options. A verb has those that it names in `@verb`; the others keep their defaults."""

    sets: Annotated[
        list[str], typer.Option("--set", metavar="KEY=VALUE", help="Change the recipe, e.g. training.epochs=2.")
    ] = field(default_factory=list)
    seed: Annotated[int | None, typer.Option("--seed", help="Overrides the recipe's seed.")] = None
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Number of seeds, counted from the recipe's.")] = 1
    test: Annotated[str, typer.Option("--test", help="Evaluate on the global test set or on devices' local ones.")] = (
        "global"
    )
    equal: Annotated[
        EqualBudget, typer.Option("--equal", help="Compare arms at equal rounds, bytes or simulated seconds.")
    ] = EqualBudget.rounds
    out: Annotated[Path | None, typer.Option("--out", help="The run's folder; it must not exist yet.")] = None
    data_dir: Annotated[
        Path | None, typer.Option("--data-dir", help="Folder of the data sets (default: FEDLOOM_DATA, then ./data).")
    ] = None
    workers: Annotated[
        int | None, typer.Option("--workers", min=1, help="Processes; default: one per core. Results do not change.")
    ] = None
    files: Annotated[
        list[Path], typer.Option("--with", metavar="FILE.py", help="A file with METHODS, MODELS or DATASETS of yours.")
    ] = field(default_factory=list)
    track: Annotated[
        list[TrackerName],
        typer.Option("--track", help="Also write every row to this tool; repeatable. Needs the extra `track`."),
    ] = field(default_factory=list)
    format: Annotated[OutputFormat, typer.Option("--format", help="text for people, json for programs.")] = (
        OutputFormat.text
    )
    no_report: Annotated[bool, typer.Option("--no-report", help="Do not write report.html at the end.")] = False
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress.")] = False

    @cached_property
    def registry(self) -> "Registry":
        """The names a recipe may use: the bundled ones and those of the user's files, which win."""
        from ..recipe.registry import Registry

        registry = Registry()
        for file in self.files:
            registry = registry.with_file(file)
        return registry

    @property
    def data(self) -> Path:
        from ..recipe.paths import resolve_data_folder

        return resolve_data_folder(self.data_dir)

    @property
    def processes(self) -> int:
        return self.workers or os.cpu_count() or 1

    def load(self, recipe: Path, *changes: str) -> "LoadedRecipe":
        """The recipe with --set, then `changes`, then --seed applied."""
        from ..recipe.load import load

        seed = [] if self.seed is None else [f"seed={self.seed}"]
        return load(recipe, self.registry, [*self.sets, *changes, *seed])

    def load_with_test(self, recipe: Path) -> "LoadedRecipe":
        """The same for a verb that reads results on one test set, which the recipe must have."""
        from ..recipe.errors import RecipeIssue

        loaded = self.load(recipe)
        if self.test not in loaded.recipe.evaluation.tests:
            message = f"the recipe does not evaluate on {self.test!r}"
            raise loaded.error(RecipeIssue(("evaluation", "tests"), "TEST_NAME", message))
        return loaded

    def trackers(self) -> list[str]:
        """Names of the trackers. Raises if a library is missing, before anything runs."""
        from ..recipe.errors import recipe_error
        from ..runs.trackers import TrackerMissing, build_trackers

        names = [tracker.value for tracker in self.track]
        try:
            build_trackers(names)
        except TrackerMissing as error:
            raise recipe_error("--track", "TRACKER_MISSING", str(error), error.hint) from None
        return names

    def show(self, data: Any, text: str) -> None:
        """Write the result of a verb: `data` for programs or `text` for people."""
        if self.format is OutputFormat.json:
            write_json(data)
        else:
            write(text)


def verb(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Turn a function into a command: it gets the shared options `names`, collected in its first parameter, and what it
    raises becomes a message and an exit code."""
    hints = get_type_hints(Options, include_extras=True)
    defaults = {
        option.name: option.default if option.default_factory is MISSING else option.default_factory()
        for option in fields(Options)
    }

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        _, *own = inspect.signature(function).parameters.values()
        parameters = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]
        parameters += [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name], annotation=hints[name])
            for name in names
        ]

        @wraps(function)
        def command(**values: Any) -> None:
            options = Options(**{name: values.pop(name) for name in names})
            with exits(values.get("format", options.format), options.quiet):
                function(options, **values)

        # typer reads both
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return command

    return decorate


def split_names(text: str) -> list[str]:
    """Names separated by commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


def demo_recipe() -> Path:
    """The bundled recipe."""
    return Path(__file__).parent.parent / "recipe" / "demo.toml"


def require_new_file(out: Path) -> None:
    """Raise unless `out` can be written without overwriting anything."""
    from ..recipe.errors import recipe_error

    if not out.parent.is_dir():
        raise recipe_error("--out", "OUT_MISSING", f"there is no folder {out.parent}")
    if out.exists():
        raise recipe_error("--out", "OUT_EXISTS", f"{out} exists already", "choose another --out")
