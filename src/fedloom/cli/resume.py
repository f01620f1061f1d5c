"""fedloom resume, finish and verify: go on with a run, take it as it is, or replay its last rounds."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .compare import show_comparison
from .options import Options, verb
from .output import RUN_FAILED, Exit
from .report import write_final_report
from .run import final_table
from .tune import show_search

if TYPE_CHECKING:
    from ..api.run import Run

RunFolder = Annotated[Path | None, typer.Argument(help="The folder of a run; default: the newest in ./runs.")]


@verb("test", "equal", "data_dir", "workers", "files", "track", "format", "no_report", "quiet")
def resume(
    options: Options,
    run: RunFolder = None,
    rounds: Annotated[
        int | None,
        typer.Option("--rounds", min=1, help="Go on until so many rounds are done, even if it is finished."),
    ] = None,
) -> None:
    """Finish a run, a whole comparison or a search from its folder: the same bits as if it had never stopped."""
    from ..api.verbs import CompareResult, TuneResult, resume

    result = resume(
        run, rounds=rounds, track=options.trackers(), **options.arguments("test", "equal", "data_dir", "workers")
    )
    if isinstance(result, CompareResult):
        show_comparison(options, result, options.format)
        return
    if isinstance(result, TuneResult):
        show_search(options, result)
        return
    _show(options, result, {"since": result.resumed_after})


@verb("data_dir", "files", "format", "no_report", "quiet")
def finish(options: Options, run: RunFolder = None) -> None:
    """Take an interrupted run as it is: models, report and export, as if its recipe had ended there."""
    from ..api.verbs import finish

    _show(options, finish(run, **options.arguments("data_dir")), {})


def _show(options: Options, result: "Run", more: dict[str, Any]) -> None:
    report = write_final_report(result.folder, options.no_report)
    options.show(
        {"run": str(result.folder), **more, "final": [asdict(value) for value in result.final]},
        f"{final_table(result)}\n\nrun: {result.folder}" + (f"\n{report}" if report else ""),
    )


@verb("data_dir", "workers", "files", "format", "quiet")
def verify(
    options: Options,
    run: RunFolder = None,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Replay at least this many rounds.")] = 1,
) -> None:
    """Replay the last rounds of a finished run and compare weights, devices' state and rows bit by bit."""
    from ..api.verbs import verify
    from ..runs.resume import find_newest_run

    folder = run or find_newest_run()
    verdict = verify(folder, rounds=rounds, **options.arguments("data_dir", "workers"))
    outcome = "; ".join(verdict.differences) or verdict.sameness
    text = f"{verdict.replayed}: {outcome}"
    options.show({"run": str(folder), **verdict.to_dict()}, text)
    if verdict.differences:
        raise Exit(RUN_FAILED)
