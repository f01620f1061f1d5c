"""fedloom cka: how similar the layers of two trained models represent the same examples."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..wording import wrap
from .options import Options, verb
from .output import columns

if TYPE_CHECKING:
    from ..analysis.trained import CkaMap


@verb("data_dir", "files", "format")
def cka(
    options: Options,
    first: Annotated[Path, typer.Argument(help="The folder of a finished run.")],
    second: Annotated[Path, typer.Argument(help="Another, or the same.")],
    tier: Annotated[str | None, typer.Option("--tier", help="Whose model; default: the largest tier's.")] = None,
    examples: Annotated[int, typer.Option("--examples", min=2, help="Number of test examples.")] = 1000,
) -> None:
    """Compare two trained models layer by layer: linear CKA, 1 where representations are equal."""
    from ..api.verbs import cka

    result = cka(first, second, tier=tier, examples=examples, **options.arguments("data_dir"))
    rows = [(name, *(f"{value:.3f}" for value in line)) for name, line in zip(result.rows, result.values, strict=True)]
    options.show(result.to_dict(), columns(("layer", *result.columns), rows) + "\n" + wrap(_explain(result)))


def _explain(result: "CkaMap") -> str:
    """What the table compares."""
    title = result.title[0].upper() + result.title[1:]
    layers = "Layers are the places where the model hands out features, averaged over positions, and its logits"
    return f"{title}. {layers}."
