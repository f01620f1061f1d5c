"""fedloom audit: what a run's method took from its devices, and how much of their data it gives away."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..wording import pluralize
from .options import Options, verb

if TYPE_CHECKING:
    from ..analysis.audit import Audit


@verb("data_dir", "files", "format")
def audit(
    options: Options,
    run: Annotated[Path, typer.Argument(help="The folder of a finished run.")],
    examples: Annotated[int, typer.Option("--examples", min=1, help="Number of inputs to reconstruct.")] = 16,
    steps: Annotated[int, typer.Option("--steps", min=3, help="Steps of the reconstruction.")] = 600,
) -> None:
    """Show what left the devices of a run; where features did, reconstruct inputs from them and measure how well."""
    from ..api.verbs import audit

    result = audit(run, examples=examples, steps=steps, **options.arguments("data_dir"))
    options.show(result.to_dict(), "\n".join(_lines(result)))


def _lines(result: "Audit") -> list[str]:
    from ..evaluation.inversion import describe_psnr

    lines = [f"method   {result.method}", f"leaves   {result.uploads}", f"stays    {result.client_state}"]
    if result.inversion is None:
        return [*lines, "features none leave the devices"]
    inversion = result.inversion
    hint = "" if result.acknowledged else "; to deploy it, set privacy.acknowledge_feature_sharing = true"
    return [
        *lines,
        f"features of the {result.shared_features} leave the devices{hint}",
        f"rebuilt  {pluralize(inversion.examples, 'input')} from their features in "
        f"{pluralize(inversion.steps, 'step')}: "
        f"{inversion.psnr:.1f} dB PSNR on average; {describe_psnr(inversion.psnr)}",
    ]
