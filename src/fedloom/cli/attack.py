"""fedloom attack: a recipe whose devices in part misbehave, every attack against every rule."""

import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import (
    DataDir,
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
from .output import Format, columns, exits, say, say_json
from .progress import follow_several

if TYPE_CHECKING:
    from ..studies.attack_bench import Cell


def attack(
    recipe: Annotated[Path, typer.Argument(help="A recipe.")],
    share: Annotated[float, typer.Option("--share", min=0.0, max=1.0, help="Of the devices, how many are bad.")] = 0.2,
    seeds: Seeds = 1,
    attacks: Annotated[str | None, typer.Option("--attacks", help="Which attacks, by commas; else all.")] = None,
    rules: Annotated[str, typer.Option("--rules", help="Which rules beside the plain mean, by commas.")] = "default",
    test: TestSet = "global",
    sets: Sets = [],  # noqa: B006 - typer reads it, nobody changes it
    seed: Seed = None,
    data_dir: DataDir = None,
    workers: Workers = None,
    files: With = [],  # noqa: B006
    format: OutputFormat = Format.text,
    quiet: Quiet = False,
) -> None:
    """Run a recipe with a share of its devices bad, under every attack and with every rule, and say what it costs."""
    with exits(format):
        from ..engines import ATTACKS, keep_the_heap
        from ..recipe.paths import data_folder
        from ..studies.attack_bench import bench

        keep_the_heap()
        loaded, tables = read_judged(recipe, sets, seed, files, test)
        chosen = list(ATTACKS) if attacks is None else listed(attacks)
        planned = bench(
            loaded, tables, data_folder(data_dir), chosen, listed(rules), share, seeds, test, processes(workers)
        )
        follow_several(planned, quiet)
        cells = planned.cells()
        if format is Format.json:
            say_json({"share": share, "bad": planned.bad, "test": test, "cells": _records(cells)})
        else:
            say(_told(cells, share))


def _records(cells: "list[Cell]") -> list[dict[str, Any]]:
    from ..studies.attack_bench import losses

    lost = losses(cells)
    return [
        {
            "attack": one.attack,
            "rule": one.rule,
            "accuracy": _spread(one.mean),
            "worst_tier": _spread(one.worst),
            "tiers": {tier: _spread(values) for tier, values in one.tiers.items()},
            "points_lost": lost[one.attack, one.rule],
            "refused": one.refused,
        }
        for one in cells
    ]


def _spread(values: list[float]) -> dict[str, float]:
    return {"mean": statistics.fmean(values), "std": statistics.stdev(values) if len(values) > 1 else 0.0}


def _told(cells: "list[Cell]", share: float) -> str:
    from ..studies.attack_bench import NONE, losses

    by_place = {(one.attack, one.rule): one for one in cells}
    attacks, rules = (list(dict.fromkeys(names)) for names in zip(*by_place, strict=True))
    names = ["plain mean" if rule == NONE else rule for rule in rules]
    rows = [
        ("no attack" if attack == NONE else attack, *(_cell(by_place[attack, rule]) for rule in rules))
        for attack in attacks
    ]
    legend = f"accuracy in %, mean over tiers by share (worst tier); {100 * share:g} % of the devices bad"
    table = columns(("attack", *names), rows) + f"\n{legend}"
    lost = losses(cells)
    verdict = []
    for rule, name in zip(rules, names, strict=True):
        worst = max((one for one in attacks if one != NONE), key=lambda attack: lost[attack, rule], default=NONE)
        price, most = lost[NONE, rule], lost[worst, rule]
        verdict.append(f"  {name}: {-price:+.1f} points without an attack, {-most:+.1f} under the worst ({worst})")
    return f"{table}\n\nagainst the plain mean without an attack\n" + "\n".join(verdict)


def _cell(cell: "Cell") -> str:
    spread = _spread(cell.mean)
    noise = f" ± {spread['std']:.1f}" if len(cell.mean) > 1 else ""
    return f"{spread['mean']:.1f}{noise} ({statistics.fmean(cell.worst):.1f})"
