"""fedloom resume: continue a run after a crash or an interruption. fedloom verify: replay its last rounds."""

import logging
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from .compare import run_comparison
from .options import Options, verb
from .output import RUN_FAILED, Exit
from .progress import run_experiment
from .report import write_final_report
from .run import final_table

logger = logging.getLogger(__name__)

RunFolder = Annotated[Path | None, typer.Argument(help="The folder of a run; default: the newest in ./runs.")]


@verb("test", "equal", "data_dir", "workers", "files", "track", "format", "no_report", "quiet")
def resume(options: Options, run: RunFolder = None) -> None:
    """Finish a run, or a whole comparison, from its last checkpoint: the same bits as if it had never stopped."""
    from ..analysis.run import Run
    from ..deploy.remote import attach_engine
    from ..engines import keep_freed_memory
    from ..runs.resume import find_newest_run, reopen_run
    from ..runs.trackers import build_trackers
    from ..studies.compare import is_comparison, reopen_comparison

    keep_freed_memory()
    trackers, folder = options.trackers(), run or find_newest_run()
    if is_comparison(folder):
        planned = reopen_comparison(folder, options.registry, options.data, options.processes)
        run_comparison(options, replace(planned, track=trackers), options.format)
        return
    experiment, since = reopen_run(folder, options.registry, options.data, options.processes, attach_engine)
    logger.info("%s: continues after round %d", folder, since.number)
    run_experiment(experiment, folder, experiment.loaded.recipe.method.name, since, build_trackers(trackers))
    finished, report = Run(folder), write_final_report(folder, options.no_report)
    options.show(
        {"run": str(folder), "since": since.number, "final": [asdict(value) for value in finished.final]},
        f"{final_table(finished)}\n\nrun: {folder}" + (f"\n{report}" if report else ""),
    )


@verb("data_dir", "workers", "files", "format", "quiet")
def verify(
    options: Options,
    run: RunFolder = None,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Replay at least this many rounds.")] = 1,
) -> None:
    """Replay the last rounds of a finished run and compare weights, devices' state and rows bit by bit."""
    from ..runs.resume import find_newest_run, verify

    folder = run or find_newest_run()
    verdict = verify(folder, options.registry, options.data, rounds, options.processes)
    outcome = "; ".join(verdict.differences) or "the same to the bit"
    text = f"{verdict.rounds} rounds after round {verdict.since} replayed: {outcome}"
    options.show({"run": str(folder), **asdict(verdict)}, text)
    if verdict.differences:
        raise Exit(RUN_FAILED)
