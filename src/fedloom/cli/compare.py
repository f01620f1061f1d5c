"""fedloom compare: a recipe beside the ordinary ways to treat a fleet, paired by seed, in one table."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import DataDir, Out, OutputFormat, Quiet, Seed, Sets, With, read
from .output import Format, columns, exits, say, say_json
from .progress import follow

if TYPE_CHECKING:
    from ..experiment import Loaded, Tables


@dataclass(frozen=True)
class Compared:
    folders: list[list[Path]]  # arm by arm, seed by seed
    records: list[dict[str, Any]]
    verdict: list[str]

    def text(self) -> str:
        return f"{_table(self.records)}\n\nverdict\n" + "\n".join(f"  {line}" for line in self.verdict)


def compare(
    recipe: Annotated[Path, typer.Argument(help="A recipe.")],
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="How many seeds, from the recipe's on.")] = 1,
    controls: Annotated[
        str, typer.Option("--controls", help="Which controls to run, by commas.")
    ] = "standalone,small-for-all,drop-the-small,all-large",
    test: Annotated[
        str, typer.Option("--test", help="Judge on the global test set or on devices' local ones.")
    ] = "global",
    sets: Sets = [],  # noqa: B006 - typer reads it, nobody changes it
    seed: Seed = None,
    out: Out = None,
    data_dir: DataDir = None,
    files: With = [],  # noqa: B006
    format: OutputFormat = Format.text,
    quiet: Quiet = False,
) -> None:
    """Run a recipe beside standalone, small-for-all, drop-the-small and all-large."""
    with exits(format):
        from ..experiment import Problem

        loaded, tables = read(recipe, sets, seed, files)
        if test not in loaded.recipe.evaluation.tests:
            raise loaded.error(Problem(("evaluation", "tests"), "TEST_NAME", f"the recipe does not judge on {test!r}"))
        names = [name.strip() for name in controls.split(",") if name.strip()]
        compared = compare_arms(loaded, tables, seeds, names, test, out, data_dir, quiet)
        folder = compared.folders[0][0].parent.parent
        if format is Format.json:
            say_json({"run": str(folder), "arms": compared.records, "verdict": compared.verdict})
            return
        say(compared.text())
        say(f"\nruns: {folder}")


def compare_arms(
    loaded: "Loaded",
    tables: "Tables",
    seeds: int,
    controls: Sequence[str],
    test: str,
    out: Path | None,
    data_dir: Path | None,
    quiet: bool,
) -> Compared:
    """Every arm with every seed; all are assembled before the first one runs, so that nothing fails halfway."""
    from ..experiment import arms, assemble, serving
    from ..experiment.places import data_folder, fresh_folder
    from ..reporting import Arm, read_rows, table, verdict

    first = assemble(loaded, tables, data_folder(data_dir))
    recipes = arms(loaded, first.fleet, controls)
    document = {name: recipe.recipe.document() for name, recipe in recipes.items()}
    number = loaded.recipe.seed
    experiments = {
        name: [assemble(recipes[name].changed({**document[name], "seed": number + n}), tables, data_folder(data_dir))
               for n in range(seeds)]
        for name in recipes
    }  # fmt: skip
    home = fresh_folder(out, "compare")
    folders = []
    for name, of_seeds in experiments.items():
        folders.append([home / name / f"seed-{number + n}" for n in range(seeds)])
        for experiment, folder in zip(of_seeds, folders[-1], strict=True):
            follow(experiment, folder, name if seeds == 1 else f"{name} seed {experiment.fleet.seed}", quiet)
    judged = [
        Arm(name, serving(name, first.fleet), [list(read_rows(folder)) for folder in of_seeds])
        for name, of_seeds in zip(experiments, folders, strict=True)
    ]
    tiers = [
        tier.name
        for tier in sorted(first.fleet.tiers, key=lambda t: -sum(s.numel() for s in t.model.shapes().values()))
    ]
    shares = {tier.name: share for tier, share in zip(first.fleet.tiers, first.fleet.shares, strict=True)}
    examples = len(first.dataset.test)
    return Compared(folders, table(judged, tiers, shares, test), verdict(judged, tiers, shares, test, examples))


def _table(records: list[dict[str, Any]]) -> str:
    tiers = list(records[0]["accuracy"])
    rows = []
    for record in records:
        cells = [_cell(record["accuracy"][tier], record["can_carry"][tier]) for tier in tiers]
        moved = f"{record['bytes_per_round'] / 1e6:.2f}"
        rows.append((record["arm"], *cells, f"{record['served_percent']:.0f} %", moved))
    legend = "accuracy in %, of the model a device of the tier ends up with; (in brackets: it cannot carry it)"
    return columns(("arm", *tiers, "served", "MB a round"), rows) + f"\n{legend}"


def _cell(accuracy: dict[str, float], can_carry: bool) -> str:
    spread = f" ± {accuracy['std']:.1f}" if accuracy["std"] else ""
    said = f"{accuracy['mean']:.1f}{spread}"
    return said if can_carry else f"({said})"
