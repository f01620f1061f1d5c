"""fedloom check: is a recipe right? Nothing is run and nothing written."""

from pathlib import Path
from typing import Annotated

import typer

from .options import DataDir, OutputFormat, Sets, With, read
from .output import Exit, Format, data_code, exits, refuse_recipes, say, say_json


def check(
    recipes: Annotated[list[Path], typer.Argument(help="Recipes.")],
    sets: Sets = [],  # noqa: B006 - typer reads it, nobody changes it
    data_dir: DataDir = None,
    files: With = [],  # noqa: B006
    deployment: Annotated[bool, typer.Option("--deployment", help="Also: may it run on real devices?")] = False,
    format: OutputFormat = Format.text,
) -> None:
    """Check recipes: words, ranges, tiers, partition and method. Works where the data is not."""
    with exits(format):
        from ..data import DataError
        from ..recipe.errors import RecipeError, RecipeIssue

        wrong: list[RecipeError] = []
        for recipe in recipes:
            try:
                _check_one(recipe, sets, data_dir, files, deployment)
            except RecipeError as error:
                wrong.append(error)
            except DataError as error:
                problem = RecipeIssue(("data", "dataset"), data_code(error), error.message, error.hint)
                wrong.append(RecipeError([problem], str(recipe)))
            else:
                if format is Format.text:
                    say(f"{recipe}  ok")
        if wrong:
            raise Exit(refuse_recipes(wrong, format is Format.json))
        if format is Format.json:
            say_json([{"recipe": str(recipe), "problems": []} for recipe in recipes])


def _check_one(recipe: Path, sets: list[str], data_dir: Path | None, files: list[Path], deployment: bool) -> None:
    from ..recipe.paths import data_folder
    from ..runs.build import build, refuse_deployment, warm_start
    from ..runs.data import build_partition, outline
    from ..studies.controls import arms, told_at_its_line

    loaded, tables = read(recipe, sets, None, files)
    seen = outline(loaded, tables, data_folder(data_dir))
    fleet, method = build(loaded, tables, seen)
    if deployment:
        refuse_deployment(loaded, method)
    warm_start(loaded, fleet)
    build_partition(loaded, seen.labels)
    _, *others = arms(loaded, tables, fleet).items()
    for arm, changed in others:
        with told_at_its_line(loaded, arm):
            build(changed, tables, seen)
