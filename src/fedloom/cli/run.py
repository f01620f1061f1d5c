"""fedloom run: train by a recipe; without one, the bundled demonstration."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .compare import comparison_text
from .options import Options, demo_recipe, verb
from .output import RUN_FAILED, Exit, columns
from .progress import run_experiment, run_group
from .report import write_final_report

if TYPE_CHECKING:
    from ..analysis.run import Run
    from ..studies.compare import Comparison


DEMO_CONTROLS = ("small-for-all", "drop-the-small")
NEXT = """next: fedloom list methods
      fedloom init heterofl --out my.toml
      fedloom compare my.toml --seeds 3"""


@verb("sets", "seed", "out", "data_dir", "workers", "files", "track", "format", "no_report", "quiet")
def run(
    options: Options,
    recipe: Annotated[Path | None, typer.Argument(help="A recipe; default: the demonstration.")] = None,
    engine: Annotated[
        str | None, typer.Option("--engine", help="in_process, or flower-sim: on Ray, RAY_ADDRESS for a cluster.")
    ] = None,
) -> None:
    """Train by a recipe. Without one: twenty devices of three sizes on bundled images, in under a minute."""
    from ..analysis.run import Run
    from ..deploy.remote import attach_engine
    from ..engines import keep_freed_memory
    from ..recipe.errors import RecipeIssue
    from ..recipe.paths import choose_output_folder
    from ..runs.build import assemble
    from ..runs.trackers import build_trackers
    from ..studies.compare import plan_comparison

    keep_freed_memory()
    trackers = options.trackers()
    loaded = options.load(recipe or demo_recipe(), *([] if engine is None else [f"engine.kind={engine}"]))
    if recipe is None and engine is not None:
        raise loaded.error(RecipeIssue(("engine", "kind"), "ENGINE_DEMO", "the demonstration runs in process"))
    registry, data = options.registry, options.data
    if recipe is None:
        home = choose_output_folder(options.out, "compare")
        planned = plan_comparison(loaded, registry, 1, DEMO_CONTROLS, home, data, options.processes)
        _run_demo(options, replace(planned, command="fedloom run", track=trackers))
        return
    folder = choose_output_folder(options.out, loaded.recipe.method.name)
    experiment = attach_engine(assemble(loaded, registry, data, workers=options.processes), registry, data, folder)
    run_experiment(experiment, folder, loaded.recipe.method.name, trackers=build_trackers(trackers))
    finished = Run(folder)
    _show(options, finished, final_table(finished), write_final_report(folder, options.no_report))


def _run_demo(options: Options, planned: "Comparison") -> None:
    """Run the recipe next to its controls; the result is that of the recipe itself."""
    from ..analysis.run import Run

    run_group(planned)
    text = comparison_text(planned.result("global"))
    finished = Run(planned.folders(next(iter(planned.experiments)))[0])
    _show(options, finished, text, write_final_report(planned.home, options.no_report), NEXT)
    if planned.unfinished_runs():
        raise Exit(RUN_FAILED)


def _show(options: Options, finished: "Run", text: str, *lines: str) -> None:
    final = [asdict(value) for value in finished.final]
    text = "\n".join(filter(None, [text, f"\nrun: {finished.folder}", *lines]))
    options.show({"run": str(finished.folder), "final": final}, text)


def final_table(finished: "Run") -> str:
    """The last and the best value of each metric."""
    rows = [
        (f"{final.candidate} {final.tier}", final.test, final.metric, f"{final.value:.2f}", f"{final.best:.2f}",
         str(final.best_round))
        for final in finished.final
    ]  # fmt: skip
    return columns(("model", "test", "metric", "last", "best", "in round"), rows)
