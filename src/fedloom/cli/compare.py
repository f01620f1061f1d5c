"""fedloom compare: a recipe beside other arms and the ordinary ways to treat a fleet, paired by seed."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import (
    DataDir,
    Out,
    OutputFormat,
    Quiet,
    Seed,
    Seeds,
    Sets,
    TestSet,
    With,
    Workers,
    listed,
    processes,
    read_judged,
)
from .output import Format, columns, exits, note, say, say_json
from .progress import line

if TYPE_CHECKING:
    from ..experiment import Comparison, Result
    from ..reporting.targets import Amount, Reach


def compare(
    recipe: Annotated[Path, typer.Argument(help="A recipe.")],
    seeds: Seeds = 1,
    controls: Annotated[
        str | None,
        typer.Option("--controls", help="Which controls to run, by commas; else all, or none if the recipe has arms."),
    ] = None,
    test: TestSet = "global",
    sets: Sets = [],  # noqa: B006 - typer reads it, nobody changes it
    seed: Seed = None,
    out: Out = None,
    data_dir: DataDir = None,
    workers: Workers = None,
    files: With = [],  # noqa: B006
    format: OutputFormat = Format.text,
    quiet: Quiet = False,
) -> None:
    """Run a recipe beside the arms it names, or else standalone, small-for-all, drop-the-small and all-large."""
    with exits(format):
        from ..engines import keep_the_heap
        from ..experiment import CONTROLS, comparison
        from ..experiment.places import data_folder, fresh_folder

        keep_the_heap()
        loaded, tables = read_judged(recipe, sets, seed, files, test)
        usual = [] if loaded.recipe.compare.arms else list(CONTROLS)
        names = usual if controls is None else listed(controls)
        home = fresh_folder(out, "compare")
        planned = comparison(loaded, tables, seeds, names, home, data_folder(data_dir), processes(workers))
        result = follow_all(planned, test, quiet)
        if format is Format.json:
            say_json({"run": str(planned.home), **records(result)})
            return
        say(told(result))
        say(f"\nruns: {planned.home}")


def follow_all(planned: "Comparison", test: str, quiet: bool) -> "Result":
    for name, done in planned.rounds():
        note(line(name, done), quiet)
    return planned.result(test)


def records(result: "Result") -> dict[str, Any]:
    return {
        "arms": result.records,
        "verdict": result.verdict,
        "targets": [one.record() for one in result.reached],
        "claims": [one.record() for one in result.claims],
        "overall": [asdict(one) for one in result.overall],
    }


def told(result: "Result") -> str:
    tables = [_table(result.records), *([_targets(result.reached)] if result.reached else [])]
    return "\n\n".join([*tables, "verdict\n" + "\n".join(f"  {one}" for one in result.verdict)])


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


def _targets(reached: "list[Reach]") -> str:
    aims = {one.tier: one.target for one in reached}
    header = [cell for tier, target in aims.items() for cell in (f"{tier} {target:.1f} %", "MB")]
    by_place = {(one.arm, one.tier): one for one in reached}
    rows = []
    for arm in dict.fromkeys(one.arm for one in reached):
        cells = [_reach(by_place.get((arm, tier))) for tier in aims]
        rows.append((arm, *(cell for pair in cells for cell in pair)))
    legend = "rounds to target, and MB moved until then: median [lowest–highest] of the seeds; >: not within the rounds"
    return columns(("rounds to target", *header), rows) + f"\n{legend}"


def _reach(one: "Reach | None") -> tuple[str, str]:
    return ("-", "-") if one is None else (_median(one.rounds), _median(one.bytes, 1e6, ".2f"))


def _median(amounts: "list[Amount]", unit: float = 1, digits: str = "g") -> str:
    from ..reporting.targets import in_order, median

    said = [one.said(unit, digits) for one in in_order(amounts)]
    spread = f" [{said[0]}–{said[-1]}]" if len(said) > 1 else ""
    return median(amounts).said(unit, digits) + spread
