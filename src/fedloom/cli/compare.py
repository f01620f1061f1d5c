"""fedloom compare: a recipe against other arms and the usual ways to treat a fleet, paired by seed."""

import math
import shlex
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..wording import pluralize, wrap
from .options import EqualBudget, Options, split_names, verb
from .output import RUN_FAILED, Exit, columns, emphasize, write, write_json
from .report import REPORT, write_final_report

if TYPE_CHECKING:
    from ..api.verbs import CompareResult
    from ..reporting.paired_stats import Difference
    from ..reporting.tables import ComparisonResult

MOST_VERDICT_LINES = 5


class TableFormat(StrEnum):
    """How the result of a comparison is written."""

    text = "text"
    json = "json"
    markdown = "markdown"
    csv = "csv"
    latex = "latex"
    html = "html"


@verb(
    "seeds", "test", "metric", "equal", "sets", "seed", "out", "data_dir", "workers", "device", "files", "track",
    "no_report", "quiet",
)  # fmt: skip
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
    tune: Annotated[
        int, typer.Option("--tune", min=0, help="First search the settings of each arm, with so many trials.")
    ] = 0,
    format: Annotated[
        TableFormat, typer.Option("--format", help="text for people, json for programs; or a table; or the page.")
    ] = TableFormat.text,
) -> None:
    """Run a recipe next to the arms it names, or else standalone, small-for-all, drop-the-small and all-large."""
    from ..api.verbs import compare

    result = compare(
        recipe, *(others or ()), methods="all" if methods == "all" else split_names(methods or ""),
        controls=None if controls is None else split_names(controls), track=options.trackers(), tune=tune,
        command=_command(options, [recipe, *(others or [])], methods, controls, tune),
        **options.arguments("seeds", "test", "metric", "equal", "sets", "seed", "out", "data_dir", "workers"),
    )  # fmt: skip
    show_comparison(options, result, format)


def _command(options: Options, recipes: list[Path], methods: str | None, controls: str | None, tune: int) -> str:
    """The command that repeats this comparison."""
    words = ["fedloom", "compare", *map(str, recipes), "--seeds", str(options.seeds)]
    values = {
        "--seed": None if options.seed is None else str(options.seed),
        "--methods": methods,
        "--controls": controls,
        "--equal": None if options.equal is EqualBudget.rounds else options.equal.value,
        "--test": options.test,
        "--metric": options.metric,
        "--tune": str(tune) if tune else None,
    }
    words += [word for option, value in values.items() if value is not None for word in (option, value)]
    words += [word for change in options.changes for word in ("--set", change)]
    return shlex.join([*words, *(word for file in options.files for word in ("--with", str(file)))])


def show_comparison(options: Options, compared: "CompareResult", format: StrEnum) -> None:
    """Write a comparison to stdout; files next to its runs hold the other formats."""
    from ..reporting.tables import to_csv, to_latex, to_markdown

    report = write_final_report(compared.folder, options.no_report, format == TableFormat.html)
    if format == TableFormat.json:
        write_json(compared.to_dict())
    elif format == TableFormat.text:
        write(comparison_text(compared.result))
        write(f"\nruns: {compared.folder}" + (f"\n{report}" if report else ""))
    elif format == TableFormat.html:
        write((compared.folder / REPORT).read_text(encoding="utf-8"))
    else:
        tables = {TableFormat.markdown: to_markdown, TableFormat.csv: to_csv, TableFormat.latex: to_latex}
        write(tables[TableFormat(format)](compared.result).rstrip("\n"))
    if compared.failed:
        raise Exit(RUN_FAILED)


def comparison_text(result: "ComparisonResult") -> str:
    from ..reporting.tables import build_tables

    tables = [
        columns(table.header, table.mark_strong(lambda cell: f"{cell}*"))
        + "\n"
        + "\n".join(map(wrap, table.legend("*").splitlines()))
        for table in build_tables(result)
    ]
    parts = [*tables, "\n".join(["verdict", *verdict_lines(result)])]
    if result.left_out:
        parts.append(_paragraph("left out, because they do not fit this recipe", left_out_lines(result.left_out)))
    return "\n\n".join(parts)


def left_out_lines(left_out: Mapping[str, str]) -> list[str]:
    """A line for each reason, with all the methods that it is true of."""
    methods: dict[str, list[str]] = {}
    for name, reason in left_out.items():
        methods.setdefault(reason, []).append(name)
    return [f"{', '.join(names)}: {reason}" for reason, names in methods.items()]


def verdict_lines(result: "ComparisonResult") -> list[str]:
    """At most five lines: the finding, what went wrong, a line per tier, then details; the report has them all."""
    subjects = {gain.this for gain in result.gains}
    named = len(subjects) > 1 or not result.finding.startswith(tuple(f"{name} " for name in subjects))
    gains = [_gain_line(gain, named) for gain in result.gains]
    sentences = [result.finding, *result.notes, *gains, *map(str, result.claims)]
    sentences += [line for line in (*result.statements, *result.details) if line not in sentences]
    lines: list[str] = []
    for number, sentence in enumerate(filter(None, sentences)):
        wrapped = wrap(sentence, "  ", "    ").splitlines()
        if number and len(lines) + len(wrapped) > MOST_VERDICT_LINES:
            continue
        lines += [emphasize(line) for line in wrapped] if number == 0 and result.finding else wrapped
    return lines[:MOST_VERDICT_LINES]


def _gain_line(gain: "Difference", named: bool) -> str:
    """One tier in one line: by how much, against which arm, and whether it may be claimed."""
    metric, seeds = gain.metric, pluralize(gain.seeds, "seed")
    noise = f"± {metric.number(gain.noise)}, " if math.isfinite(gain.noise) else ""
    size = f"{metric.number(gain.mean, '+')}{metric.difference_unit}"
    verdict = gain.verdict.partition(",")[0]
    arm = f"{gain.this} " if named else ""
    return f"{gain.tier}: {arm}{size} against {gain.other} ({noise}{seeds}): {verdict}"


def _paragraph(title: str, lines: list[str]) -> str:
    return "\n".join([title, *(wrap(line, "  ", "    ") for line in lines)])
