"""fedloom check: is a recipe valid? Nothing is run and nothing written."""

from pathlib import Path
from typing import Annotated

import typer

from .options import Options, verb
from .output import Exit, OutputFormat, report_recipe_errors, write, write_json


@verb("sets", "data_dir", "device", "files", "format")
def check(
    options: Options,
    recipes: Annotated[list[Path], typer.Argument(help="Recipes.")],
    deployment: Annotated[bool, typer.Option("--deployment", help="Also check that it can be deployed.")] = False,
) -> None:
    """Check recipes: names, ranges, tiers, partition and method. Works without the data."""
    from ..api.verbs import check
    from ..recipe.errors import RecipeError

    errors: list[RecipeError] = []
    for recipe in recipes:
        try:
            check(recipe, deployment=deployment, **options.arguments("sets", "data_dir"))
        except RecipeError as error:
            errors.append(error)
        else:
            if options.format is OutputFormat.text:
                write(f"{recipe}  ok")
    if errors:
        raise Exit(report_recipe_errors(errors, options.format is OutputFormat.json))
    if options.format is OutputFormat.json:
        write_json([{"recipe": str(recipe), "problems": []} for recipe in recipes])
