"""fedloom cka: how similar the layers of two trained models represent the same examples."""

from pathlib import Path
from typing import Annotated

import typer

from .options import Options, verb
from .output import columns


@verb("data_dir", "files", "format")
def cka(
    options: Options,
    first: Annotated[Path, typer.Argument(help="The folder of a finished run.")],
    second: Annotated[Path, typer.Argument(help="Another, or the same.")],
    tier: Annotated[str | None, typer.Option("--tier", help="Whose model; default: the largest tier's.")] = None,
    examples: Annotated[int, typer.Option("--examples", min=2, help="Number of test examples.")] = 1000,
) -> None:
    """Compare two trained models layer by layer: linear CKA, 1 where representations are equal."""
    from ..analysis.trained import compute_cka

    result = compute_cka(first, second, tier, examples, options.registry, options.data)
    rows = [(name, *(f"{value:.3f}" for value in line)) for name, line in zip(result.rows, result.values, strict=True)]
    data = {"rows": result.rows, "columns": result.columns, "cka": result.values}
    options.show(data, columns(("", *result.columns), rows))
