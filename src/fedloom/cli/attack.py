"""fedloom attack: a recipe whose devices partly misbehave, every attack against every aggregation rule."""

import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import Options, split_names, verb
from .output import columns
from .progress import run_group

if TYPE_CHECKING:
    from ..studies.attack_bench import AttackCell


@verb("seeds", "test", "sets", "seed", "data_dir", "workers", "files", "format", "quiet")
def attack(
    options: Options,
    recipe: Annotated[Path, typer.Argument(help="A recipe.")],
    share: Annotated[float, typer.Option("--share", min=0.0, max=1.0, help="Share of malicious devices.")] = 0.2,
    attacks: Annotated[str | None, typer.Option("--attacks", help="Attacks, by commas; default: all.")] = None,
    rules: Annotated[str, typer.Option("--rules", help="Rules next to the plain mean, by commas.")] = "default",
) -> None:
    """Run a recipe with a share of its devices malicious, under every attack and with every rule, and compare them."""
    from ..engines import ATTACKS, keep_freed_memory
    from ..studies.attack_bench import build_attack_bench

    keep_freed_memory()
    loaded = options.load_with_test(recipe)
    names = list(ATTACKS) if attacks is None else split_names(attacks)
    planned = build_attack_bench(
        loaded, options.registry, options.data, names, split_names(rules), share, options.seeds, options.test,
        options.processes,
    )  # fmt: skip
    run_group(planned)
    cells = planned.cells()
    data = {"share": share, "bad": planned.bad, "test": options.test, "cells": _records(cells)}
    options.show(data, _text(cells, share))


def _records(cells: "list[AttackCell]") -> list[dict[str, Any]]:
    from ..reporting.paired_stats import mean_and_std
    from ..studies.attack_bench import accuracy_losses

    lost = accuracy_losses(cells)
    return [
        {
            "attack": cell.attack,
            "rule": cell.rule,
            "accuracy": mean_and_std(cell.mean),
            "worst_tier": mean_and_std(cell.worst),
            "tiers": {tier: mean_and_std(values) for tier, values in cell.tiers.items()},
            "points_lost": lost[cell.attack, cell.rule],
            "refused": cell.refused,
        }
        for cell in cells
    ]


def _text(cells: "list[AttackCell]", share: float) -> str:
    from ..studies.attack_bench import NONE, accuracy_losses

    table = {(cell.attack, cell.rule): cell for cell in cells}
    attacks, rules = (list(dict.fromkeys(names)) for names in zip(*table, strict=True))
    names = ["plain mean" if rule == NONE else rule for rule in rules]
    rows = [
        ("no attack" if attack == NONE else attack, *(_cell(table[attack, rule]) for rule in rules))
        for attack in attacks
    ]
    legend = f"accuracy in %, mean over tiers by share (worst tier); {100 * share:g} % of the devices malicious"
    lost = accuracy_losses(cells)
    verdict = []
    for rule, name in zip(rules, names, strict=True):
        worst = max((name for name in attacks if name != NONE), key=lambda name: lost[name, rule], default=NONE)
        without, under = -lost[NONE, rule], -lost[worst, rule]
        verdict.append(f"  {name}: {without:+.1f} points without an attack, {under:+.1f} under the worst ({worst})")
    text = columns(("attack", *names), rows) + f"\n{legend}"
    return f"{text}\n\nagainst the plain mean without an attack\n" + "\n".join(verdict)


def _cell(cell: "AttackCell") -> str:
    from ..reporting.paired_stats import mean_and_std

    spread = mean_and_std(cell.mean)
    noise = f" ± {spread['std']:.1f}" if len(cell.mean) > 1 else ""
    return f"{spread['mean']:.1f}{noise} ({statistics.fmean(cell.worst):.1f})"
