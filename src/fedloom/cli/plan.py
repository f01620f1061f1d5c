"""fedloom plan: what each tier costs, before it is spent."""

from pathlib import Path
from typing import Annotated

import typer

from .options import DataDir, OutputFormat, Seed, Sets, With, read
from .output import Format, columns, exits, say, say_json


def plan(
    recipe: Annotated[Path, typer.Argument(help="A recipe.")],
    latency: Annotated[
        bool, typer.Option("--latency", help="Also time one example through each tier's model, on this machine.")
    ] = False,
    sets: Sets = [],  # noqa: B006 - typer reads it, nobody changes it
    seed: Seed = None,
    data_dir: DataDir = None,
    files: With = [],  # noqa: B006
    format: OutputFormat = Format.text,
) -> None:
    """Parameters, multiply-adds and bytes per round, tier by tier. Needs no data for the known data sets."""
    with exits(format):
        from ..experiment import tier_costs
        from ..experiment.places import data_folder

        loaded, tables = read(recipe, sets, seed, files)
        costs = tier_costs(loaded, tables, data_folder(data_dir), latency)
        if format is Format.json:
            say_json({"tiers": [one.record() for one in costs]})
            return
        header = ("tier", "parameters", "MACs", "published FLOPs", "bytes down", "bytes up")
        rows = [(one.name, *(_cell(value) for key, value in one.record().items() if key != "name")) for one in costs]
        say(columns((*header, "ms here") if latency else header, rows))


def _cell(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.2f}"
