"""A paper's claim, judged: what each of its two sides came to, seed by seed, and whether all seeds agree."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from ..evaluation import Row
from .metric import ACCURACY, METRICS
from .targets import Amount, bytes_to, gap, in_order, rounds_to, seconds_a_round
from .verdict import Verdict, unanimous

Measure = Literal["last", "rounds", "bytes", "seconds", "gain"]
Relation = Literal["more", "less", "at least", "alike"]
ALL = "*"  # devices, each tier by its share


@dataclass(frozen=True)
class Side:
    """One of the two things that are compared."""

    arm: str
    tier: str = ALL
    candidate: str = ""  # empty: the first there is
    minus: str | tuple[str, ...] | None = None  # another arm, or the best of several: then it is the lead over that

    @property
    def others(self) -> tuple[str, ...]:
        return (self.minus,) if isinstance(self.minus, str) else self.minus or ()


@dataclass(frozen=True)
class Terms:
    """By what the sides are measured. `targets` are by tier, for measures of how soon."""

    measure: Measure
    relation: Relation
    test: str = "global"
    metric: str = "accuracy"
    within: float = 0.0  # points that may lie between what is alike
    targets: Mapping[str, float] | None = None


@dataclass(frozen=True)
class Evidence:
    """All that was measured in a comparison, arm by arm."""

    runs: Mapping[str, Sequence[Sequence[Row]]]  # rows, seed by seed
    shares: Mapping[str, Mapping[str, float]]  # of an arm's devices, by tier


@dataclass(frozen=True)
class Finding:
    this: list[Amount]  # seed by seed
    other: list[Amount]
    gaps: list[float]
    verdict: Verdict
    agreeing: int  # seeds that say what the claim says


def judge(this: Side, other: Side, terms: Terms, seen: Evidence) -> Finding:
    first, second = amounts(this, terms, seen), amounts(other, terms, seen)
    gaps = [gap(one, two) for one, two in zip(first, second, strict=True)]
    return Finding(first, second, gaps, decide(gaps, terms), sum(agrees(terms, one) for one in gaps))


def decide(gaps: Sequence[float], terms: Terms) -> Verdict:
    return unanimous(gaps, partial(agrees, terms), partial(contradicts, terms))


def agrees(terms: Terms, gap: float) -> bool:
    match terms.relation:
        case "more":
            return gap > 0
        case "less":
            return gap < 0
        case "at least":
            return gap >= 0
        case "alike":
            return abs(gap) <= terms.within


def contradicts(terms: Terms, gap: float) -> bool:
    """The opposite sign; a tie, or a number that is none, is neither."""
    match terms.relation:
        case "more" | "at least":
            return gap < 0
        case "less":
            return gap > 0
        case "alike":
            return abs(gap) > terms.within


def amounts(side: Side, terms: Terms, seen: Evidence) -> list[Amount]:
    """What a side came to, seed by seed."""
    own, *others = (
        [_amount(rows, side, arm, terms, seen) for rows in seen.runs[arm]] for arm in (side.arm, *side.others)
    )
    if not others:
        return own
    pairs = zip(own, (best(each, terms) for each in zip(*others, strict=True)), strict=True)
    if terms.measure == "gain":
        return [times(one, two) for one, two in pairs]
    return [Amount(one.value - two.value, one.exact and two.exact) for one, two in pairs]


def best(each: Sequence[Amount], terms: Terms) -> Amount:
    """Of several arms in one seed: the highest value, the lowest where less is better, or whoever is there first."""
    if terms.measure == "last":
        return max(each, key=lambda one: METRICS.get(terms.metric, ACCURACY).sign * one.value)
    return in_order(each)[0]


def times(one: Amount, two: Amount) -> Amount:
    """How many times the first fits into the second: at least so often where only the first arrived, not once where
    only the second did, and nobody knows where neither did."""
    if not one.exact:
        return Amount(0.0 if two.exact else math.nan)
    return Amount(two.value / one.value, two.exact)


class NotMeasuredError(ValueError):
    """A claim is about something that its runs do not have."""


def _amount(rows: Sequence[Row], side: Side, arm: str, terms: Terms, seen: Evidence) -> Amount:
    if terms.measure == "seconds":
        seconds = seconds_a_round(rows)
        if seconds is None:
            raise NotMeasuredError(f"{arm} has no clock: its tiers need a speed and a bandwidth")
        return Amount(seconds)
    curve = values(rows, side, terms, seen.shares[arm])
    if not curve:
        what = " ".join(filter(None, (side.candidate, terms.test, terms.metric)))
        raise NotMeasuredError(f"{arm} has no {what} of {'devices' if side.tier == ALL else side.tier}")
    if terms.measure == "last":
        return Amount(list(curve.values())[-1])
    reached = rounds_to((terms.targets or {})[side.tier], curve, METRICS.get(terms.metric, ACCURACY))
    last = max(curve) if reached is None else reached
    amount = bytes_to(last, rows) if terms.measure == "bytes" else last
    return Amount(amount, reached is not None)


def values(rows: Sequence[Row], side: Side, terms: Terms, shares: Mapping[str, float]) -> dict[int, float]:
    """A side's curve, judgement by judgement; of all devices, where it is theirs."""
    tiers = shares if side.tier == ALL else {side.tier: 1.0}
    fitting = [row for row in rows if (row.device, row.test, row.metric) == ("", terms.test, terms.metric)]
    fitting = [row for row in fitting if row.tier in tiers]
    candidate = side.candidate or (fitting[0].candidate if fitting else "")
    found: dict[int, dict[str, float]] = {}
    for row in fitting:
        if row.candidate == candidate:
            found.setdefault(row.round, {})[row.tier] = row.value
    judged = {tier for by_tier in found.values() for tier in by_tier}  # a tier may have no device
    total = math.fsum(tiers[tier] for tier in judged)
    return {
        number: math.fsum(tiers[tier] * value for tier, value in by_tier.items()) / total
        for number, by_tier in found.items()
        if by_tier.keys() == judged
    }


def targets(side: Side, terms: Terms, margin: float, seen: Evidence) -> dict[str, float]:
    """From the baseline alone: its last value, in the median over seeds, and worse by a margin."""
    last = Terms("last", "more", terms.test, terms.metric)
    sign = METRICS.get(terms.metric, ACCURACY).sign
    return {side.tier: statistics.median(one.value for one in amounts(side, last, seen)) - sign * margin}


def record(found: Finding) -> dict[str, Any]:
    """For programs; what was never reached is null."""
    sides = {"this": found.this, "other": found.other}
    said = {name: [_number(one.value) if one.exact else None for one in side] for name, side in sides.items()}
    return {**said, "difference": [_number(one) for one in found.gaps], "agreeing_seeds": found.agreeing}


def _number(value: float) -> float | None:
    return round(value, 6) if math.isfinite(value) else None
