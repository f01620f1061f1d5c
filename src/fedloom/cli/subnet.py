"""fedloom subnet: the best sub-net of a finished run for a device, by what it may cost."""

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import DataDir, OutputFormat, Quiet, With, Workers, own_tables, processes
from .output import Format, columns, exits, note, say, say_json

if TYPE_CHECKING:
    from ..analysis.subnets import Budget, Kind, Search


def subnet(
    run: Annotated[Path, typer.Argument(help="The folder of a finished run.")],
    macs: Annotated[int | None, typer.Option("--macs", min=0, help="At most so many multiply-adds.")] = None,
    params: Annotated[int | None, typer.Option("--params", min=0, help="At most so many parameters.")] = None,
    latency: Annotated[
        float | None, typer.Option("--latency-ms", min=0, help="At most so long for one example, on this machine.")
    ] = None,
    count: Annotated[int, typer.Option("--count", min=1, help="How many sub-nets to try.")] = 500,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Which sub-nets are drawn.")] = 0,
    space: Annotated[
        str | None, typer.Option("--space", help="What may be drawn: tiers, code or paper; else as the run trained.")
    ] = None,
    examples: Annotated[
        int | None, typer.Option("--examples", min=1, help="Judge on so many test examples; else on all.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Write its weights: FILE.safetensors, not there yet.")
    ] = None,
    data_dir: DataDir = None,
    workers: Workers = None,
    files: With = [],  # noqa: B006 - typer reads it, nobody changes it
    format: OutputFormat = Format.text,
    quiet: Quiet = False,
) -> None:
    """Cut the best sub-net within a budget out of a finished run, and show what accuracy costs."""
    if sum(one is not None for one in (macs, params, latency)) > 1:
        raise typer.BadParameter("say one of --macs, --params and --latency-ms")
    with exits(format):
        from ..analysis.subnets import open_supernet, search
        from ..engines import keep_the_heap
        from ..recipe.paths import data_folder

        keep_the_heap()
        _must_be_free(out)
        supernet = open_supernet(run, own_tables(files), data_folder(data_dir), space)
        if latency is not None:
            note("timing sub-nets on this machine", quiet)
        sought = search(supernet, count, seed, _budget(macs, params, latency), examples)
        judged = _follow(sought, processes(workers), quiet)
        _say(_result(sought, judged, out), format)


def _must_be_free(out: Path | None) -> None:
    from ..recipe.errors import RecipeError, RecipeIssue

    if out is not None and not out.parent.is_dir():
        raise RecipeError([RecipeIssue((), "OUT_MISSING", f"there is no folder {out.parent}")], "--out")
    if out is not None and out.exists():
        raise RecipeError([RecipeIssue((), "OUT_EXISTS", f"{out} is there already", "say another --out")], "--out")


def _budget(macs: int | None, params: int | None, latency: float | None) -> "Budget | None":
    from ..analysis.subnets import Budget

    said: dict[Kind, float | None] = {"macs": macs, "parameters": params, "latency_ms": latency}
    return next((Budget(kind, most) for kind, most in said.items() if most is not None), None)


def _follow(sought: "Search", workers: int, quiet: bool) -> dict[str, Any]:
    """Judge what is not known yet, and say what it costs."""
    lacking, began, judged, each = len(sought.nets) - len(sought.rows()), time.perf_counter(), 0, 0.0
    for rows in sought.measure(workers):
        judged += len(rows)
        each = (time.perf_counter() - began) / judged
        note(f"sub-nets {judged}/{lacking}  {each:.2g} s each  {each * (lacking - judged):.0f} s to go", quiet)
    return {"nets": len(sought.nets), "now": judged, "seconds_each": each, "examples": sought.examples}


def _result(sought: "Search", judged: dict[str, Any], out: Path | None) -> dict[str, Any]:
    from ..analysis.profiling import latency_ms

    net, best = sought.best()
    if out is not None:
        sought.save(net, out)
    timed = sought.budget is not None and sought.budget.kind == "latency_ms"
    return {
        "best": {**asdict(best), **({"latency_ms": latency_ms(net)} if timed else {})},
        "front": [asdict(row) for row in sought.front()],
        "hyper_volume": sought.hyper_volume(),
        "measured": {**judged, "rows": str(sought.file)},
        "out": None if out is None else str(out),
    }


def _say(result: dict[str, Any], format: Format) -> None:
    """To whoever asked: programs get everything, people what they can read."""
    if format is Format.json:
        say_json(result)
    else:
        say(_told(result))


def _told(result: dict[str, Any]) -> str:
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
        f"the front of {measured['nets']:,} sub-nets: beyond it, more accuracy or fewer MACs cost the other",
        f"hyper-volume  {result['hyper_volume']:,.0f} MACs x %, against the most MACs and 0 %",
        f"measured      {measured['now']:,} now, {known:,} before" + (f"; {each:.2g} s each" if each else ""),
    ]
    return "\n".join([*lines, *([f"\nwritten: {result['out']}"] if result["out"] else [])])


def _varied(rows: list[dict[str, Any]]) -> list[str]:
    """The settings in which the nets differ; all, where there is only one net."""
    names = sorted({name for row in rows for name in row["settings"]})
    varied = [name for name in names if len({repr(row["settings"].get(name)) for row in rows}) > 1]
    return varied or names


def _sizes(row: dict[str, Any], names: list[str]) -> str:
    said = {name: row["settings"].get(name) for name in names}
    return "  ".join(f"{name} {list(value) if isinstance(value, tuple) else value}" for name, value in said.items())
