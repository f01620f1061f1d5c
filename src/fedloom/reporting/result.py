"""What came of a comparison: one set of rules, whether it has just run or is read again from its folders."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .paired_stats import Arm, Overall, difference, overall, table, verdict
from .targets import Claim, Reach, conclusions, reaches, targets

DESCRIPTION, FORMAT = "comparison.json", "fedloom comparison 1"


@dataclass(frozen=True)
class Terms:
    """By what arms are compared. `tiers` run from the largest to the smallest."""

    tiers: Sequence[str]
    shares: Mapping[str, float]  # of the devices, by tier
    test: str
    examples: int  # in that test
    controls: Collection[str] = ()  # arms that are ordinary ways to treat a fleet
    baseline: str | None = None  # the arm whose final accuracy, less the margin, is the target
    margin: float = 1.0


@dataclass(frozen=True)
class Result:
    records: list[dict[str, Any]]
    verdict: list[str]
    reached: list[Reach] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)
    overall: list[Overall] = field(default_factory=list)
    winners: dict[str, str | None] = field(default_factory=dict)


def conclude(arms: Sequence[Arm], terms: Terms) -> Result:
    first, tiers, shares, test = arms[0], terms.tiers, terms.shares, terms.test
    reached = []
    if terms.baseline is not None:
        reached = reaches(arms, targets(arms, tiers, test, terms.baseline, terms.margin), test)
    claims, sooner = conclusions(reached)
    others = [arm for arm in arms[1:] if arm.name not in terms.controls or arm.name == "standalone"]
    fleet = [one for one in (overall(first, other, shares, test) for other in others) if one]
    lines = verdict(arms, tiers, shares, test, terms.examples) + [str(one) for one in fleet] + sooner
    return Result(table(arms, tiers, shares, test), lines, reached, claims, fleet, winners(arms, terms))


def winners(arms: Sequence[Arm], terms: Terms) -> dict[str, str | None]:
    """Tier by tier the arm that is better than every other beyond noise; None: there is none. An arm that leaves a
    tier's devices a model they cannot carry does not compete for them."""
    return {tier: _winner(arms, tier, terms) for tier in terms.tiers}


def _winner(arms: Sequence[Arm], tier: str, terms: Terms) -> str | None:
    able = [arm for arm in arms if arm.serving[tier].can_carry and not _unknown(arm.ends(tier, terms.test))]
    if len(able) < 2:
        return None
    best = max(able, key=lambda arm: arm.metric.sign * sum(arm.ends(tier, terms.test)))
    gaps = [difference(best, arm, tier, terms.test, terms.examples) for arm in able if arm is not best]
    return best.name if all(gap.beyond_noise and gap.ahead > 0 for gap in gaps) else None


def _unknown(values: Sequence[float]) -> bool:
    return any(math.isnan(value) for value in values)
