"""fedloom check: is a recipe valid? Nothing is run and nothing written."""

from pathlib import Path
from typing import Annotated

import typer

from .options import Options, verb
from .output import Exit, OutputFormat, data_error_code, report_recipe_errors, write, write_json


@verb("sets", "data_dir", "files", "format")
def check(
    options: Options,
    recipes: Annotated[list[Path], typer.Argument(help="Recipes.")],
    deployment: Annotated[bool, typer.Option("--deployment", help="Also check that it can be deployed.")] = False,
) -> None:
    """Check recipes: names, ranges, tiers, partition and method. Works without the data."""
    from ..data import DataError
    from ..recipe.errors import RecipeError, RecipeIssue

    errors: list[RecipeError] = []
    for recipe in recipes:
        try:
            _check(options, recipe, deployment)
        except RecipeError as error:
            errors.append(error)
        except DataError as error:
            issue = RecipeIssue(("data", "dataset"), data_error_code(error), error.message, error.hint)
            errors.append(RecipeError([issue], str(recipe)))
        else:
            if options.format is OutputFormat.text:
                write(f"{recipe}  ok")
    if errors:
        raise Exit(report_recipe_errors(errors, options.format is OutputFormat.json))
    if options.format is OutputFormat.json:
        write_json([{"recipe": str(recipe), "problems": []} for recipe in recipes])


def _check(options: Options, recipe: Path, deployment: bool) -> None:
    from ..runs.build import build, check_deployment, warm_start
    from ..runs.data import build_partition, read_data_spec
    from ..studies.controls import build_arms, errors_at_arm

    loaded, registry = options.load(recipe), options.registry
    data = read_data_spec(loaded, registry, options.data)
    fleet, method = build(loaded, registry, data)
    if deployment:
        check_deployment(loaded, method)
    warm_start(loaded, fleet)
    build_partition(loaded, data.labels)
    _, *others = build_arms(loaded, registry, fleet).items()
    for arm, changed in others:
        with errors_at_arm(loaded, arm):
            build(changed, registry, data)
