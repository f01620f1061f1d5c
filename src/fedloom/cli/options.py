"""Options that several verbs share, and what follows from them: registry, data folder, workers, the loaded recipe."""

import inspect
import json
import os
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from enum import StrEnum
from functools import cached_property, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import typer

from .output import OutputFormat, exits, write, write_json

if TYPE_CHECKING:
    from ..recipe.load import LoadedRecipe
    from ..recipe.registries import Registries
    from ..runs.trackers import TrackerChoice


class EqualBudget(StrEnum):
    """What arms of a comparison have spent equally."""

    rounds = "rounds"
    bytes = "bytes"
    seconds = "seconds"


@dataclass(frozen=True)
class Options:
    """The shared options. A verb has those that it names in `@verb`; the others keep their defaults."""

    sets: Annotated[
        list[str], typer.Option("--set", metavar="KEY=VALUE", help="Change the recipe, e.g. training.epochs=2.")
    ] = field(default_factory=list)
    seed: Annotated[int | None, typer.Option("--seed", help="Overrides the recipe's seed.")] = None
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Number of seeds, counted from the recipe's.")] = 1
    test: Annotated[
        str | None,
        typer.Option("--test", help="global or local (devices' own); default: what the method is for."),
    ] = None
    metric: Annotated[
        str | None, typer.Option("--metric", help="What verdicts and tables are about; default: accuracy.")
    ] = None
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
    device: Annotated[
        str | None,
        typer.Option("--device", help="The torch device to compute on: cpu, cuda, cuda:1, mps, xpu or auto."),
    ] = None
    files: Annotated[
        list[Path],
        typer.Option("--with", metavar="FILE.py", help="A file that adds names: methods, models, metrics."),
    ] = field(default_factory=list)
    track: Annotated[
        list[str],
        typer.Option(
            "--track", metavar="NAME", help="Also write rows to csv, tensorboard, mlflow or wandb; repeatable."
        ),
    ] = field(default_factory=list)
    format: Annotated[OutputFormat, typer.Option("--format", help="text for people, json for programs.")] = (
        OutputFormat.text
    )
    open_page: Annotated[
        bool, typer.Option("--open", help="Show the report in a browser, on 127.0.0.1, while it runs.")
    ] = False
    no_report: Annotated[bool, typer.Option("--no-report", help="Do not write report.html at the end.")] = False
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress.")] = False

    @cached_property
    def registries(self) -> "Registries":
        """The names a recipe may use: the bundled ones and those of the user's files, which win."""
        from ..recipe.registries import Registries

        registries = Registries()
        for file in self.files:
            registries = registries.with_file(file)
        return registries

    @property
    def data(self) -> Path:
        from ..recipe.paths import resolve_data_folder

        return resolve_data_folder(self.data_dir)

    @property
    def processes(self) -> int:
        return self.workers or os.cpu_count() or 1

    @property
    def changes(self) -> list[str]:
        """What --set and --device change in the recipe."""
        return [*self.sets, *([] if self.device is None else [f"engine.device={json.dumps(self.device)}"])]

    def load(self, recipe: Path, *changes: str) -> "LoadedRecipe":
        """The recipe with --set, then `changes`, then --seed applied."""
        from ..recipe.load import load

        seed = [] if self.seed is None else [f"seed={self.seed}"]
        metric = [] if self.metric is None else [f"compare.metric={json.dumps(self.metric)}"]
        return load(recipe, self.registries, [*self.changes, *changes, *seed, *metric])

    def trackers(self) -> "list[TrackerChoice]":
        """The chosen trackers. Raises if a name is unknown or a library is missing, before anything runs."""
        from ..runs.trackers import build_trackers, find_tracker

        table = self.registries.trackers
        chosen: list[TrackerChoice] = [find_tracker(name, table, "--track") for name in dict.fromkeys(self.track)]
        build_trackers(chosen, source="--track")
        return chosen

    def arguments(self, *names: str) -> dict[str, Any]:
        """These options as keyword arguments of the Python function of the same verb."""
        values: dict[str, Any] = {
            "sets": self.changes, "seed": self.seed, "seeds": self.seeds, "test": self.test, "metric": self.metric,
            "equal": self.equal.value, "out": self.out, "data_dir": self.data, "workers": self.processes,
        }  # fmt: skip
        return {"registries": self.registries, **{name: values[name] for name in names}}

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


def bundled_recipe(name: Literal["demo", "starter"]) -> Path:
    """A recipe of the package: that of the demonstration, or the one that `fedloom init` adapts to a method."""
    return Path(__file__).parent.parent / "recipe" / f"{name}.toml"


def require_new_file(out: Path) -> None:
    """Raise unless `out` can be written without overwriting anything."""
    from ..recipe.errors import recipe_error

    if not out.parent.is_dir():
        raise recipe_error("--out", "OUT_MISSING", f"there is no folder {out.parent}")
    if out.exists():
        raise recipe_error("--out", "OUT_EXISTS", f"{out} exists already", "choose another --out")
