"""fedloom init: a commented recipe to start from, on the bundled data."""

import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import Options, bundled_recipe, require_new_file, verb

if TYPE_CHECKING:
    from ..recipe.registries import Registries


ONE_TIER = """# one tier: every device has the same model
[[tiers]]
name = "all"
share = 1.0
width = 1.0
"""

ALIKE_TIERS = """# a tier is a class of devices: its share of the fleet. All have one model; the method takes parts
[[tiers]]
name = "large"
share = 0.5

[[tiers]]
name = "small"
share = 0.5
"""

SPLIT_MODEL = """family = "splitnet"           # a network in three parts: extractor, intermediate, classifier
channels = 8                  # of the extractor; the stages behind it have up to sixteen times as many
head = { cells = 3 }          # the classifier sees the last map pooled to 3 x 3 cells
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

EXIT_MODEL = """family = "preactresnet"       # a residual network with an early exit
hidden = [8, 16, 32, 64]      # channels of its stages
blocks = [1, 1, 1, 1]         # residual blocks of its stages
exit_after = 2                # stages before the exit
head = { cells = 3 }          # exit and end: norm, ReLU, pooling to 3 x 3 cells, classifier
"""

EXIT_TIERS = """# a tier is a class of devices: its share of the fleet, and how many stages of the full model it trains
[[tiers]]
name = "large"
share = 0.5

[[tiers]]
name = "small"
share = 0.5
stages = 2
"""

EXITS_MODEL = """family = "preactresnet"       # a residual network
hidden = [8, 16, 32, 64]      # channels of its stages
blocks = [1, 1, 1, 1]         # residual blocks of its stages
exit_after = "every"          # a classifier after every stage
head = { cells = 3 }          # each classifier: norm, ReLU, pooling to 3 x 3 cells, a linear layer
"""

EXITS_TIERS = """# a tier is a class of devices: its share of the fleet, and how many stages of the full model it trains
[[tiers]]
name = "large"
share = 0.3

[[tiers]]
name = "medium"
share = 0.3
stages = 3

[[tiers]]
name = "small"
share = 0.4
stages = 2
"""

SCALED_TIERS = """# a tier is a class of devices: its share of the fleet, and which stages it trains at which width
[[tiers]]
name = "large"
share = 0.3
width = 1.0

[[tiers]]
name = "medium"
share = 0.3
stages = 3
width = 0.75

[[tiers]]
name = "small"
share = 0.4
stages = 2
width = 0.5
"""

FOREIGN_MODEL = """family = "convnet"            # the net of tiers that name no other
"""

FOREIGN_TIERS = """# a tier is a class of devices: its share of the fleet, and its net; features are equally long
[[tiers]]
name = "convnet"
share = 0.5
hidden = [16, 32]

[[tiers]]
name = "mlp"
share = 0.5
family = "mlp"
hidden = [64, 32]
"""

EQUAL_MODEL = """family = "convnet"            # `fedloom list models`
hidden = [32, 32, 32]         # channels of its layers, of which the last two are alike
exit_after = "every"          # a classifier after every layer
head = { cells = 3 }          # each classifier sees its map pooled to 3 x 3 cells
"""

EQUAL_TIERS = """# a tier is a class of devices: its share of the fleet, and how many layers of the full model it trains
[[tiers]]
name = "large"
share = 0.5

[[tiers]]
name = "small"
share = 0.5
depth = 2
"""

COLUMNS_MODEL = """family = "columnnet"          # columns of convolutions, each of which reads those before it
columns = [[4, 8, 16], [5, 10, 20], [10, 20, 40]]  # channels of every column, layer by layer
head = { cells = 3 }          # each column's classifier sees its last map pooled to 3 x 3 cells
"""

COLUMNS_TIERS = """# a tier is a class of devices: its share of the fleet, and how many of the columns it trains
[[tiers]]
name = "large"
share = 0.3

[[tiers]]
name = "medium"
share = 0.3
held = 2

[[tiers]]
name = "small"
share = 0.4
held = 1
"""

DEEP_LR = 0.1
"""The learning rate of the networks with residual blocks: of 0.05, 0.1, 0.2 and 0.4 the best on validation images."""

PUBLIC = "public = { examples = 200 }   # unlabeled, at the server; no device has them\n"


@verb("files", "format")
def init(
    options: Options,
    method: Annotated[str, typer.Argument(help="A method; `fedloom list methods`.")],
    out: Annotated[Path, typer.Option("--out", help="The file to write; it must not exist yet.")] = Path("my.toml"),
) -> None:
    """Write a commented recipe that runs a method on the bundled data."""
    from ..recipe.errors import RecipeError, RecipeIssue
    from ..registry import suggest

    registries = options.registries
    if method not in registries.methods:
        hint = suggest(method, registries.methods)
        raise RecipeError([RecipeIssue((), "METHOD_NAME", f"there is no method {method!r}", hint)], "init")
    require_new_file(out)
    own = (argument for file in options.files for argument in ("--with", str(file)))
    command = shlex.join(["fedloom", "run", str(out), *own])
    out.write_text(_recipe(method, command, registries), encoding="utf-8")
    options.show({"recipe": str(out)}, f"{out}\nnext: {command}")


def _recipe(method: str, command: str, registries: "Registries") -> str:
    """The bundled recipe with another method, and with a model and tiers that the method supports."""
    text = bundled_recipe("starter").read_text(encoding="utf-8").replace("fedloom run recipes/starter.toml", command)
    text = re.sub(r"\[method\]\n(?:.+\n)+", lambda _: _method_section(method, registries.methods[method]), text)
    tiers = re.compile(r"# a tier is .*\n(?:\[\[tiers\]\]\n(?:.+\n)+\n)+")
    model = re.compile(r"(?<=\[model\]\n)(?:.+\n)+")
    slower = re.sub(r"\blr = [0-9.]+", f"lr = {DEEP_LR}", text)
    without_static_norm = re.sub(r"statistics = .*\n", "", slower)

    def with_nets(base: str, own_tiers: str, own_model: str | None = None) -> str:
        made = tiers.sub(lambda _: own_tiers + "\n", base)
        return model.sub(lambda _: own_model, made) if own_model else made

    candidates = {
        "widths": text,
        "one": with_nets(text, ONE_TIER),
        "alike": with_nets(text, ALIKE_TIERS),
        "one exit": with_nets(without_static_norm, EXIT_TIERS, EXIT_MODEL),
        "exits": with_nets(without_static_norm, EXITS_TIERS, EXITS_MODEL),
        "exits and widths": with_nets(without_static_norm, SCALED_TIERS, EXITS_MODEL),
        "parts": with_nets(slower, SPLIT_TIERS, SPLIT_MODEL),
        "layers": with_nets(slower, EQUAL_TIERS, EQUAL_MODEL),
        "columns": with_nets(text, COLUMNS_TIERS, COLUMNS_MODEL),
        "unrelated": with_nets(without_static_norm, FOREIGN_TIERS, FOREIGN_MODEL),
    }
    info = registries.methods[method].info
    order = [info.example_nets or "widths", *(["unrelated"] if info.heterogeneity == "any" else []), *candidates]
    supported = (candidates[nets] for nets in order if _error_code(registries, candidates[nets]) != "METHOD_REFUSES")
    recipe = next(supported, text)
    if _error_code(registries, recipe) == "PUBLIC_MISSING":
        recipe = re.sub(r"(partition = .*\n)", lambda line: line[0] + PUBLIC, recipe)
    return recipe


def _method_section(name: str, method: Any) -> str:
    """The method, its example settings, comments with the defaults of its other settings, and how messages travel."""
    from ..recipe.load import dumps_value
    from ..registry import settable_parameters

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
    if method.info.example_compression:
        lines += ["", "[compression]"]
        lines += (f"{setting} = {dumps_value(value)}" for setting, value in method.info.example_compression.items())
    return "\n".join(lines) + "\n"


def _error_code(registries: "Registries", text: str) -> str | None:
    """The first error code of a recipe; None if it is valid."""
    import tomllib

    from ..recipe.errors import RecipeError
    from ..recipe.load import load
    from ..recipe.paths import resolve_data_folder
    from ..runs.build import build
    from ..runs.data import read_data_spec

    try:
        loaded = load(tomllib.loads(text), registries)
        build(loaded, registries, read_data_spec(loaded, registries, resolve_data_folder()))
    except RecipeError as error:
        return error.issues[0].code
    return None
