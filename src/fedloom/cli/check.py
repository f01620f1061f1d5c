"""fedloom check: is a recipe right? Nothing is run and nothing written."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .options import DataDir, OutputFormat, Sets, With, read
from .output import BAD_INPUT, Exit, Format, exits, report_failure, say, say_json

if TYPE_CHECKING:
    from ..experiment import RecipeError


def check(
    recipes: Annotated[list[Path], typer.Argument(help="Recipes.")],
    sets: Sets = [],  # noqa: B006 - typer reads it, nobody changes it
    data_dir: DataDir = None,
    files: With = [],  # noqa: B006
    format: OutputFormat = Format.text,
) -> None:
    """Check recipes: words, ranges, tiers, partition and method. Works where the data is not."""
    with exits(format):
        from ..experiment import RecipeError

        wrong: list[RecipeError] = []
        for recipe in recipes:
            try:
                _check_one(recipe, sets, data_dir, files)
            except RecipeError as error:
                wrong.append(error)
            else:
                if format is Format.text:
                    say(f"{recipe}  ok")
        if wrong:
            _report(wrong, format)
            raise Exit(BAD_INPUT)
        if format is Format.json:
            say_json([{"recipe": str(recipe), "problems": []} for recipe in recipes])


def _check_one(recipe: Path, sets: list[str], data_dir: Path | None, files: list[Path]) -> None:
    from ..experiment.assemble import build, build_partition, outline
    from ..experiment.places import data_folder

    loaded, tables = read(recipe, sets, None, files)
    seen = outline(loaded, tables, data_folder(data_dir))
    build(loaded, tables, seen)
    build_partition(loaded, seen.labels)


def _report(wrong: "list[RecipeError]", format: Format) -> None:
    lines = [line for error in wrong for line in error.lines()]
    first = wrong[0].problems[0]
    if format is Format.json:
        report_failure(first.code, "\n".join(lines), first.hint, True)
    else:
        import sys

        sys.stderr.write("\n".join(lines) + "\n")
