"""fedloom run: train by a recipe; without one, the bundled demonstration."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .compare import comparison_text
from .options import Options, bundled_recipe, verb
from .output import RUN_FAILED, Exit, columns
from .report import live_page, write_final_report

if TYPE_CHECKING:
    from ..api.run import Run


DEMO_CONTROLS, DEMO_SEEDS = ("small-for-all", "drop-the-small"), 5
NEXT = """next: fedloom list methods
      fedloom init heterofl --out my.toml
      fedloom compare my.toml --seeds 3"""


@verb(
    "sets",
    "seed",
    "out",
    "data_dir",
    "workers",
    "device",
    "files",
    "track",
    "format",
    "open_page",
    "no_report",
    "quiet",
)
def run(
    options: Options,
    recipe: Annotated[Path | None, typer.Argument(help="A recipe; default: the demonstration.")] = None,
    engine: Annotated[
        str | None, typer.Option("--engine", help="in_process, or flower-sim: on Ray, RAY_ADDRESS for a cluster.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Let --out replace an earlier run.")] = False,
) -> None:
    """Train by a recipe. Without one: twenty devices of three sizes on bundled images, five seeds, within a minute."""
    from ..api.verbs import compare, run
    from ..recipe.errors import RecipeIssue
    from ..recipe.paths import choose_output_folder

    trackers = options.trackers()
    if recipe is None and engine is not None:
        issue = RecipeIssue(("engine", "kind"), "ENGINE_DEMO", "the demonstration runs in process")
        raise options.load(bundled_recipe("demo")).error(issue)
    shared = options.arguments("sets", "seed", "out", "data_dir", "workers")
    if options.open_page and shared["out"] is None:
        shared["out"] = choose_output_folder(
            None, "compare" if recipe is None else options.load(recipe).recipe.method.name
        )
    live = shared["out"] if options.open_page else None
    if recipe is None:
        with live_page(live):
            compared = compare(
                bundled_recipe("demo"), controls=DEMO_CONTROLS, seeds=DEMO_SEEDS, track=trackers, command="fedloom run",
                **shared,
            )  # fmt: skip
        finished = compared.runs(compared.result.records[0]["arm"])[0]
        report = write_final_report(compared.folder, options.no_report)
        _show(options, finished, comparison_text(compared.result), report, NEXT)
        if compared.failed:
            raise Exit(RUN_FAILED)
        return
    changes = [*options.changes, *([] if engine is None else [f"engine.kind={engine}"])]
    with live_page(live):
        finished = run(recipe, force=force, track=trackers, **{**shared, "sets": changes})
    _show(options, finished, final_table(finished), write_final_report(finished.folder, options.no_report))


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
