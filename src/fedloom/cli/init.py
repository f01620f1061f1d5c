"""fedloom init: a commented recipe to start from, on the bundled data."""

import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import Options, demo_recipe, require_new_file, verb

if TYPE_CHECKING:
    from ..recipe.registry import Registry


ONE_TIER = """# this method trains the same model on every device
[[tiers]]
name = "all"
share = 1.0
width = 1.0
"""

SPLIT_MODEL = """family = "splitnet"           # a network in three parts: extractor, intermediate, classifier
channels = 8                  # of the extractor; the stages behind it have up to sixteen times as many
"""

SPLIT_TIERS = """# a tier is a class of devices: its share of the fleet, and the extra blocks of its two middle stages
[[tiers]]
name = "deep"
share = 0.5
extra = [2, 3]

[[tiers]]
name = "shallow"
share = 0.5
extra = [1, 1]
"""

PUBLIC = "public = { examples = 200 }   # unlabeled, at the server; no device has them\n"


@verb("files", "format")
def init(
    options: Options,
    method: Annotated[str, typer.Argument(help="A method; `fedloom list methods`.")],
    out: Annotated[Path, typer.Option("--out", help="The file to write; it must not exist yet.")] = Path("my.toml"),
) -> None:
    """Write a commented recipe that runs a method on the bundled data."""
    from ..recipe.errors import RecipeError, RecipeIssue, suggest

    registry = options.registry
    if method not in registry.methods:
        hint = suggest(method, registry.methods)
        raise RecipeError([RecipeIssue((), "METHOD_NAME", f"there is no method {method!r}", hint)], "init")
    require_new_file(out)
    out.write_text(_recipe(method, out, registry), encoding="utf-8")
    options.show({"recipe": str(out)}, f"{out}\nnext: fedloom run {shlex.quote(str(out))}")


def _recipe(method: str, out: Path, registry: "Registry") -> str:
    """The bundled recipe with another method, and with a model and tiers that the method supports."""
    text = demo_recipe().read_text(encoding="utf-8").replace("recipes/demo.toml", str(out))
    text = re.sub(r"\[method\]\n(?:.+\n)+", lambda _: _method_section(method, registry.methods[method]), text)
    tiers = re.compile(r"# a tier is .*\n(?:\[\[tiers\]\]\n(?:.+\n)+\n)+")
    one_tier = tiers.sub(lambda _: ONE_TIER + "\n", text)
    split = re.sub(r"(?<=\[model\]\n)(?:.+\n)+", lambda _: SPLIT_MODEL, tiers.sub(lambda _: SPLIT_TIERS + "\n", text))
    supported = (recipe for recipe in (text, one_tier, split) if _error_code(registry, recipe) != "METHOD_REFUSES")
    recipe = next(supported, text)
    if _error_code(registry, recipe) == "PUBLIC_MISSING":
        recipe = re.sub(r"(partition = .*\n)", lambda line: line[0] + PUBLIC, recipe)
    return recipe


def _method_section(name: str, method: Any) -> str:
    """The method, its example settings, and comments with the defaults of its other settings."""
    from ..recipe.load import dumps_value
    from ..recipe.validation import settable_parameters

    lines = ["[method]", f'name = "{name}"' + (f"  # {method.info.paper}" if method.info.paper else "")]
    lines += (f"{setting} = {dumps_value(value)}" for setting, value in method.info.example_settings.items())
    for setting, parameter in settable_parameters(method).items():
        if setting in method.info.example_settings:
            continue
        if parameter.default is parameter.empty:
            lines.append(f"# {setting} must be set: {parameter.annotation}")
            continue
        try:
            lines.append(f"# {setting} = {dumps_value(parameter.default)}")
        except TypeError:  # None, or a default_factory
            lines.append(f"# {setting} is not set")
    return "\n".join(lines) + "\n"


def _error_code(registry: "Registry", text: str) -> str | None:
    """The first error code of a recipe; None if it is valid."""
    import tomllib

    from ..recipe.errors import RecipeError
    from ..recipe.load import load
    from ..recipe.paths import resolve_data_folder
    from ..runs.build import build
    from ..runs.data import read_data_spec

    try:
        loaded = load(tomllib.loads(text), registry)
        build(loaded, registry, read_data_spec(loaded, registry, resolve_data_folder()))
    except RecipeError as error:
        return error.issues[0].code
    return None
