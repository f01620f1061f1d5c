"""fedloom doctor: is this machine ready, and does a recipe hide a trap?"""

import importlib.util
import os
import platform
from pathlib import Path
from typing import Annotated, Any

import typer

from .options import DataDir, OutputFormat, Sets, With, read
from .output import Format, columns, exits, say, say_json

EXTRAS = {"flower": "flwr", "export": "onnx", "track": "tensorboard", "privacy": "dp_accounting", "hf": "datasets"}


def doctor(
    recipe: Annotated[Path | None, typer.Argument(help="A recipe to look at as well.")] = None,
    sets: Sets = [],  # noqa: B006 - typer reads it, nobody changes it
    data_dir: DataDir = None,
    files: With = [],  # noqa: B006
    format: OutputFormat = Format.text,
) -> None:
    """Say what this machine has, which data sets it finds and, of a recipe, what to watch out for."""
    with exits(format):
        findings = _machine() + _data(data_dir)
        if recipe is not None:
            findings += _recipe(recipe, sets, data_dir, files)
        if format is Format.json:
            say_json([{"name": name, "state": state, "detail": detail} for name, state, detail in findings])
        else:
            say(columns(("what", "", ""), findings))


Finding = tuple[str, str, str]


def _machine() -> list[Finding]:
    import torch

    extras = [name for name, module in EXTRAS.items() if importlib.util.find_spec(module)]
    writable = os.access(Path.cwd(), os.W_OK)
    return [
        ("python", "ok", platform.python_version()),
        ("torch", "ok", f"{torch.__version__}, {'CUDA' if torch.cuda.is_available() else 'CPU'}"),
        ("cores", "ok", str(os.cpu_count())),
        (
            "folder for runs",
            "ok" if writable else "warn",
            f"{Path.cwd() / 'runs'}{'' if writable else ' cannot be written'}",
        ),
        ("extras", "ok", ", ".join(extras) or "none installed"),
    ]


def _data(data_dir: Path | None) -> list[Finding]:
    from ..recipe.paths import data_folder

    folder = data_folder(data_dir)
    if not folder.is_dir():
        return [("data", "ok", f"bundled sets only: {folder} is not there (FEDLOOM_DATA or --data-dir)")]
    found = sorted(one.name for one in folder.iterdir() if one.is_dir() or one.suffix == ".npz")
    return [("data", "ok", f"{folder}: {', '.join(found) or 'empty'}")]


def _recipe(recipe: Path, sets: list[str], data_dir: Path | None, files: list[Path]) -> list[Finding]:
    from ..recipe.paths import data_folder
    from ..runs.build import build
    from ..runs.data import outline

    loaded, tables = read(recipe, sets, None, files)
    fleet, _ = build(loaded, tables, outline(loaded, tables, data_folder(data_dir)))
    return [
        ("recipe", "ok", str(recipe)),
        *_batch_norm(loaded.recipe, fleet),
        *_scaler(fleet),
        *_blocks(loaded.recipe, fleet),
        *_shares(fleet),
    ]


def _batch_norm(recipe: Any, fleet: Any) -> list[Finding]:
    if not fleet.global_model.statistics():
        return []
    query = recipe.evaluation.statistics.get("query", "pooled")
    if query == "pooled":
        return [("batch norm", "warn", "statistics are pooled over all data, which only a simulation can; "
                 'evaluation.statistics.query = "per_device" is what a deployment has')]  # fmt: skip
    if fleet.size < 10:
        return [("batch norm", "warn", "fewer than 10 devices: their statistics say much of each; use group norm")]
    return [("batch norm", "ok", "statistics by devices' own sums")]


def _scaler(fleet: Any) -> list[Finding]:
    """The scaler acts in training alone. A norm after it hides that; without one a narrow slice is judged on numbers of
    another size than it was trained on."""
    settings = [tier.model.spelled_out() for tier in fleet.tiers]
    bare = any(one.get("normalization") == "none" and one.get("scaler") for one in settings)
    if not bare or len({one.get("width") for one in settings}) == 1:
        return []
    return [("scaler", "warn", "without a norm narrow tiers train scaled but are judged unscaled; set scaler = false")]


def _blocks(recipe: Any, fleet: Any) -> list[Finding]:
    """How many devices of a tier run at once, tried on made-up examples."""
    found = []
    for tier in fleet.tiers if recipe.engine.devices_per_block != 1 else ():
        reasons = tier.model.slow_reasons()
        detail = "; ".join(reasons) or "many devices run as one network"
        found.append((f"tier {tier.name}", "warn" if reasons else "ok", detail))
    return found


def _shares(fleet: Any) -> list[Finding]:
    held = {fleet.device(index, 1).tier for index in range(fleet.size)}
    empty = [tier.name for tier in fleet.tiers if tier.name not in held]
    return (
        [("tiers", "warn", f"no device in {', '.join(empty)}: the fleet is too small for its share")] if empty else []
    )
