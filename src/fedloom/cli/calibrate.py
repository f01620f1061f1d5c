"""fedloom calibrate: measure how many devices of each tier to run at once here, and write it into the recipe."""

from pathlib import Path
from typing import Annotated

import typer

from .options import DataDir, OutputFormat, Sets, With, read
from .output import Format, columns, exits, say, say_json


def calibrate(
    recipe: Annotated[Path, typer.Argument(help="A recipe.")],
    write: Annotated[bool, typer.Option("--write", help="Write the numbers into the recipe.")] = False,
    sets: Sets = [],  # noqa: B006 - typer reads it, nobody changes it
    data_dir: DataDir = None,
    files: With = [],  # noqa: B006
    format: OutputFormat = Format.text,
) -> None:
    """Measure how many devices of each tier run best as one network. Without it a fixed rule decides."""
    with exits(format):
        from ..analysis.profiling import SIZES, calibrated, with_blocks
        from ..engines import keep_the_heap
        from ..recipe.paths import data_folder
        from ..runs.build import build
        from ..runs.data import outline
        from ..runs.loop import one_thread

        keep_the_heap()
        loaded, tables = read(recipe, sets, None, files)
        fleet, _ = build(loaded, tables, outline(loaded, tables, data_folder(data_dir)))
        with one_thread():
            measured = calibrated(fleet, loaded.recipe.training.batch_size)
        if write:
            recipe.write_text(with_blocks(recipe.read_text(encoding="utf-8"), measured), encoding="utf-8")
        if format is Format.json:
            say_json([{"tier": one.tier, "best": one.best, "milliseconds": one.milliseconds} for one in measured])
            return
        rows = [(one.tier, *(f"{one.milliseconds[size]:.2f}" for size in SIZES), str(one.best)) for one in measured]
        say(columns(("ms a device", *(f"{size} at once" for size in SIZES), "best"), rows))
        if write:
            say(f"written: {recipe}")
