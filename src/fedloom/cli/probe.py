"""fedloom probe: what the machine it runs on can do, for fleet planning."""

import math
import platform
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import DataDir, OutputFormat, Sets, With, read
from .output import Format, columns, exits, say, say_json

if TYPE_CHECKING:
    from ..analysis.hardware import Machine


BYTES = {"memory": "memory free", "memory_total": "memory", "disk_free": "disk free"}


def probe(
    recipe: Annotated[Path | None, typer.Argument(help="Train this recipe's models; none: a small net.")] = None,
    name: Annotated[str | None, typer.Option("--name", help="What to call it; else as the system does.")] = None,
    bandwidth: Annotated[float | None, typer.Option("--bandwidth", help="Bytes a second; not measured.")] = None,
    deadline: Annotated[float | None, typer.Option("--deadline", help="Seconds a round may take.")] = None,
    sets: Sets = [],  # noqa: B006 - typer reads it, nobody changes it
    data_dir: DataDir = None,
    files: With = [],  # noqa: B006
    format: OutputFormat = Format.text,
) -> None:
    """Measure this machine: free memory, disk, and how fast it trains. plan --fleet takes what --format json prints."""
    with exits(format):
        from ..analysis.hardware import facts

        found = _measured(recipe, name or platform.node() or "this", sets, data_dir, files)
        told = {key: value for key, value in asdict(found).items() if value not in (None, {}) and value != math.inf}
        limits = {"bandwidth": bandwidth, "deadline": deadline}
        told |= {key: value for key, value in limits.items() if value is not None}
        if format is Format.json:
            say_json({**told, **facts()})
        else:
            say(columns(("what", ""), _rows({**told, **facts()})))


def _measured(recipe: Path | None, name: str, sets: list[str], data_dir: Path | None, files: list[Path]) -> "Machine":
    from ..analysis.hardware import probe

    if recipe is None:
        return probe(name, {})
    from ..client import OPTIMIZERS
    from ..recipe.paths import data_folder
    from ..recipe.validation import instantiate
    from ..runs.build import build_models
    from ..runs.data import outline

    loaded, tables = read(recipe, sets, None, files)
    part = loaded.recipe.training
    models = dict(build_models(loaded, tables, outline(loaded, tables, data_folder(data_dir))))
    return probe(name, models, part.batch_size, instantiate(OPTIMIZERS, part.optimizer)())


def _rows(told: dict[str, Any]) -> list[tuple[str, str]]:
    rows = []
    for key, value in told.items():
        if key == "speeds":
            rows += [(f"  tier {tier}", f"{speed:.3g}") for tier, speed in value.items()]
        elif key == "speed":
            rows.append(("trains", f"{value:.3g} multiply-adds a second, on one thread"))
        elif key in BYTES:
            rows.append((BYTES[key], f"{value / 1e9:.2f} GB"))
        else:
            rows.append((key, str(value)))
    return rows
