"""fedloom init: a commented recipe to start from, on the bundled data."""

import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import OutputFormat, With, demo, own_tables
from .output import Format, exits, say, say_json

if TYPE_CHECKING:
    from ..recipe.registry import Registry


ONE_TIER = """# this method gives every device the same model
[[tiers]]
name = "all"
share = 1.0
width = 1.0
"""

SPLIT_MODEL = """family = "splitnet"           # a net in three parts: extractor, intermediate, classifier
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

PUBLIC = "public = { examples = 200 }   # without labels, at the server; no device has them\n"


def init(
    method: Annotated[str, typer.Argument(help="A method; `fedloom list methods`.")],
    out: Annotated[Path, typer.Option("--out", help="The file to write; it must not be there yet.")] = Path("my.toml"),
    files: With = [],  # noqa: B006 - typer reads it, nobody changes it
    format: OutputFormat = Format.text,
) -> None:
    """Write a commented recipe that runs a method on the bundled data."""
    with exits(format):
        from ..recipe.errors import RecipeError, RecipeIssue, nearest

        tables = own_tables(files)
        if method not in tables.methods:
            hint = nearest(method, tables.methods)
            raise RecipeError([RecipeIssue((), "METHOD_NAME", f"there is no method {method!r}", hint)], "init")
        if not out.parent.is_dir():
            raise RecipeError([RecipeIssue((), "OUT_MISSING", f"there is no folder {out.parent}")], "--out")
        if out.exists():
            raise RecipeError([RecipeIssue((), "OUT_EXISTS", f"{out} is there already", "say another --out")], "--out")
        out.write_text(_recipe(method, out, tables), encoding="utf-8")
        if format is Format.json:
            say_json({"recipe": str(out)})
        else:
            say(f"{out}\nnext: fedloom run {shlex.quote(str(out))}")


def _recipe(method: str, out: Path, tables: "Registry") -> str:
    """The demonstration's recipe, with another method and with models and tiers that it takes."""
    text = demo().read_text(encoding="utf-8").replace("recipes/demo.toml", str(out))
    text = re.sub(r"\[method\]\n(?:.+\n)+", lambda _: _method_section(method, tables.methods[method]), text)
    tiers = re.compile(r"# a tier is .*\n(?:\[\[tiers\]\]\n(?:.+\n)+\n)+")
    one_tier = tiers.sub(lambda _: ONE_TIER + "\n", text)
    split = re.sub(r"(?<=\[model\]\n)(?:.+\n)+", lambda _: SPLIT_MODEL, tiers.sub(lambda _: SPLIT_TIERS + "\n", text))
    taken = (one for one in (text, one_tier, split) if _problem(tables, one) != "METHOD_REFUSES")
    found = next(taken, text)
    if _problem(tables, found) == "PUBLIC_MISSING":
        found = re.sub(r"(partition = .*\n)", lambda line: line[0] + PUBLIC, found)
    return found


def _method_section(name: str, method: Any) -> str:
    """The method and its settings: those it has a value for as comments, those that must be said as an open line."""
    from ..recipe.toml import dumps, written
    from ..recipe.validation import settings_of

    lines = ["[method]", f'name = "{name}"' + (f"  # {method.paper}" if method.paper else "")]
    lines += (f"{setting} = {written(value)}" for setting, value in method.sample.items())
    for setting, parameter in settings_of(method).items():
        if setting in method.sample:
            continue
        if parameter.default is parameter.empty:
            lines.append(f"# {setting} must be set: {parameter.annotation}")
            continue
        try:
            empty = parameter.default == {}  # a table would get a heading of its own
            lines.append(f"# {setting} = {{}}" if empty else f"# {dumps({setting: parameter.default}).strip()}")
        except TypeError:  # None, or made anew each time
            lines.append(f"# {setting} is not set")
    return "\n".join(lines) + "\n"


def _problem(tables: "Registry", text: str) -> str | None:
    """The code of what is wrong with a recipe, if anything is."""
    import tomllib

    from ..recipe.errors import RecipeError
    from ..recipe.load import load
    from ..recipe.paths import data_folder
    from ..runs.build import build
    from ..runs.data import outline

    try:
        loaded = load(tomllib.loads(text), tables)
        build(loaded, tables, outline(loaded, tables, data_folder()))
    except RecipeError as error:
        return error.problems[0].code
    return None
