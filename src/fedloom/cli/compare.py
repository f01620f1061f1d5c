"""fedloom compare: a recipe beside other arms and the ordinary ways to treat a fleet, paired by seed."""

import shlex
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import (
    DataDir,
    Equal,
    NoReport,
    Out,
    Quiet,
    Seed,
    Seeds,
    Sets,
    TableFormat,
    TestSet,
    Tracked,
    Unit,
    With,
    Workers,
    listed,
    processes,
    read_judged,
    tracked,
)
from .output import RUN_FAILED, Exit, columns, exits, note, say, say_json
from .progress import follow_several
from .report import PAGE, page_of

if TYPE_CHECKING:
    from ..recipe.load import Loaded
    from ..recipe.registry import Registry
    from ..reporting.result import Result
    from ..studies.compare import Comparison


Others = Annotated[list[Path] | None, typer.Argument(help="Other recipes, for the same data, rounds and evaluation.")]
Methods = Annotated[
    str | None,
    typer.Option("--methods", help="Other methods for the same recipe, by commas; all: those it can be run with."),
]
Controls = Annotated[
    str | None,
    typer.Option("--controls", help="Which controls to run, by commas; else all, or none if the recipe has arms."),
]
ResultFormat = Annotated[
    TableFormat, typer.Option("--format", help="text for people, json for programs; or a table; or the page.")
]


def compare(
    recipe: Annotated[Path, typer.Argument(help="A recipe.")],
    others: Others = None,
    methods: Methods = None,
    seeds: Seeds = 1,
    controls: Controls = None,
    test: TestSet = "global",
    equal: Equal = Unit.rounds,
    sets: Sets = [],  # noqa: B006 - typer reads it, nobody changes it
    seed: Seed = None,
    out: Out = None,
    data_dir: DataDir = None,
    workers: Workers = None,
    files: With = [],  # noqa: B006
    track: Tracked = [],  # noqa: B006
    format: ResultFormat = TableFormat.text,
    no_report: NoReport = False,
    quiet: Quiet = False,
) -> None:
    """Run a recipe beside the arms it names, or else standalone, small-for-all, drop-the-small and all-large."""
    with exits(format):
        from ..engines import keep_the_heap
        from ..recipe.load import load
        from ..recipe.paths import data_folder, fresh_folder
        from ..studies.compare import comparison
        from ..studies.controls import CONTROLS, with_methods

        keep_the_heap()
        followers = tracked(track)
        loaded, tables = read_judged(recipe, sets, seed, files, test)
        data = data_folder(data_dir)
        beside = {path.stem: load(path, tables, [*sets, f"seed={loaded.recipe.seed}"]) for path in others or []}
        beside |= with_methods(loaded, tables, _methods(methods, loaded, tables, data, quiet))
        usual = [] if loaded.recipe.compare.arms or beside else list(CONTROLS)
        names = usual if controls is None else listed(controls)
        home = fresh_folder(out, "compare")
        planned = comparison(loaded, tables, seeds, names, home, data, processes(workers), beside)
        if equal is Unit.seconds:
            planned.refuse_without_clock()
        spoken = {"--methods": methods, "--controls": controls, "--equal": equal.value, "--test": test}
        again = command([recipe, *(others or [])], seeds, seed, sets, files, spoken)
        planned = replace(planned, command=again, track=followers, noticed=note)
        tell(planned, follow_all(planned, test, quiet, equal), format, no_report)


def _methods(said: str | None, loaded: "Loaded", tables: "Registry", data: Path, quiet: bool) -> list[str]:
    from ..studies.controls import admitted

    if said != "all":
        return listed(said or "")
    found, refused = admitted(loaded, tables, data)
    for name, reason in refused.items():
        note(f"without {name}: {reason}", quiet)
    return found


def command(
    recipes: list[Path], seeds: int, seed: int | None, sets: list[str], files: list[Path], others: dict[str, str | None]
) -> str:
    """What to say to have it all again."""
    usual = {"--methods": None, "--controls": None, "--equal": "rounds", "--test": "global"}
    words = ["fedloom", "compare", *map(str, recipes), "--seeds", str(seeds)]
    words += ["--seed", str(seed)] if seed is not None else []
    words += [word for option, said in others.items() if said != usual[option] for word in (option, str(said))]
    words += [word for one in sets for word in ("--set", one)]
    return shlex.join([*words, *(word for file in files for word in ("--with", str(file)))])


def tell(planned: "Comparison", result: "Result", format: StrEnum, no_report: bool = False) -> None:
    """In the way that was asked for; the other ways are in files beside the runs."""
    from ..reporting.tables import FILES, as_csv, latex, markdown

    for name, written in FILES.items():
        (planned.home / name).write_text(written(result), encoding="utf-8")
    page = page_of(planned.home, no_report, format == TableFormat.html)
    if format == TableFormat.json:
        say_json({"run": str(planned.home), **records(result), "failed": list(planned.left())})
    elif format == TableFormat.text:
        say(told(result))
        say(f"\nruns: {planned.home}" + (f"\n{page}" if page else ""))
    elif format == TableFormat.html:
        say((planned.home / PAGE).read_text(encoding="utf-8"))
    else:
        tables = {TableFormat.markdown: markdown, TableFormat.csv: as_csv, TableFormat.latex: latex}
        say(tables[TableFormat(format)](result).rstrip("\n"))
    if planned.left():
        raise Exit(RUN_FAILED)


def follow_all(planned: "Comparison", test: str, quiet: bool, equal: Unit = Unit.rounds) -> "Result":
    follow_several(planned, quiet)
    return planned.result(test, equal.value)


def records(result: "Result") -> dict[str, Any]:
    return {
        "arms": result.records,
        "verdict": result.verdict,
        "targets": [one.record() for one in result.reached],
        "claims": [one.record() for one in result.claims],
        "overall": [one.record() for one in result.overall],
    }


def told(result: "Result") -> str:
    from ..reporting.tables import grids

    tables = [
        columns(grid.header, grid.marked(lambda cell: f"{cell}*")) + f"\n{grid.legend('*')}" for grid in grids(result)
    ]
    return "\n\n".join([*tables, "verdict\n" + "\n".join(f"  {one}" for one in result.verdict)])
