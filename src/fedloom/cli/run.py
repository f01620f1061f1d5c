"""fedloom run: train by a recipe; without one, the bundled demonstration."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .compare import follow_all, told
from .options import DataDir, Out, OutputFormat, Quiet, Seed, Sets, With, Workers, demo, processes, read
from .output import Format, columns, exits, say, say_json
from .progress import follow

if TYPE_CHECKING:
    from ..experiment import Run

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
    files: With = [],  # noqa: B006
    format: OutputFormat = Format.text,
    quiet: Quiet = False,
) -> None:
    """Train by a recipe. Without one: twenty devices of three sizes on bundled images, in under a minute."""
    with exits(format):
        from ..engines import keep_the_heap
        from ..experiment import Run, assemble, comparison
        from ..experiment.places import data_folder, fresh_folder

        keep_the_heap()
        loaded, tables = read(recipe or demo(), sets, seed, files)
        if recipe is None:
            home = fresh_folder(out, "compare")
            planned = comparison(loaded, tables, 1, DEMO_CONTROLS, home, data_folder(data_dir), processes(workers))
            result = follow_all(planned, "global", quiet)
            finished = Run(planned.folders(loaded.recipe.method.name)[0])
            if format is Format.text:
                say(told(result))
        else:
            experiment = assemble(loaded, tables, data_folder(data_dir), workers=processes(workers))
            folder = fresh_folder(out, loaded.recipe.method.name)
            follow(experiment, folder, loaded.recipe.method.name, quiet)
            finished = Run(folder)
            if format is Format.text:
                say(final_table(finished))
        if format is Format.json:
            final = [asdict(one) for one in finished.final]
            say_json({"run": str(finished.folder), "final": final})
            return
        say(f"\nrun: {finished.folder}")
        if recipe is None:
            say(NEXT)


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
