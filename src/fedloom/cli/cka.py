"""fedloom cka: how alike the layers of two trained models see the same examples."""

from pathlib import Path
from typing import Annotated

import typer

from .options import DataDir, OutputFormat, With, own_tables
from .output import Format, columns, exits, say, say_json


def cka(
    first: Annotated[Path, typer.Argument(help="The folder of a finished run.")],
    second: Annotated[Path, typer.Argument(help="Another, or the same.")],
    tier: Annotated[str | None, typer.Option("--tier", help="Whose model; else the largest tier's.")] = None,
    examples: Annotated[int, typer.Option("--examples", min=2, help="How many test examples.")] = 1000,
    data_dir: DataDir = None,
    files: With = [],  # noqa: B006 - typer reads it, nobody changes it
    format: OutputFormat = Format.text,
) -> None:
    """Compare two trained models layer by layer: linear CKA, 1 where they see the same."""
    with exits(format):
        from ..analysis.cka import cka
        from ..recipe.paths import data_folder

        found = cka(first, second, tier, examples, own_tables(files), data_folder(data_dir))
        if format is Format.json:
            say_json({"rows": found.rows, "columns": found.columns, "cka": found.values})
            return
        rows = [
            (name, *(f"{value:.3f}" for value in line)) for name, line in zip(found.rows, found.values, strict=True)
        ]
        say(columns(("", *found.columns), rows))
