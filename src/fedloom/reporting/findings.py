"""What came out, in one sentence: the first arm against the best simple alternative, or the best of several methods.

The sentence follows the one rule of `paired_stats`: a difference counts only if it is beyond noise.
"""

import math
from collections.abc import Collection, Mapping, Sequence

from ..wording import join_words
from .paired_stats import Arm, Difference, compute_difference

SIMPLE_ALTERNATIVES = ("small-for-all", "drop-the-small", "standalone")
"""Controls that need no method for heterogeneous devices; all-large is none, as its devices cannot run the model."""


def can_compete(arm: Arm, tier: str, test: str) -> bool:
    """True if the tier's devices can run the arm's model, and it was evaluated in every seed."""
    return arm.serving[tier].can_run and not any(map(math.isnan, arm.final_values(tier, test) or [math.nan]))


def rank_arms(arms: Sequence[Arm], tier: str, test: str) -> list[Arm]:
    """The arms that compete for the devices of a tier, the best mean first."""
    competing = [arm for arm in arms if can_compete(arm, tier, test)]
    return sorted(competing, key=lambda arm: -arm.metric.sign * sum(arm.final_values(tier, test)) / len(arm.runs))


def gains_over_alternatives(arms: Sequence[Arm], tiers: Sequence[str], test: str, examples: int) -> list[Difference]:
    """By tier, the first arm against the best simple alternative; tiers without one are left out."""
    first, gains = arms[0], []
    for tier in tiers:
        others = rank_arms([arm for arm in arms[1:] if arm.name in SIMPLE_ALTERNATIVES], tier, test)
        if others and can_compete(first, tier, test):
            gains.append(compute_difference(first, others[0], tier, test, examples))
    return gains


def leads(arms: Sequence[Arm], tiers: Sequence[str], test: str, examples: int) -> list[Difference]:
    """By tier, the best arm against the second best; tiers with fewer than two are left out."""
    ranked = {tier: rank_arms(arms, tier, test) for tier in tiers}
    return [
        compute_difference(best, second, tier, test, examples)
        for tier, (best, second, *_) in ((tier, of_tier) for tier, of_tier in ranked.items() if len(of_tier) > 1)
    ]


def has_rival_methods(arms: Sequence[Arm], controls: Collection[str]) -> bool:
    """True if another method than the first arm's is compared, and not only controls."""
    return any(arm.name not in controls for arm in arms[1:])


def write_finding(
    arms: Sequence[Arm], tiers: Sequence[str], test: str, examples: int, controls: Collection[str]
) -> str:
    """The result of a comparison in one sentence; "" for a single arm."""
    if len(arms) < 2:
        return ""
    gains = gains_over_alternatives(arms, tiers, test, examples)
    if gains and not has_rival_methods(arms, controls):
        return _alternatives_finding(gains)
    return _field_finding(arms, tiers, test, examples)


def _alternatives_finding(gains: Sequence[Difference]) -> str:
    first, every = gains[0].this, len(gains)
    won = [gain for gain in gains if gain.beyond_noise and gain.advantage > 0]
    lost = [gain for gain in gains if gain.beyond_noise and gain.advantage < 0]
    level = [gain for gain in gains if not gain.beyond_noise]
    if len(level) == every:
        where = "on every tier" if every > 1 else f"on {gains[0].tier} devices"
        return f"{first} is within noise of the best simple alternative {where}."
    parts = []
    if won:
        parts.append(f"beats the best simple alternative {_amounts(won)}")
    if lost:
        parts.append(f"loses {'' if won else 'to the best simple alternative '}{_amounts(lost)}")
    if level:
        parts.append(f"is within noise of it on {join_words([gain.tier for gain in level])} devices")
    return f"{first} {join_words(parts)}."


def _amounts(gains: Sequence[Difference]) -> str:
    metric = gains[0].metric
    parts = [f"on {gain.tier} devices by {metric.number(abs(gain.mean))}{metric.difference_unit}" for gain in gains]
    return join_words(parts)


def _field_finding(arms: Sequence[Arm], tiers: Sequence[str], test: str, examples: int) -> str:
    tops = {tier: _top(arms, tier, test, examples) for tier in tiers}
    tops = {tier: top for tier, top in tops.items() if top}
    if not tops:
        return "No tier has two arms that finished with a model its devices can run: there is nothing to compare."
    won = {tier: top[0] for tier, top in tops.items() if len(top) == 1}
    level = {tier: top[0] for tier, top in tops.items() if len(top) > 1}
    if not won:
        (name, where), *others = _by_name(level)
        leaders = [f"{name} leads on {where}", *(f"{name} on {where}" for name, where in others)]
        return f"No arm is best beyond noise; {', '.join(leaders)} devices."
    parts = [f"{name} is best on {where} devices" for name, where in _by_name(won)]
    parts += [f"no arm is best beyond noise on {join_words(list(level))} devices"] if level else []
    return f"{'; '.join(parts)}."


def _by_name(names: Mapping[str, str]) -> list[tuple[str, str]]:
    """Each name once, with the tiers that have it."""
    return [
        (name, join_words([tier for tier in names if names[tier] == name])) for name in dict.fromkeys(names.values())
    ]


def _top(arms: Sequence[Arm], tier: str, test: str, examples: int) -> list[str]:
    """The best arm, and all that it does not beat beyond noise; empty if fewer than two compete."""
    ranked = rank_arms(arms, tier, test)
    if len(ranked) < 2:
        return []
    best, *others = ranked
    return [best.name, *(one.name for one in others if not _beats(best, one, tier, test, examples))]


def _beats(this: Arm, other: Arm, tier: str, test: str, examples: int) -> bool:
    gap = compute_difference(this, other, tier, test, examples)
    return gap.beyond_noise and gap.advantage > 0
