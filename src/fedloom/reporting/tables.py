"""A comparison's result as text, Markdown, CSV and LaTeX: the same two tables and the same verdict."""

import csv
import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .paired_stats import ACCURACY
from .result import Result
from .targets import Amount, Reach, gain, in_order, median


@dataclass(frozen=True)
class Grid:
    """Cells that are strong are those of a winner, which there is only beyond noise."""

    about: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    strong: frozenset[tuple[int, int]] = frozenset()  # (row, column)

    def legend(self, mark: str) -> str:
        """`mark`: what strong cells look like."""
        return f"{self.about}\n{mark}: better than every other arm beyond noise." if self.strong else self.about

    def marked(self, stronger: Callable[[str], str]) -> list[list[str]]:
        return [
            [stronger(cell) if (number, at) in self.strong else cell for at, cell in enumerate(row)]
            for number, row in enumerate(self.rows)
        ]


def grids(result: Result) -> list[Grid]:
    return [_worths(result), *([_targets(result.reached)] if result.reached else [])]


def _worths(result: Result) -> Grid:
    first = result.records[0]
    tiers, name = list(first["can_carry"]), first["metric"]
    extras = [one for one in EXTRAS if one.wanted(result)]
    rows, strong = [], set()
    for number, record in enumerate(result.records):
        cells = [_spread_of(record[name][tier], record["can_carry"][tier]) for tier in tiers]
        strong |= {(number, 1 + at) for at, tier in enumerate(tiers) if result.winners.get(tier) == record["arm"]}
        rows.append((str(record["arm"]), *cells, *(one.cell(record) for one in extras)))
    unit = " in %" if name == ACCURACY.name else ""
    over = ", mean ± standard deviation over seeds" if any(first[name][tier]["std"] for tier in tiers) else ""
    whose = "of the model a device of the tier ends up with; in brackets: it cannot carry it."
    own = " Own tests: of all devices, each on its own test examples." if OWN_TESTS in extras else ""
    legend = f"{name.capitalize()}{unit}{over}, {whose}{own}"
    return Grid(legend, ("arm", *tiers, *(one.header for one in extras)), rows, frozenset(strong))


def _spread_of(value: dict[str, float], can_carry: bool = True) -> str:
    if math.isnan(value["mean"]):  # a tier may have no device, and then no model
        return "–"
    said = f"{value['mean']:.1f}" + (f" ± {value['std']:.1f}" if value["std"] else "")
    return said if can_carry else f"({said})"


@dataclass(frozen=True)
class Extra:
    """A column beside those of the tiers."""

    header: str
    cell: Callable[[dict[str, Any]], str]
    wanted: Callable[[Result], bool] = lambda result: True


def _millions(record: dict[str, Any]) -> str:
    return " / ".join(f"{one / 1e6:.3g}" for one in dict.fromkeys(record["macs"].values())) or "–"


OWN_TESTS = Extra(
    "own tests",
    lambda record: _spread_of(record["own_tests"]["all"]) if record["own_tests"] else "–",
    lambda one: any(record["own_tests"] for record in one.records),
)
EXTRAS = (
    Extra("worst", lambda record: _spread_of(record["worst_tier"]), lambda one: len(one.records[0]["can_carry"]) > 1),
    OWN_TESTS,
    Extra("served", lambda record: f"{record['served_percent']:.0f} %"),
    Extra("million MACs", _millions, lambda one: any(record["macs"] for record in one.records)),
    Extra("MB a round", lambda record: f"{record['bytes_per_round'] / 1e6:.2f}"),
    Extra(
        "simulated s",
        lambda record: "–" if record["seconds"] is None else f"{record['seconds']:.1f}",
        lambda one: any(record["seconds"] is not None for record in one.records),
    ),
)  # fmt: skip


def _targets(reached: Sequence[Reach]) -> Grid:
    rows = []
    for one in reached:
        others = [median(other.rounds) for other in reached if other.tier == one.tier and other is not one]
        ratio = gain(median(one.rounds), others) if others else None
        clock = _spread(one.seconds, 1, ".1f") if one.seconds else "–"
        spent = (_spread(one.rounds), _spread(one.bytes, 1e6, ".2f"), clock)
        rows.append((one.arm, one.tier, one.metric.said(one.target), *spent, ratio or "–"))
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
    rows = map(row, grid.marked(lambda cell: f"**{cell}**"))
    return "\n".join([row(grid.header), rule, *rows, "", grid.legend("Strong")])


CSV_COLUMNS = (
    "arm", "tier", "can_carry", "metric", "mean", "std", "winner", "worst_tier_mean", "worst_tier_std",
    "own_tests_mean", "own_tests_std", "served_percent", "macs", "bytes_per_round", "seconds", "target", "reached",
    "rounds_to_target", "bytes_to_target", "seconds_to_target", "gain",
)  # fmt: skip


def as_csv(result: Result) -> str:
    """One line for each arm and tier, numbers as they are."""
    written = io.StringIO()
    lines = csv.writer(written, lineterminator="\n")
    lines.writerow(CSV_COLUMNS)
    reached = {(one.arm, one.tier): one for one in result.reached}
    for record in result.records:
        for tier, value in record[record["metric"]].items():
            name, worst = record["arm"], record["worst_tier"]
            won = int(result.winners.get(tier) == name)
            kept = (int(record["can_carry"][tier]), record["metric"], value["mean"], value["std"], won)
            spent = (record["macs"].get(tier, ""), record["bytes_per_round"], record["seconds"])
            own = record["own_tests"]["all"] if record["own_tests"] else {"mean": "", "std": ""}
            whole = (worst["mean"], worst["std"], own["mean"], own["std"], record["served_percent"], *spent)
            lines.writerow([name, tier, *kept, *whole, *_reach(reached.get((name, tier)), result.reached)])
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
    rows = [" & ".join(row) + r" \\" for row in _escaped(grid).marked(lambda cell: rf"\textbf{{{cell}}}")]
    header = " & ".join(map(_tex, grid.header)) + r" \\"
    body = [rf"\begin{{tabular}}{{{layout}}}", r"\hline", header, r"\hline", *rows, r"\hline", r"\end{tabular}"]
    return "\n".join(
        [r"\begin{table}", r"\centering", *body, rf"\caption{{{_tex(grid.legend('Bold'))}}}", r"\end{table}"]
    )


def _escaped(grid: Grid) -> Grid:
    return Grid(grid.about, grid.header, [[_tex(cell) for cell in row] for row in grid.rows], grid.strong)


def _tex(text: str) -> str:
    plain = re.sub(r"([&%$#_{}])", r"\\\1", text)
    for sign, spelled in (("±", r"$\pm$"), (">", "$>$"), ("<", "$<$"), ("–", "--"), ("[", "{[}"), ("]", "{]}")):
        plain = plain.replace(sign, spelled)
    return plain


FILES: dict[str, Callable[[Result], str]] = {"results.md": markdown, "results.csv": as_csv, "results.tex": latex}
