"""fedloom resume: go on with a run after a crash or an interruption. fedloom verify: play its last rounds again."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from .compare import follow_all, tell
from .options import (
    DataDir,
    Equal,
    NoReport,
    OutputFormat,
    Quiet,
    TestSet,
    Tracked,
    Unit,
    With,
    Workers,
    own_tables,
    processes,
    tracked,
)
from .output import RUN_FAILED, Exit, Format, exits, note, say, say_json
from .report import page_of
from .run import final_table

Folder = Annotated[Path | None, typer.Argument(help="The folder of a run; none: the newest in ./runs.")]


def resume(
    run: Folder = None,
    test: TestSet = "global",
    equal: Equal = Unit.rounds,
    data_dir: DataDir = None,
    workers: Workers = None,
    files: With = [],  # noqa: B006 - typer reads it, nobody changes it
    track: Tracked = [],  # noqa: B006
    format: OutputFormat = Format.text,
    no_report: NoReport = False,
    quiet: Quiet = False,
) -> None:
    """Finish a run, or a whole comparison, from its last checkpoint: the same bits as if it had never stopped."""
    with exits(format):
        from ..analysis.run import Run
        from ..deploy.remote import engaged
        from ..engines import keep_the_heap
        from ..recipe.paths import data_folder
        from ..runs.resume import newest_run, reopened
        from ..runs.trackers import followed_by
        from ..studies.compare import is_comparison, reopened_comparison
        from .progress import follow

        keep_the_heap()
        followers = tracked(track)
        folder = run or newest_run()
        tables = own_tables(files)
        if is_comparison(folder):
            planned = reopened_comparison(folder, tables, data_folder(data_dir), processes(workers), note)
            planned = replace(planned, track=followers)
            tell(planned, follow_all(planned, test, quiet, equal), format, no_report)
            return
        data, count = data_folder(data_dir), processes(workers)
        experiment, since = reopened(folder, tables, data, count, note, engaged)
        note(f"{folder}: goes on after round {since.number}", quiet)
        name = experiment.loaded.recipe.method.name
        follow(experiment, folder, name, quiet, since, followed_by(followers, noticed=note))
        finished, page = Run(folder), page_of(folder, no_report)
        if format is Format.json:
            say_json({"run": str(folder), "since": since.number, "final": [asdict(one) for one in finished.final]})
        else:
            say(f"{final_table(finished)}\n\nrun: {folder}" + (f"\n{page}" if page else ""))


def verify(
    run: Folder = None,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="At least so many rounds; more if need be.")] = 1,
    data_dir: DataDir = None,
    workers: Workers = None,
    files: With = [],  # noqa: B006
    format: OutputFormat = Format.text,
    quiet: Quiet = False,
) -> None:
    """Play the last rounds of a finished run again and compare weights, devices' memories and rows to the bit."""
    with exits(format):
        from ..recipe.paths import data_folder
        from ..runs.resume import newest_run, verify

        folder = run or newest_run()
        found = verify(
            folder, own_tables(files), data_folder(data_dir), rounds, processes(workers), lambda said: note(said, quiet)
        )
        if format is Format.json:
            say_json({"run": str(folder), **asdict(found)})
        else:
            again = f"{found.rounds} rounds after round {found.since} played again"
            say(f"{again}: " + ("; ".join(found.differences) if found.differences else "the same to the bit"))
        if found.differences:
            raise Exit(RUN_FAILED)
