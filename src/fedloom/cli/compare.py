"""fedloom compare: a recipe against other arms and the usual ways to treat a fleet, paired by seed."""

import logging
import shlex
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import EqualBudget, Options, split_names, verb
from .output import RUN_FAILED, Exit, columns, write, write_json
from .progress import run_group
from .report import REPORT, write_final_report

if TYPE_CHECKING:
    from ..recipe.load import LoadedRecipe
    from ..reporting.tables import ComparisonResult
    from ..studies.compare import Comparison


logger = logging.getLogger(__name__)


class TableFormat(StrEnum):
    """How the result of a comparison is written."""

    text = "text"
    json = "json"
    markdown = "markdown"
    csv = "csv"
    latex = "latex"
    html = "html"


@verb("seeds", "test", "equal", "sets", "seed", "out", "data_dir", "workers", "files", "track", "no_report", "quiet")
def compare(
    options: Options,
    recipe: Annotated[Path, typer.Argument(help="A recipe.")],
    others: Annotated[
        list[Path] | None, typer.Argument(help="Other recipes, for the same data, rounds and evaluation.")
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option("--methods", help="Other methods for the same recipe, by commas; all: every method that fits."),
    ] = None,
    controls: Annotated[
        str | None, typer.Option("--controls", help="Controls, by commas; default: all; none if the recipe has arms.")
    ] = None,
    format: Annotated[
        TableFormat, typer.Option("--format", help="text for people, json for programs; or a table; or the page.")
    ] = TableFormat.text,
) -> None:
    """Run a recipe next to the arms it names, or else standalone, small-for-all, drop-the-small and all-large."""
    from ..engines import keep_freed_memory
    from ..recipe.load import load
    from ..recipe.paths import choose_output_folder
    from ..studies.compare import plan_comparison
    from ..studies.controls import CONTROLS, arms_with_methods

    keep_freed_memory()
    trackers, registry = options.trackers(), options.registry
    loaded = options.load_with_test(recipe)
    changes = [*options.sets, f"seed={loaded.recipe.seed}"]
    arms = {path.stem: load(path, registry, changes) for path in others or []}
    arms |= arms_with_methods(loaded, registry, _method_names(options, methods, loaded))
    default = [] if loaded.recipe.compare.arms or arms else list(CONTROLS)
    names = default if controls is None else split_names(controls)
    home = choose_output_folder(options.out, "compare")
    planned = plan_comparison(loaded, registry, options.seeds, names, home, options.data, options.processes, arms)
    if options.equal is EqualBudget.seconds:
        planned.check_simulated_seconds()
    command = _command(options, [recipe, *(others or [])], methods, controls)
    run_comparison(options, replace(planned, command=command, track=trackers), format)


def _method_names(options: Options, methods: str | None, loaded: "LoadedRecipe") -> list[str]:
    from ..studies.controls import supported_methods

    if methods != "all":
        return split_names(methods or "")
    names, refused = supported_methods(loaded, options.registry, options.data)
    for name, reason in refused.items():
        logger.info("without %s: %s", name, reason)
    return names


def _command(options: Options, recipes: list[Path], methods: str | None, controls: str | None) -> str:
    """The command that repeats this comparison."""
    words = ["fedloom", "compare", *map(str, recipes), "--seeds", str(options.seeds)]
    values = {
        "--seed": None if options.seed is None else str(options.seed),
        "--methods": methods,
        "--controls": controls,
        "--equal": None if options.equal is EqualBudget.rounds else options.equal.value,
        "--test": None if options.test == "global" else options.test,
    }
    words += [word for option, value in values.items() if value is not None for word in (option, value)]
    words += [word for change in options.sets for word in ("--set", change)]
    return shlex.join([*words, *(word for file in options.files for word in ("--with", str(file)))])


def run_comparison(options: Options, planned: "Comparison", format: StrEnum) -> None:
    """Finish a comparison and write its result to stdout; files next to the runs hold the other formats."""
    from ..reporting.tables import FILES, to_csv, to_latex, to_markdown

    run_group(planned)
    result = planned.result(options.test, options.equal.value)
    for name, render in FILES.items():
        (planned.home / name).write_text(render(result), encoding="utf-8")
    report = write_final_report(planned.home, options.no_report, format == TableFormat.html)
    if format == TableFormat.json:
        write_json({"run": str(planned.home), **_record(result), "failed": list(planned.unfinished_runs())})
    elif format == TableFormat.text:
        write(comparison_text(result))
        write(f"\nruns: {planned.home}" + (f"\n{report}" if report else ""))
    elif format == TableFormat.html:
        write((planned.home / REPORT).read_text(encoding="utf-8"))
    else:
        tables = {TableFormat.markdown: to_markdown, TableFormat.csv: to_csv, TableFormat.latex: to_latex}
        write(tables[TableFormat(format)](result).rstrip("\n"))
    if planned.unfinished_runs():
        raise Exit(RUN_FAILED)


def _record(result: "ComparisonResult") -> dict[str, Any]:
    return {
        "arms": result.records,
        "verdict": result.verdict,
        "targets": [target.record() for target in result.reached],
        "claims": [claim.record() for claim in result.claims],
        "overall": [comparison.record() for comparison in result.overall],
    }


def comparison_text(result: "ComparisonResult") -> str:
    from ..reporting.tables import build_tables

    tables = [
        columns(table.header, table.mark_strong(lambda cell: f"{cell}*")) + f"\n{table.legend('*')}"
        for table in build_tables(result)
    ]
    return "\n\n".join([*tables, "verdict\n" + "\n".join(f"  {line}" for line in result.verdict)])
