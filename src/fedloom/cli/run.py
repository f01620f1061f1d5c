"""fedloom run: train by a recipe; without one, the bundled demonstration."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .compare import follow_all, told
from .options import (
    DataDir,
    NoReport,
    Out,
    OutputFormat,
    Quiet,
    Seed,
    Sets,
    Tracked,
    With,
    Workers,
    demo,
    processes,
    read,
    tracked,
)
from .output import RUN_FAILED, Exit, Format, columns, exits, note, say, say_json
from .progress import follow
from .report import page_of

if TYPE_CHECKING:
    from ..analysis.run import Run
    from ..studies.compare import Comparison


EngineKind = Annotated[
    str | None, typer.Option("--engine", help="in_process, or flower-sim: on Ray, RAY_ADDRESS for a cluster.")
]
DEMO_CONTROLS = ("small-for-all", "drop-the-small")
NEXT = """next: fedloom list methods
      fedloom init heterofl --out my.toml
      fedloom compare my.toml --seeds 3"""


def run(
    recipe: Annotated[Path | None, typer.Argument(help="A recipe; none: the demonstration.")] = None,
    sets: Sets = [],  # noqa: B006 - typer reads it, nobody changes it
    seed: Seed = None,
    out: Out = None,
    data_dir: DataDir = None,
    workers: Workers = None,
    engine: EngineKind = None,
    files: With = [],  # noqa: B006
    track: Tracked = [],  # noqa: B006
    format: OutputFormat = Format.text,
    no_report: NoReport = False,
    quiet: Quiet = False,
) -> None:
    """Train by a recipe. Without one: twenty devices of three sizes on bundled images, in under a minute."""
    with exits(format):
        from ..analysis.run import Run
        from ..deploy.remote import engaged
        from ..engines import keep_the_heap
        from ..recipe.errors import RecipeIssue
        from ..recipe.paths import data_folder, fresh_folder
        from ..runs.build import assemble
        from ..runs.trackers import followed_by
        from ..studies.compare import comparison

        keep_the_heap()
        followers = tracked(track)
        chosen = [] if engine is None else [f"engine.kind={engine}"]
        loaded, tables = read(recipe or demo(), [*sets, *chosen], seed, files)
        if recipe is None and chosen:
            raise loaded.error(RecipeIssue(("engine", "kind"), "ENGINE_DEMO", "the demonstration runs in process"))
        if recipe is None:
            home = fresh_folder(out, "compare")
            planned = comparison(loaded, tables, 1, DEMO_CONTROLS, home, data_folder(data_dir), processes(workers))
            _demonstrate(
                replace(planned, command="fedloom run", track=followers, noticed=note), format, no_report, quiet
            )
            return
        data, folder = data_folder(data_dir), fresh_folder(out, loaded.recipe.method.name)
        experiment = assemble(loaded, tables, data, workers=processes(workers))
        experiment = engaged(experiment, tables, data, folder)
        follow(experiment, folder, loaded.recipe.method.name, quiet, followers=followed_by(followers, noticed=note))
        finished = Run(folder)
        if format is Format.text:
            say(final_table(finished))
        _tell(finished, page_of(folder, no_report), format)


def _demonstrate(planned: "Comparison", format: Format, no_report: bool, quiet: bool) -> None:
    """The first arm beside ordinary ways to treat its fleet."""
    from ..analysis.run import Run

    result = follow_all(planned, "global", quiet)
    if format is Format.text:
        say(told(result))
    finished = Run(planned.folders(next(iter(planned.experiments)))[0])
    _tell(finished, page_of(planned.home, no_report), format, NEXT)
    if planned.left():
        raise Exit(RUN_FAILED)


def _tell(finished: "Run", page: str, format: Format, further: str = "") -> None:
    if format is Format.json:
        say_json({"run": str(finished.folder), "final": [asdict(one) for one in finished.final]})
        return
    say("\n".join(filter(None, [f"\nrun: {finished.folder}", page, further])))


def final_table(finished: "Run") -> str:
    """The last and the best value of all that was judged."""
    rows = [
        (
            f"{one.candidate} {one.tier}",
            one.test,
            one.metric,
            f"{one.value:.2f}",
            f"{one.best:.2f}",
            str(one.best_round),
        )
        for one in finished.final
    ]
    return columns(("judged", "test", "metric", "last", "best", "in round"), rows)
