"""fedloom tune: search good settings on validation examples, with the same budget for every arm."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..wording import wrap
from .options import Options, split_names, verb
from .output import columns

if TYPE_CHECKING:
    from ..api.tune import TuneResult


@verb("metric", "equal", "sets", "seed", "out", "data_dir", "workers", "files", "format", "quiet")
def tune(
    options: Options,
    recipe: Annotated[Path, typer.Argument(help="A recipe; its arms are searched too.")],
    trials: Annotated[int, typer.Option("--trials", min=1, help="Trials of each arm; the first is the recipe.")] = 16,
    search: Annotated[
        list[str] | None,
        typer.Option(
            "--search", metavar="KEY[=LOW..HIGH[:log]]", help="What to search; default: all that is declared."
        ),
    ] = None,
    seeds: Annotated[int | None, typer.Option("--seeds", min=1, help="Seeds of a trial; default: 1.")] = None,
    halving: Annotated[
        int | None, typer.Option("--halving", min=1, help="One of so many trials goes on; 1: all; default: 3.")
    ] = None,
    methods: Annotated[str | None, typer.Option("--methods", help="Other methods, by commas.")] = None,
    controls: Annotated[str | None, typer.Option("--controls", help="Controls, by commas; default: none.")] = None,
) -> None:
    """Search the settings of a recipe and its arms on validation examples, and write the best ones as recipes."""
    from ..api.verbs import tune

    result = tune(
        recipe, trials=trials, search=search or (), seeds=seeds, halving=halving,
        methods=split_names(methods or ""), controls=split_names(controls or ""),
        **options.arguments("metric", "equal", "sets", "seed", "out", "data_dir", "workers"),
    )  # fmt: skip
    show_search(options, result)


def show_search(options: Options, result: "TuneResult") -> None:
    """Write the trials of every arm, the best last stage first, and where the chosen recipes are."""
    from ..reporting.search import search_sentence, trial_records

    parts = []
    for one in result.searches:
        records = sorted(trial_records(one), key=lambda record: (not record["chosen"], -record["rounds"]))
        keys = list(one["space"])
        header = ["trial", *(key.removeprefix("training.") for key in keys), "rounds", one["metric"]]
        rows = [_cells(record, keys) for record in records]
        parts.append(f"{wrap(search_sentence(one))}\n\n{columns(header, rows)}")
    chosen = "\n".join(f"fedloom run {path}" for path in result.chosen.values())
    options.show(result.to_dict(), "\n\n".join([*parts, f"next: {chosen}"]))


def _cells(record: dict[str, Any], keys: list[str]) -> list[str]:
    from ..reporting.search import format_setting

    score = "failed" if record["score"] is None else f"{record['score']:.4g}"
    settings = [format_setting(record[key]) for key in keys]
    return [f"{record['trial']}{'*' if record['chosen'] else ''}", *settings, str(record["rounds"]), score]
