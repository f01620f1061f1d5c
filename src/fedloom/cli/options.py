"""Options that several verbs share."""

import os
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .output import Format

if TYPE_CHECKING:
    from ..recipe.load import Loaded
    from ..recipe.registry import Registry


class Unit(StrEnum):
    """What arms of a comparison have spent alike."""

    rounds = "rounds"
    bytes = "bytes"
    seconds = "seconds"


class Track(StrEnum):
    """What rows can be written for, besides the run's folder."""

    tensorboard = "tensorboard"
    mlflow = "mlflow"


class TableFormat(StrEnum):
    """How a comparison's result is said."""

    text = "text"
    json = "json"
    markdown = "markdown"
    csv = "csv"
    latex = "latex"
    html = "html"


Sets = Annotated[
    list[str], typer.Option("--set", metavar="KEY=VALUE", help="Change the recipe, e.g. training.epochs=2.")
]
Seed = Annotated[int | None, typer.Option("--seed", help="Beats the recipe's seed.")]
Out = Annotated[Path | None, typer.Option("--out", help="The run's folder; it must not be there yet.")]
DataDir = Annotated[
    Path | None, typer.Option("--data-dir", help="Where data sets lie (else FEDLOOM_DATA, else ./data).")
]
With = Annotated[list[Path], typer.Option("--with", metavar="FILE.py", help="Your own METHODS, MODELS or DATASETS.")]
OutputFormat = Annotated[Format, typer.Option("--format", help="text for people, json for programs.")]
Workers = Annotated[int | None, typer.Option("--workers", min=1, help="Processes; else one a core. Same results.")]
Seeds = Annotated[int, typer.Option("--seeds", min=1, help="How many seeds, from the recipe's on.")]
TestSet = Annotated[str, typer.Option("--test", help="Judge on the global test set or on devices' local ones.")]
Equal = Annotated[Unit, typer.Option("--equal", help="Compare arms at equal rounds, bytes or simulated seconds.")]
Tracked = Annotated[
    list[Track], typer.Option("--track", help="Write every row for this too; may be said twice. Needs fedloom[track].")
]
NoReport = Annotated[bool, typer.Option("--no-report", help="No report.html at the end.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress.")]


def read(recipe: Path, sets: list[str], seed: int | None, files: list[Path]) -> "tuple[Loaded, Registry]":
    """The recipe as the options change it, and the names it may use."""
    from ..recipe.load import load

    tables = own_tables(files)
    changes = sets if seed is None else [*sets, f"seed={seed}"]
    return load(recipe, tables, changes), tables


def own_tables(files: list[Path]) -> "Registry":
    """The names a recipe may use: the bundled ones and those of the user's own files, which win."""
    from ..recipe.registry import Registry

    tables = Registry()
    for file in files:
        tables = tables.with_file(file)
    return tables


def read_judged(
    recipe: Path, sets: list[str], seed: int | None, files: list[Path], test: str
) -> "tuple[Loaded, Registry]":
    """The same for a verb that judges on one test set, which the recipe must have."""
    from ..recipe.errors import RecipeIssue

    loaded, tables = read(recipe, sets, seed, files)
    if test not in loaded.recipe.evaluation.tests:
        raise loaded.error(RecipeIssue(("evaluation", "tests"), "TEST_NAME", f"the recipe does not judge on {test!r}"))
    return loaded, tables


def tracked(said: list[Track]) -> list[str]:
    """What is to follow a run. Refused before anything is spent, where a library is missing."""
    from ..recipe.errors import RecipeError, RecipeIssue
    from ..runs.trackers import TrackerMissing, followed_by

    names = [one.value for one in said]
    try:
        followed_by(names)
    except TrackerMissing as error:
        raise RecipeError([RecipeIssue((), "TRACKER_MISSING", str(error), error.hint)], "--track") from None
    return names


def listed(said: str) -> list[str]:
    """Names with commas between."""
    return [name.strip() for name in said.split(",") if name.strip()]


def processes(said: int | None) -> int:
    return said or os.cpu_count() or 1


def demo() -> Path:
    """The bundled recipe."""
    return Path(__file__).parent.parent / "recipe" / "demo.toml"
