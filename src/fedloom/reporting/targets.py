"""Rounds, bytes and simulated seconds until an arm reaches a target, and arms compared at equal budgets.

A target that a run never reached is known only to cost more than the whole run; amounts say so instead of hiding it.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Literal

from ..evaluation import Row
from ..wording import pluralize
from .paired_stats import (
    ACCURACY,
    Arm,
    ClaimVerdict,
    ComparedMetric,
    decide_unanimously,
    is_negative,
    is_positive,
    transfer_rows,
)


@dataclass(frozen=True)
class Amount:
    """A value; or, if not `exact`, a lower bound, because the run ended before."""

    value: float
    exact: bool = True

    def format(self, unit: float = 1, digits: str = "g") -> str:
        return f"{'' if self.exact else '>'}{self.value / unit:{digits}}"


def sort_amounts(amounts: Sequence[Amount]) -> list[Amount]:
    return sorted(amounts, key=lambda amount: (not amount.exact, amount.value))


def median_amount(amounts: Sequence[Amount]) -> Amount:
    """Median over seeds; a bound if one of the middle amounts is a bound."""
    ordered = sort_amounts(amounts)
    middle = ordered[(len(ordered) - 1) // 2 : len(ordered) // 2 + 1]
    return Amount(statistics.fmean(amount.value for amount in middle), all(amount.exact for amount in middle))


def amount_difference(one: Amount, two: Amount) -> float:
    """The difference; infinite if only one target was reached, 0 if neither was."""
    if one.exact and two.exact:
        return one.value - two.value
    return 0.0 if one.exact == two.exact else -math.inf if one.exact else math.inf


@dataclass(frozen=True)
class CostToTarget:
    """What an arm spent until the devices of a tier reached a target, by seed."""

    tier: str
    target: float
    arm: str
    rounds: list[Amount]
    bytes: list[Amount]
    seconds: list[Amount] = field(default_factory=list)  # simulated; empty if unknown
    metric: ComparedMetric = ACCURACY

    def record(self) -> dict[str, Any]:
        amounts: dict[str, list[Any]] = {
            "rounds": [int(amount.value) if amount.exact else None for amount in self.rounds],
            "bytes": [amount.value if amount.exact else None for amount in self.bytes],
        }
        if self.seconds:
            amounts["seconds"] = [amount.value if amount.exact else None for amount in self.seconds]
        return {"tier": self.tier, "target": self.target, "arm": self.arm, **amounts}


def target_from(values: Sequence[float], sign: int, margin: float) -> float:
    """The target set by a baseline: the median of its final values over seeds, worse by a margin.

    `sign`: 1 if higher is better, else -1.
    """
    return statistics.median(values) - sign * margin


def tier_targets(
    arms: Sequence[Arm], tiers: Sequence[str], test: str, baseline: str, margin: float
) -> dict[str, float]:
    """Targets by tier, from the baseline arm alone."""
    (base,) = [arm for arm in arms if arm.name == baseline]
    by_tier = {tier: target_from(base.final_values(tier, test), base.metric.sign, margin) for tier in tiers}
    return {tier: target for tier, target in by_tier.items() if not math.isnan(target)}  # a tier may have no device


def rounds_to(target: float, curve: Mapping[int, float], sign: int = 1) -> int | None:
    """The first evaluated round that is as good as the target; None if there is none."""
    return min((number for number, value in curve.items() if sign * value >= sign * target), default=None)


def bytes_to(last: float, rows: Sequence[Row]) -> float:
    """Bytes transferred by all devices together up to and including round `last`."""
    return sum(row.value for row in transfer_rows(rows) if row.round <= last)


def seconds_to(last: float, rows: Sequence[Row]) -> float | None:
    """Simulated seconds up to and including round `last`; None if unknown."""
    seconds = [row.value for row in rows if row.metric == "simulated_seconds" and row.round <= last]
    return sum(seconds) if seconds else None


def mean_round_seconds(rows: Sequence[Row]) -> float | None:
    """Mean simulated seconds of a round; None if unknown."""
    seconds = [row.value for row in rows if row.metric == "simulated_seconds"]
    return statistics.fmean(seconds) if seconds else None


def cost_to_target(arm: Arm, tier: str, test: str, target: float) -> CostToTarget:
    rounds, moved, seconds = [], [], []
    for rows, curve in zip(arm.runs, arm.curves(tier, test), strict=True):
        reached = rounds_to(target, {row.round: row.value for row in curve}, arm.metric.sign)
        last = max((row.round for row in rows), default=0) if reached is None else reached
        rounds.append(Amount(last, reached is not None))
        moved.append(Amount(bytes_to(last, rows), reached is not None))
        duration = seconds_to(last, rows)
        if duration is not None:
            seconds.append(Amount(duration, reached is not None))
    known = seconds if len(seconds) == len(rounds) else []
    return CostToTarget(tier, target, arm.name, rounds, moved, known, arm.metric)


def costs_to_targets(arms: Sequence[Arm], targets: Mapping[str, float], test: str) -> list[CostToTarget]:
    """For every tier, the arms whose model its devices can run."""
    return [
        cost_to_target(arm, tier, test, target)
        for tier, target in targets.items()
        for arm in arms
        if arm.serving[tier].can_run
    ]


@dataclass(frozen=True)
class SoonerClaim:
    """The claim that the first arm reaches a tier's target in fewer rounds than another."""

    tier: str
    target: float
    this: str
    other: str
    sooner: int  # seeds
    seeds: int
    verdict: ClaimVerdict
    metric: ComparedMetric = ACCURACY
    later: int = 0  # seeds
    reached: bool = True  # by one of the two, in some seed

    def __str__(self) -> str:
        """Which arm is sooner, in how many seeds, and whether it may be claimed."""
        target = f"{self.metric.format(self.target)} on {self.tier} devices"
        if not self.reached:
            return f"neither {self.this} nor {self.other} reaches {target}: nothing to be claimed"
        if self.sooner == self.later:
            return f"{self.this} and {self.other} reach {target} equally soon: nothing to be claimed"
        ahead = self.sooner > self.later
        first, second = (self.this, self.other) if ahead else (self.other, self.this)
        seeds = f"{max(self.sooner, self.later)} of {pluralize(self.seeds, 'seed')}"
        return f"{first} reaches {target} sooner than {second} (in {seeds}): {self._may_be_claimed}"

    @property
    def _may_be_claimed(self) -> str:
        if self.verdict != "within noise":
            return "all seeds agree, may be claimed"
        return f"{'one seed cannot tell' if self.seeds == 1 else 'the seeds disagree'}, not to be claimed"

    def record(self) -> dict[str, str]:
        return {"tier": self.tier, "other": self.other, "verdict": self.verdict}


def evaluate_sooner(this: CostToTarget, other: CostToTarget) -> SoonerClaim:
    gaps = [amount_difference(one, two) for one, two in zip(this.rounds, other.rounds, strict=True)]
    verdict = decide_unanimously(gaps, is_negative, is_positive) if len(gaps) > 1 else "within noise"
    sooner, later = sum(map(is_negative, gaps)), sum(map(is_positive, gaps))
    reached = any(amount.exact for amount in (*this.rounds, *other.rounds))
    names = this.tier, this.target, this.arm, other.arm
    return SoonerClaim(*names, sooner, len(gaps), verdict, this.metric, later, reached)


def compute_gain(this: Amount, others: Sequence[Amount]) -> str | None:
    """How many times as many rounds the fastest other arm takes; bounds are rounded to the safe side."""
    least = min(others, key=lambda amount: (amount.value, not amount.exact))
    ratio = least.value / this.value
    if this.exact and least.exact:
        return f"{ratio:.1f}"
    if this.exact:
        return f">{math.floor(10 * ratio) / 10:.1f}"
    soonest = min((amount.value for amount in others if amount.exact), default=None)
    return None if soonest is None else f"<{math.ceil(10 * soonest / this.value) / 10:.1f}"


def spell_gain(gain: str) -> str:
    """A gain in words: "1.2 times", "more than 3.6 times"."""
    return f"{gain.replace('>', 'more than ').replace('<', 'less than ')} times"


def gain_of(this: CostToTarget, others: Sequence[CostToTarget]) -> str | None:
    """The gain of one arm over the others on the same tier, by medians over seeds; None if there are none."""
    rest = [median_amount(other.rounds) for other in others if other.tier == this.tier and other is not this]
    return compute_gain(median_amount(this.rounds), rest) if rest else None


def conclude_sooner(costs: Sequence[CostToTarget]) -> tuple[list[SoonerClaim], list[str]]:
    """Compare the first arm with each other arm, tier by tier; the claims, and sentences about them."""
    claims, lines = [], []
    for tier in dict.fromkeys(cost.tier for cost in costs):
        this, *others = [cost for cost in costs if cost.tier == tier]
        of_tier = [evaluate_sooner(this, other) for other in others]
        claims += of_tier
        lines += [str(claim) for claim in of_tier]
        gain = gain_of(this, others)
        if gain is not None:
            lines.append(f"the fastest other arm takes {spell_gain(gain)} the rounds of {this.arm} on {tier} devices")
    return claims, lines


BudgetUnit = Literal["rounds", "bytes", "seconds"]


def cumulative_cost(rows: Sequence[Row], unit: BudgetUnit) -> dict[int, float]:
    """What a run had spent by the end of each round."""
    by_round = dict.fromkeys(sorted({row.round for row in rows}), 0.0)
    for row in _cost_rows(rows, unit):
        by_round[row.round] += row.value
    return dict(zip(by_round, accumulate(by_round.values()) if unit != "rounds" else by_round, strict=True))


def _cost_rows(rows: Sequence[Row], unit: BudgetUnit) -> list[Row]:
    match unit:
        case "rounds":
            return []  # a round costs itself
        case "bytes":
            return transfer_rows(rows)
        case "seconds":
            return [row for row in rows if row.metric == "simulated_seconds"]


def limit_to_budget(arms: Sequence[Arm], unit: BudgetUnit) -> list[Arm]:
    """The arms with only the rounds that they finished within the first arm's total cost, seed by seed."""
    limits = [max(cumulative_cost(rows, unit).values(), default=math.inf) for rows in arms[0].runs]
    return [
        replace(arm, runs=[_within(rows, unit, limit) for rows, limit in zip(arm.runs, limits, strict=True)])
        for arm in arms
    ]


def _within(rows: Sequence[Row], unit: BudgetUnit, limit: float) -> list[Row]:
    spent = cumulative_cost(rows, unit)
    return [row for row in rows if spent[row.round] <= limit * (1 + 1e-12)]


def budget_lines(arms: Sequence[Arm], unit: BudgetUnit) -> list[str]:
    """Sentences that say which round each arm had reached with the budget, for the first seed."""
    lines = []
    for full, limited in zip(arms, limit_to_budget(arms, unit), strict=True):
        last, total = (max((row.round for row in arm.runs[0]), default=0) for arm in (limited, full))
        lines.append(f"at equal {unit}: {full.name} counts up to round {last} of {total}")
    return lines
