"""A comparison's result as Markdown, CSV and LaTeX: the same two tables and the same verdict."""

import csv
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .result import Result
from .targets import Amount, Reach, gain, in_order, median


@dataclass(frozen=True)
class Grid:
    """Cells that are strong are those of a winner, which there is only beyond noise."""

    legend: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    strong: frozenset[tuple[int, int]] = frozenset()  # (row, column)


def grids(result: Result) -> list[Grid]:
    return [_accuracies(result), *([_targets(result.reached)] if result.reached else [])]


def _accuracies(result: Result) -> Grid:
    tiers = list(result.records[0]["accuracy"])
    rows, strong = [], set()
    for number, record in enumerate(result.records):
        cells = [_accuracy(record["accuracy"][tier], record["can_carry"][tier]) for tier in tiers]
        strong |= {(number, 1 + at) for at, tier in enumerate(tiers) if result.winners.get(tier) == record["arm"]}
        served, moved = f"{record['served_percent']:.0f} %", f"{record['bytes_per_round'] / 1e6:.2f}"
        rows.append((str(record["arm"]), *cells, served, moved))
    legend = (
        "Accuracy in %, mean ± standard deviation over seeds, of the model a device of the tier ends up with; in "
        "brackets: it cannot carry it. Strong: better than every other arm beyond noise."
    )
    return Grid(legend, ("arm", *tiers, "served", "MB a round"), rows, frozenset(strong))


def _accuracy(accuracy: dict[str, float], can_carry: bool) -> str:
    if accuracy["mean"] != accuracy["mean"]:  # a tier may have no device, and then no model
        return "–"
    said = f"{accuracy['mean']:.1f}" + (f" ± {accuracy['std']:.1f}" if accuracy["std"] else "")
    return said if can_carry else f"({said})"


def _targets(reached: Sequence[Reach]) -> Grid:
    rows = []
    for one in reached:
        others = [median(other.rounds) for other in reached if other.tier == one.tier and other is not one]
        ratio = gain(median(one.rounds), others) if others else None
        clock = _spread(one.seconds, 1, ".1f") if one.seconds else "–"
        spent = (_spread(one.rounds), _spread(one.bytes, 1e6, ".2f"), clock)
        rows.append((one.arm, one.tier, f"{one.target:.1f}", *spent, ratio or "–"))
    legend = (
        "Rounds, megabytes and simulated seconds until a tier's target: median [lowest–highest] of the seeds; >: not "
        "within the rounds. Gain: how many times as many rounds the soonest other arm takes."
    )
    return Grid(legend, ("arm", "tier", "target", "rounds", "MB", "seconds", "gain"), rows)


def _spread(amounts: Sequence[Amount], unit: float = 1, digits: str = "g") -> str:
    said = [one.said(unit, digits) for one in in_order(amounts)]
    return median(amounts).said(unit, digits) + (f" [{said[0]}–{said[-1]}]" if len(said) > 1 else "")


def markdown(result: Result) -> str:
    return "\n\n".join([*map(_markdown_table, grids(result)), "\n".join(f"- {line}" for line in result.verdict)]) + "\n"


def _markdown_table(grid: Grid) -> str:
    def row(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    rule = "|" + "|".join([" --- ", *[" ---: "] * (len(grid.header) - 1)]) + "|"
    rows = [row(_strengthened(grid, number, lambda cell: f"**{cell}**")) for number in range(len(grid.rows))]
    return "\n".join([row(grid.header), rule, *rows, "", grid.legend])


def _strengthened(grid: Grid, number: int, stronger: Callable[[str], str]) -> list[str]:
    return [stronger(cell) if (number, at) in grid.strong else cell for at, cell in enumerate(grid.rows[number])]


CSV_COLUMNS = (
    "arm", "tier", "can_carry", "accuracy_mean", "accuracy_std", "winner", "served_percent", "bytes_per_round",
    "target", "reached", "rounds_to_target", "bytes_to_target", "seconds_to_target", "gain",
)  # fmt: skip


def as_csv(result: Result) -> str:
    """One line for each arm and tier, numbers as they are."""
    written = io.StringIO()
    lines = csv.writer(written, lineterminator="\n")
    lines.writerow(CSV_COLUMNS)
    reached = {(one.arm, one.tier): one for one in result.reached}
    for record in result.records:
        for tier, accuracy in record["accuracy"].items():
            name = record["arm"]
            kept = (int(record["can_carry"][tier]), accuracy["mean"], accuracy["std"])
            whole = (record["served_percent"], record["bytes_per_round"])
            won = int(result.winners.get(tier) == name)
            lines.writerow([name, tier, *kept, won, *whole, *_reach(reached.get((name, tier)), result.reached)])
    return written.getvalue()


def _reach(one: Reach | None, reached: Sequence[Reach]) -> tuple[Any, ...]:
    if one is None:
        return ("",) * 6
    others = [median(other.rounds) for other in reached if other.tier == one.tier and other is not one]
    rounds, moved = median(one.rounds), median(one.bytes)
    seconds = median(one.seconds).value if one.seconds else ""
    ratio = gain(rounds, others) if others else None
    return one.target, int(rounds.exact), rounds.value, moved.value, seconds, ratio or ""


def latex(result: Result) -> str:
    """Tables for a paper; needs no package."""
    said = "\n".join(f"% {line}" for line in result.verdict)
    return "\n\n".join([*map(_latex_table, grids(result)), said]) + "\n"


def _latex_table(grid: Grid) -> str:
    layout = "l" + "r" * (len(grid.header) - 1)
    rows = [
        " & ".join(_strengthened(_escaped(grid), number, lambda cell: rf"\textbf{{{cell}}}")) + r" \\"
        for number in range(len(grid.rows))
    ]
    header = " & ".join(map(_tex, grid.header)) + r" \\"
    body = [rf"\begin{{tabular}}{{{layout}}}", r"\hline", header, r"\hline", *rows, r"\hline", r"\end{tabular}"]
    return "\n".join([r"\begin{table}", r"\centering", *body, rf"\caption{{{_tex(grid.legend)}}}", r"\end{table}"])


def _escaped(grid: Grid) -> Grid:
    return Grid(grid.legend, grid.header, [[_tex(cell) for cell in row] for row in grid.rows], grid.strong)


def _tex(text: str) -> str:
    plain = re.sub(r"([&%$#_{}])", r"\\\1", text)
    for sign, spelled in (("±", r"$\pm$"), (">", "$>$"), ("<", "$<$"), ("–", "--"), ("[", "{[}"), ("]", "{]}")):
        plain = plain.replace(sign, spelled)
    return plain


FILES: dict[str, Callable[[Result], str]] = {"results.md": markdown, "results.csv": as_csv, "results.tex": latex}
