"""fedloom attack: a recipe whose devices partly misbehave, every attack against every aggregation rule."""

import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..wording import format_number, format_points
from .options import Options, split_names, verb
from .output import columns

if TYPE_CHECKING:
    from ..studies.attack_bench import AttackCell


@verb("seeds", "test", "sets", "seed", "data_dir", "workers", "device", "files", "format", "quiet")
def attack(
    options: Options,
    recipe: Annotated[Path, typer.Argument(help="A recipe.")],
    share: Annotated[float, typer.Option("--share", min=0.0, max=1.0, help="Share of malicious devices.")] = 0.2,
    attacks: Annotated[str | None, typer.Option("--attacks", help="Attacks, by commas; default: all.")] = None,
    rules: Annotated[str, typer.Option("--rules", help="Rules next to the plain mean, by commas.")] = "default",
) -> None:
    """Run a recipe with a share of its devices malicious, under every attack and with every rule, and compare them."""
    from ..api.verbs import attack

    result = attack(
        recipe, share=share, attacks=None if attacks is None else split_names(attacks), rules=split_names(rules),
        **options.arguments("seeds", "test", "sets", "seed", "data_dir", "workers"),
    )  # fmt: skip
    options.show(result.to_dict(), _text(list(result.cells), share))


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
        points, attacked = format_points(without, signed=True), format_number(under, signed=True)
        verdict.append(f"  {name}: {points} without an attack, {attacked} under the worst ({worst})")
    text = columns(("attack", *names), rows) + f"\n{legend}"
    return f"{text}\n\nagainst the plain mean without an attack\n" + "\n".join(verdict)


def _cell(cell: "AttackCell") -> str:
    from ..reporting.paired_stats import mean_and_std

    spread = mean_and_std(cell.mean)
    noise = f" ± {spread['std']:.1f}" if len(cell.mean) > 1 else ""
    return f"{spread['mean']:.1f}{noise} ({statistics.fmean(cell.worst):.1f})"
