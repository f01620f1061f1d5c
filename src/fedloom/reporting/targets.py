"""How soon an arm reaches what the baseline ends with: rounds and bytes to a target, and who is sooner.

What was not reached within a run's rounds is known only to take more than they took; no number here hides that.

Arms at equal expense: of every run only as much counts as was done with what the first arm spends in all.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Literal, get_args

from ..evaluation import Row
from .paired_stats import ACCURACY, Arm, Metric, Verdict, less, more, travelled, unanimous


@dataclass(frozen=True)
class Amount:
    """So much; or more than that, where the run was over before."""

    value: float
    exact: bool = True

    def said(self, unit: float = 1, digits: str = "g") -> str:
        return f"{'' if self.exact else '>'}{self.value / unit:{digits}}"


@dataclass(frozen=True)
class Reach:
    """What an arm took to bring a tier's devices to a target, seed by seed."""

    tier: str
    target: float
    arm: str
    rounds: list[Amount]
    bytes: list[Amount]
    seconds: list[Amount] = field(default_factory=list)  # on the fleet's own devices, where it is known
    metric: Metric = ACCURACY

    def record(self) -> dict[str, Any]:
        amounts: dict[str, list[Any]] = {
            "rounds": [int(one.value) if one.exact else None for one in self.rounds],
            "bytes": [one.value if one.exact else None for one in self.bytes],
        }
        if self.seconds:
            amounts["seconds"] = [one.value if one.exact else None for one in self.seconds]
        return {"tier": self.tier, "target": self.target, "arm": self.arm, **amounts}


@dataclass(frozen=True)
class Claim:
    """That the first arm reaches a tier's target in fewer rounds than another."""

    tier: str
    target: float
    this: str
    other: str
    sooner: int
    seeds: int
    verdict: Verdict
    metric: Metric = ACCURACY

    def __str__(self) -> str:
        return (
            f"{self.tier} devices: {self.this} reaches {self.metric.said(self.target)} sooner than {self.other}: "
            f"{self.verdict} (in {self.sooner} of {self.seeds} seeds)"
        )

    def record(self) -> dict[str, str]:
        return {"tier": self.tier, "other": self.other, "verdict": self.verdict}


def rounds_to(target: float, curve: Mapping[int, float], metric: Metric = ACCURACY) -> int | None:
    """The first judged round that is as good as the target; None: there is none."""
    good = (number for number, value in curve.items() if metric.sign * value >= metric.sign * target)
    return min(good, default=None)


def bytes_to(last: float, rows: Sequence[Row]) -> float:
    """What travelled to and from all devices together, to the end of a round."""
    return sum(row.value for row in travelled(rows) if row.round <= last)


def seconds_to(last: float, rows: Sequence[Row]) -> float | None:
    """How long all rounds to the end of this one would take on the fleet's own devices; None: nobody knows."""
    ticks = [row.value for row in rows if row.metric == "simulated_seconds" and row.round <= last]
    return sum(ticks) if ticks else None


def seconds_a_round(rows: Sequence[Row]) -> float | None:
    """By the same clock, in the mean."""
    ticks = [row.value for row in rows if row.metric == "simulated_seconds"]
    return statistics.fmean(ticks) if ticks else None


def targets(arms: Sequence[Arm], tiers: Sequence[str], test: str, baseline: str, margin: float) -> dict[str, float]:
    """Tier by tier, from the baseline alone: its end, in the median over seeds, and worse by a margin."""
    (base,) = [arm for arm in arms if arm.name == baseline]
    found = {tier: statistics.median(base.ends(tier, test)) - base.metric.sign * margin for tier in tiers}
    return {tier: target for tier, target in found.items() if not math.isnan(target)}  # a tier may have no device


def reach(arm: Arm, tier: str, test: str, target: float) -> Reach:
    rounds, moved, seconds = [], [], []
    for rows, judged in zip(arm.runs, arm.curves(tier, test), strict=True):
        found = rounds_to(target, {row.round: row.value for row in judged}, arm.metric)
        last = max((row.round for row in rows), default=0) if found is None else found
        rounds.append(Amount(last, found is not None))
        moved.append(Amount(bytes_to(last, rows), found is not None))
        took = seconds_to(last, rows)
        if took is not None:
            seconds.append(Amount(took, found is not None))
    return Reach(tier, target, arm.name, rounds, moved, seconds if len(seconds) == len(rounds) else [], arm.metric)


def reaches(arms: Sequence[Arm], aims: Mapping[str, float], test: str) -> list[Reach]:
    """For every tier all arms that give its devices a model they can carry."""
    return [
        reach(arm, tier, test, target) for tier, target in aims.items() for arm in arms if arm.serving[tier].can_carry
    ]


def gap(one: Amount, two: Amount) -> float:
    """Never is later than any round; never twice is a tie."""
    if one.exact and two.exact:
        return one.value - two.value
    return 0.0 if one.exact == two.exact else -math.inf if one.exact else math.inf


def claim(this: Reach, other: Reach) -> Claim:
    gaps = [gap(one, two) for one, two in zip(this.rounds, other.rounds, strict=True)]
    verdict = unanimous(gaps, less, more)
    return Claim(this.tier, this.target, this.arm, other.arm, sum(map(less, gaps)), len(gaps), verdict, this.metric)


def in_order(amounts: Sequence[Amount]) -> list[Amount]:
    return sorted(amounts, key=lambda one: (not one.exact, one.value))


def median(amounts: Sequence[Amount]) -> Amount:
    """Over seeds; a bound where one of the middle ones is a bound."""
    ordered = in_order(amounts)
    middle = ordered[(len(ordered) - 1) // 2 : len(ordered) // 2 + 1]
    return Amount(statistics.fmean(one.value for one in middle), all(one.exact for one in middle))


def gain(this: Amount, others: Sequence[Amount]) -> str | None:
    """How many times as long the soonest of the others takes, to one decimal; a bound is rounded to its safe side."""
    least = min(others, key=lambda one: (one.value, not one.exact))
    ratio = least.value / this.value
    if this.exact and least.exact:
        return f"{ratio:.1f}"
    if this.exact:
        return f">{math.floor(10 * ratio) / 10:.1f}"
    soonest = min((one.value for one in others if one.exact), default=None)
    return None if soonest is None else f"<{math.ceil(10 * soonest / this.value) / 10:.1f}"


def conclusions(found: Sequence[Reach]) -> tuple[list[Claim], list[str]]:
    """The first arm against each of the others, tier by tier, and all of it in words."""
    claims, lines = [], []
    for tier in dict.fromkeys(one.tier for one in found):
        this, *others = [one for one in found if one.tier == tier]
        of_tier = [claim(this, other) for other in others]
        best = gain(median(this.rounds), [median(other.rounds) for other in others]) if others else None
        claims += of_tier
        lines += [str(one) for one in of_tier]
        if best is not None:
            lines.append(f"{tier} devices: the soonest other arm takes {best} times the rounds of {this.arm}")
    return claims, lines


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
            return [row for row in rows if row.metric == "simulated_seconds"]


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
