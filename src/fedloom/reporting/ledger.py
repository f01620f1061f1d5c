"""A paper's claim, judged: what each of its two sides came to, seed by seed, and whether all seeds agree.

The ledger of claims: one file for programs, from which the part for people is written. Never by hand.
"""

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from ..evaluation import Row
from ..files import write_whole
from .paired_stats import ACCURACY, METRICS, Verdict, unanimous
from .targets import Amount, bytes_to, gap, in_order, median, rounds_to, seconds_a_round

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


def evaluate_claim(this: Side, other: Side, terms: Terms, seen: Evidence) -> Finding:
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
    """A side's curve, evaluation by evaluation; of all devices, where it is theirs."""
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


SCHEMA_VERSION = 1
OPENS, CLOSES = "<!-- claims: written by fedloom reproduce -->", "<!-- end of claims -->"
UNITS: dict[Measure, tuple[float, str, str]] = {
    "last": (1, ".2f", ""),
    "rounds": (1, "g", " rounds"),
    "bytes": (1e6, ".2f", " MB"),
    "seconds": (1, ".2f", " s a round"),
    "gain": (1, ".2f", " times"),
}


def read_ledger(path: Path) -> dict[str, Any]:
    """Claims, and of every comparison that decided some of them what its runs were made of."""
    if not path.is_file():
        return {"schema_version": SCHEMA_VERSION, "claims": [], "comparisons": {}}
    said: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return said


def merge(
    path: Path, entries: Iterable[Mapping[str, Any]], made_of: Mapping[str, Any], order: Sequence[str]
) -> list[dict[str, Any]]:
    """Put entries into the ledger, in the order of the list of claims. Those of other claims stay as they are."""
    before = read_ledger(path)
    known = {one["claim"]: one for one in before["claims"]} | {one["claim"]: dict(one) for one in entries}
    places = {name: place for place, name in enumerate(order)}
    claims = sorted(known.values(), key=lambda one: places.get(one["claim"], len(places)))
    comparisons = {**before["comparisons"], **made_of}
    said = {"schema_version": SCHEMA_VERSION, "claims": claims, "comparisons": dict(sorted(comparisons.items()))}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, (json.dumps(said, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode())
    return claims


def reword(path: Path, words: Mapping[str, Mapping[str, str]]) -> list[dict[str, Any]]:
    """Have claims that were decided earlier speak with the words that the list has now; numbers stay."""
    before = read_ledger(path)["claims"]
    claims = [{**one, **words.get(one["claim"], {})} for one in before]
    return merge(path, claims, {}, [one["claim"] for one in claims]) if claims != before else claims


def rewrite(page: Path, claims: Sequence[Mapping[str, Any]], open_claims: int, notes: Mapping[str, str]) -> None:
    """The claims' part of a page, between its marks; what is outside of them is left alone."""
    text = page.read_text(encoding="utf-8") if page.is_file() else "# Results\n"
    before, mark, rest = text.partition(OPENS)
    after = rest.partition(CLOSES)[2] if mark else "\n"
    body = "\n\n".join((OPENS, told(claims, open_claims), *_analyses(claims, notes), CLOSES))
    write_whole(page, (before.rstrip("\n") + "\n\n" + body + after).encode())


def told(claims: Sequence[Mapping[str, Any]], open_claims: int) -> str:
    """A table, and how many verdicts of each kind there are."""
    counts = {
        kind: sum(one["verdict"] == kind for one in claims) for kind in ("holds", "does not hold", "within noise")
    }
    summary = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    lines = [
        f"{len(claims)} claims judged ({summary}), {open_claims} not yet. A claim holds if all seeds say so, does not "
        "hold if all say the opposite, and is within noise otherwise. Published figures are of the papers' own data, "
        "nets and fleets, measured ones of a comparison small enough for minutes: its recipe says at its head what was "
        "cut, and names the arms. Medians [lowest–highest] over seeds; paired: the median of the differences within a "
        "seed, which is not the difference of the medians, and their range.",
        "",
        "| claim | paper | published | recipe | measured | seeds | verdict | minutes | commit |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for one in claims:
        cells = (
            f"`{one['claim']}`: {one['statement']}", one["paper"], one["published"], f"`{one['recipe']}`",
            one["measured"]["text"] + _aims(one["measured"].get("targets", {})),
            f"{one['measured']['agreeing_seeds']} of {len(one['seeds'])}", f"**{one['verdict']}**",
            f"{one['wall_seconds'] / 60:.1f}", one["commit"] or "-",
        )  # fmt: skip
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    lines += ["", "Any of them again: `fedloom reproduce --claim NAME`. Minutes are those of the whole comparison."]
    return "\n".join(lines)


def _aims(targets: Mapping[str, float]) -> str:
    """What rounds and bytes are counted to; two where the sides are of different tiers."""
    each = [f"{target:.4g}" for target in dict.fromkeys(targets.values())]
    return f" (target {' and '.join(each)})" if each else ""


def _analyses(claims: Sequence[Mapping[str, Any]], notes: Mapping[str, str]) -> list[str]:
    known = [(one["claim"], one["verdict"], notes[one["claim"]]) for one in claims if one["claim"] in notes]
    return [f"`{name}` ({verdict}): {said}" for name, verdict, said in known]


def measured_text(found: Finding, measure: Measure, names: tuple[str, str]) -> str:
    """Both sides, and the differences seed by seed, on which the verdict rests."""
    sides = [f"{name} {spread(one, measure)}" for name, one in zip(names, (found.this, found.other), strict=True)]
    gaps = sorted(one for one in found.gaps if not math.isnan(one))
    shown = [_signed(one, measure) for one in (statistics.median_low(gaps), gaps[0], gaps[-1])] if gaps else []
    return "; ".join(sides) + ("; paired {} [{} to {}]".format(*shown) if shown else "")


def _signed(gap: float, measure: Measure) -> str:
    """Where only one of the two got there, nobody knows by how much."""
    if math.isinf(gap):
        less, more = ("less", "more") if measure == "gain" else ("sooner", "later")
        return more if gap > 0 else less
    unit, digits, _ = UNITS[measure]
    return f"{gap / unit:+{digits}}"


def spread(amounts: Sequence[Amount], measure: Measure) -> str:
    """Median and range over seeds; what was never reached is told as more than the run."""
    unit, digits, name = UNITS[measure]
    if any(math.isnan(one.value) for one in amounts):
        return "not measured"
    ordered = [one.said(unit, digits) for one in in_order(amounts)]
    return f"{median(amounts).said(unit, digits)} [{ordered[0]}–{ordered[-1]}]{name}"
