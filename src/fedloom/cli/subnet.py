"""fedloom subnet: the best subnet of a finished run within a budget."""

import logging
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import Options, require_new_file, verb
from .output import columns

if TYPE_CHECKING:
    from ..analysis.subnets import Budget, BudgetKind, SubnetSearch


logger = logging.getLogger(__name__)


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
        str | None, typer.Option("--space", help="Search space: tiers, code or paper; default: as trained.")
    ] = None,
    examples: Annotated[
        int | None, typer.Option("--examples", min=1, help="Evaluate on this many test examples; default: all.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Write its weights to this new FILE.safetensors.")] = None,
) -> None:
    """Cut the best subnet within a budget out of a finished run, and show the trade-off of accuracy and cost."""
    from ..analysis.subnets import open_supernet, start_search
    from ..engines import keep_freed_memory

    if sum(value is not None for value in (macs, params, latency)) > 1:
        raise typer.BadParameter("use one of --macs, --params and --latency-ms")
    keep_freed_memory()
    if out is not None:
        require_new_file(out)
    supernet = open_supernet(run, options.registry, options.data, space)
    if latency is not None:
        logger.info("timing subnets on this machine")
    subnets = start_search(supernet, count, seed, _budget(macs, params, latency), examples)
    measured = _measure(subnets, options.processes)
    result = _result(subnets, measured, out)
    options.show(result, _text(result))


def _budget(macs: int | None, params: int | None, latency: float | None) -> "Budget | None":
    from ..analysis.subnets import Budget

    limits: dict[BudgetKind, float | None] = {"macs": macs, "parameters": params, "latency_ms": latency}
    return next((Budget(kind, most) for kind, most in limits.items() if most is not None), None)


def _measure(subnets: "SubnetSearch", workers: int) -> dict[str, Any]:
    """Evaluate the subnets that earlier searches did not."""
    missing, start, done, each = len(subnets.nets) - len(subnets.rows()), time.perf_counter(), 0, 0.0
    for rows in subnets.measure(workers):
        done += len(rows)
        each = (time.perf_counter() - start) / done
        logger.info("subnets %d/%d  %.2g s each  %.0f s to go", done, missing, each, each * (missing - done))
    return {"nets": len(subnets.nets), "now": done, "seconds_each": each, "examples": subnets.examples}


def _result(subnets: "SubnetSearch", measured: dict[str, Any], out: Path | None) -> dict[str, Any]:
    from ..analysis.profiling import latency_ms

    net, best = subnets.best()
    if out is not None:
        subnets.save(net, out)
    timed = subnets.budget is not None and subnets.budget.kind == "latency_ms"
    return {
        "best": {**asdict(best), **({"latency_ms": latency_ms(net)} if timed else {})},
        "front": [asdict(row) for row in subnets.front()],
        "hyper_volume": subnets.hypervolume(),
        "measured": {**measured, "rows": str(subnets.file)},
        "out": None if out is None else str(out),
    }


def _text(result: dict[str, Any]) -> str:
    best, front, measured = result["best"], result["front"], result["measured"]
    varied = _varied([best, *front])
    lines = [
        f"settings    {_sizes(best, varied)}",
        f"parameters  {best['parameters']:,}",
        f"MACs        {best['macs']:,}",
        f"accuracy    {best['accuracy']:.2f} % of {best['examples']:,} test examples",
    ]
    if "latency_ms" in best:
        lines.append(f"latency     {best['latency_ms']:.3f} ms for one example, on one thread of this machine")
    rows = [
        (f"{row['accuracy']:.2f}", f"{row['macs']:,}", f"{row['parameters']:,}", _sizes(row, varied)) for row in front
    ]
    lines += ["", columns(("accuracy", "MACs", "parameters", "settings"), rows)]
    known, each = measured["nets"] - measured["now"], measured["seconds_each"]
    lines += [
        f"the Pareto front of {measured['nets']:,} subnets: beyond it, more accuracy or fewer MACs cost the other",
        f"hypervolume   {result['hyper_volume']:,.0f} MACs x %, against the most MACs and 0 %",
        f"measured      {measured['now']:,} now, {known:,} before" + (f"; {each:.2g} s each" if each else ""),
    ]
    return "\n".join([*lines, *([f"\nwritten: {result['out']}"] if result["out"] else [])])


def _varied(rows: list[dict[str, Any]]) -> list[str]:
    """The settings in which the nets differ; all, if there is only one net."""
    names = sorted({name for row in rows for name in row["settings"]})
    varied = [name for name in names if len({repr(row["settings"].get(name)) for row in rows}) > 1]
    return varied or names


def _sizes(row: dict[str, Any], names: list[str]) -> str:
    values = {name: row["settings"].get(name) for name in names}
    return "  ".join(f"{name} {list(value) if isinstance(value, tuple) else value}" for name, value in values.items())
