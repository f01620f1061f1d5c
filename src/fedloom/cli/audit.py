"""fedloom audit: what a run's method took from its devices, and how much of their data it gives away."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .options import DataDir, OutputFormat, With, own_tables
from .output import Format, exits, say, say_json

if TYPE_CHECKING:
    from ..analysis.audit import Audit


def audit(
    run: Annotated[Path, typer.Argument(help="The folder of a finished run.")],
    examples: Annotated[int, typer.Option("--examples", min=1, help="How many inputs to look for.")] = 16,
    steps: Annotated[int, typer.Option("--steps", min=3, help="How long to look.")] = 600,
    data_dir: DataDir = None,
    files: With = [],  # noqa: B006 - typer reads it, nobody changes it
    format: OutputFormat = Format.text,
) -> None:
    """Say what left the devices of a run and, where features did, rebuild inputs from them and measure how well."""
    with exits(format):
        from ..analysis.audit import audit
        from ..recipe.paths import data_folder

        found = audit(run, own_tables(files), data_folder(data_dir), examples, steps)
        if format is Format.json:
            say_json(asdict(found))
        else:
            say("\n".join(_told(found)))


def _told(found: "Audit") -> list[str]:
    from ..evaluation.inversion import readable

    lines = [f"method   {found.method}", f"leaves   {found.leaves}", f"stays    {found.stays}"]
    if found.inversion is None:
        return [*lines, "features none leave the devices"]
    measured = found.inversion
    said = "" if found.acknowledged else "; to deploy it, set privacy.acknowledge_feature_sharing = true"
    return [
        *lines,
        f"features of the {found.features_of} leave the devices{said}",
        f"rebuilt  {measured.examples} inputs from their features in {measured.steps} steps: "
        f"{measured.psnr:.1f} dB PSNR on average; {readable(measured.psnr)}",
    ]
