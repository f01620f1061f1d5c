"""fedloom init: a commented recipe to start from, on the bundled data."""

import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import OutputFormat, With, demo
from .output import Format, exits, say, say_json

if TYPE_CHECKING:
    from ..experiment import Tables

ONE_TIER = """# this method gives every device the same model
[[tiers]]
name = "all"
share = 1.0
width = 1.0
"""


def init(
    method: Annotated[str, typer.Argument(help="A method; `fedloom list methods`.")],
    out: Annotated[Path, typer.Option("--out", help="The file to write; it must not be there yet.")] = Path("my.toml"),
    files: With = [],  # noqa: B006 - typer reads it, nobody changes it
    format: OutputFormat = Format.text,
) -> None:
    """Write a commented recipe that runs a method on the bundled data."""
    with exits(format):
        from ..experiment import Problem, RecipeError, Tables
        from ..experiment.problems import nearest

        tables = Tables()
        for file in files:
            tables = tables.with_file(file)
        if method not in tables.methods:
            hint = nearest(method, tables.methods)
            raise RecipeError([Problem((), "METHOD_NAME", f"there is no method {method!r}", hint)], "init")
        if not out.parent.is_dir():
            raise RecipeError([Problem((), "OUT_MISSING", f"there is no folder {out.parent}")], "--out")
        if out.exists():
            raise RecipeError([Problem((), "OUT_EXISTS", f"{out} is there already", "say another --out")], "--out")
        out.write_text(_recipe(method, out, tables), encoding="utf-8")
        if format is Format.json:
            say_json({"recipe": str(out)})
        else:
            say(f"{out}\nnext: fedloom run {shlex.quote(str(out))}")


def _recipe(method: str, out: Path, tables: "Tables") -> str:
    """The demonstration's recipe, with another method and as many tiers as it takes."""
    text = demo().read_text(encoding="utf-8").replace("recipes/demo.toml", str(out))
    text = re.sub(r"\[method\]\n(?:.+\n)+", lambda _: _method_section(method, tables.methods[method]), text)
    if _refuses_tiers(method, tables, text):
        text = re.sub(r"# a tier is .*\n(?:\[\[tiers\]\]\n(?:.+\n)+\n)+", lambda _: ONE_TIER + "\n", text)
    return text


def _method_section(name: str, method: Any) -> str:
    """The method and its settings: those it has a value for as comments, those that must be said as an open line."""
    from ..experiment.choices import settings_of
    from ..experiment.toml import dumps

    lines = ["[method]", f'name = "{name}"' + (f"  # {method.paper}" if method.paper else "")]
    for setting, parameter in settings_of(method).items():
        if parameter.default is parameter.empty:
            lines.append(f"# {setting} must be set: {parameter.annotation}")
            continue
        try:
            empty = parameter.default == {}  # a table would get a heading of its own
            lines.append(f"# {setting} = {{}}" if empty else f"# {dumps({setting: parameter.default}).strip()}")
        except TypeError:  # None, or made anew each time
            lines.append(f"# {setting} is not set")
    return "\n".join(lines) + "\n"


def _refuses_tiers(method: str, tables: "Tables", text: str) -> bool:
    import tomllib

    from ..experiment import RecipeError, load
    from ..experiment.assemble import build, outline
    from ..experiment.places import data_folder

    try:
        loaded = load(tomllib.loads(text), tables)
        build(loaded, tables, outline(loaded, tables, data_folder()))
    except RecipeError as error:
        return error.problems[0].code == "METHOD_REFUSES"
    return False
