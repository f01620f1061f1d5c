"""Arms at equal expense: of every run only as much counts as was done with what the first arm spends in all."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Literal, get_args

from ..evaluation import Row
from .comparison import Arm
from .travel import travelled

Unit = Literal["rounds", "bytes", "seconds"]
UNITS: tuple[Unit, ...] = get_args(Unit)


def spending(rows: Sequence[Row], unit: Unit) -> dict[int, float]:
    """All that a run had spent at the end of each of its rounds."""
    each = dict.fromkeys(sorted({row.round for row in rows}), 0.0)
    for row in _counted(rows, unit):
        each[row.round] += row.value
    return dict(zip(each, accumulate(each.values()) if unit != "rounds" else each, strict=True))


def _counted(rows: Sequence[Row], unit: Unit) -> list[Row]:
    match unit:
        case "rounds":
            return []  # each counts by its number
        case "bytes":
            return travelled(rows)
        case "seconds":
            return [row for row in rows if row.metric == "clock"]


def at_equal_budgets(arms: Sequence[Arm], unit: Unit) -> list[Arm]:
    """The arms with the rows of those rounds that were within the budget at their end, seed by seed. An arm that needs
    less counts whole."""
    limits = [max(spending(rows, unit).values(), default=math.inf) for rows in arms[0].runs]
    return [
        replace(arm, runs=[_within(rows, unit, limit) for rows, limit in zip(arm.runs, limits, strict=True)])
        for arm in arms
    ]


def said(arms: Sequence[Arm], unit: Unit) -> list[str]:
    """Where each arm was when the budget was spent, with the first seed."""
    lines = []
    for whole, cut in zip(arms, at_equal_budgets(arms, unit), strict=True):
        last, of = (max((row.round for row in arm.runs[0]), default=0) for arm in (cut, whole))
        lines.append(f"at equal {unit}: {whole.name} counts up to round {last} of {of}")
    return lines


def _within(rows: Sequence[Row], unit: Unit, limit: float) -> list[Row]:
    spent = spending(rows, unit)
    return [row for row in rows if spent[row.round] <= limit * (1 + 1e-12)]
