"""fedloom subnet: the best subnet of a finished run within a budget."""

import logging
from pathlib import Path
from typing import Annotated, Any

import typer

from .options import Options, require_new_file, verb
from .output import columns

logger = logging.getLogger(__name__)

NOTES = {"test": ", so its accuracy is slightly overestimated", "validation": ", which are not used for training"}


@verb("data_dir", "workers", "files", "format", "quiet")
def subnet(
    options: Options,
    run: Annotated[Path, typer.Argument(help="The folder of a finished run.")],
    macs: Annotated[int | None, typer.Option("--macs", min=0, help="At most this many multiply-adds.")] = None,
    params: Annotated[int | None, typer.Option("--params", min=0, help="At most this many parameters.")] = None,
    latency: Annotated[
        float | None, typer.Option("--latency-ms", min=0, help="At most this time for one example, on this machine.")
    ] = None,
    count: Annotated[int, typer.Option("--count", min=1, help="Number of subnets to try.")] = 500,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the drawn subnets.")] = 0,
    space: Annotated[
        str | None,
        typer.Option("--space", help="between (tiers), tiers, code or paper; default: as trained, else between."),
    ] = None,
    examples: Annotated[
        int | None, typer.Option("--examples", min=1, help="Evaluate on this many examples; default: all.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Write it to this new FILE.safetensors.")] = None,
) -> None:
    """Cut the best subnet within a budget out of a finished run, and show the trade-off of accuracy and cost."""
    from ..api.verbs import subnet

    if sum(value is not None for value in (macs, params, latency)) > 1:
        raise typer.BadParameter("use one of --macs, --params and --latency-ms")
    if out is not None:
        require_new_file(out)
    if latency is not None:
        logger.info("timing subnets on this machine")
    result = subnet(
        run, macs=macs, params=params, latency=latency, count=count, seed=seed, space=space, examples=examples, out=out,
        progress=_log_progress, **options.arguments("data_dir", "workers"),
    ).to_dict()  # fmt: skip
    options.show(result, _text(result))


def _log_progress(done: int, missing: int, each: float) -> None:
    logger.info("subnets %d/%d  %.2g s each  %.0f s to go", done, missing, each, each * (missing - done))


def _text(result: dict[str, Any]) -> str:
    best, front, measured = result["best"], result["front"], result["measured"]
    varied, kind = _varied([best, *front]), measured["of"]
    lines = [
        f"settings    {_sizes(best, varied)}",
        f"parameters  {best['parameters']:,}",
        f"MACs        {best['macs']:,}",
        f"accuracy    {best['accuracy']:.2f} % of {best['examples']:,} {kind} examples",
        f"trained     {best['trained']}",
    ]
    if "latency_ms" in best:
        lines.append(f"latency     {best['latency_ms']:.3f} ms for one example, on one thread of this machine")
    rows = [
        (f"{row['accuracy']:.2f}", f"{row['macs']:,}", f"{row['parameters']:,}", row["trained"], _sizes(row, varied))
        for row in front
    ]
    lines += ["", columns(("accuracy", "MACs", "parameters", "trained", "settings"), rows)]
    known, each = measured["nets"] - measured["now"], measured["seconds_each"]
    lines += [
        f"the Pareto front of {measured['nets']:,} subnets: beyond it, more accuracy or fewer MACs cost the other",
        f"hypervolume   {result['hyper_volume']:,.0f} MACs x %, against the most MACs and 0 %",
        f"measured      {measured['now']:,} now, {known:,} before" + (f"; {each:.2g} s each" if each else ""),
        f"chosen on     {measured['examples']:,} {kind} examples{NOTES[kind]}",
    ]
    if result["out"]:
        lines.append(f'\nwritten: {result["out"]}\nload it: fedloom.load_model("{result["out"]}")')
    return "\n".join(lines)


def _varied(rows: list[dict[str, Any]]) -> list[str]:
    """The settings in which the nets differ; all, if there is only one net."""
    names = sorted({name for row in rows for name in row["settings"]})
    varied = [name for name in names if len({repr(row["settings"].get(name)) for row in rows}) > 1]
    return varied or names


def _sizes(row: dict[str, Any], names: list[str]) -> str:
    values = {name: row["settings"].get(name) for name in names}
    return "  ".join(f"{name} {list(value) if isinstance(value, tuple) else value}" for name, value in values.items())
