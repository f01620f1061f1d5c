"""Evaluate a paper's claim over paired seeds, and keep the ledger of all evaluated claims.

The ledger is one JSON file; the section of the results page between two marks is generated from it.
"""

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from ..evaluation import Row
from ..evaluation.metrics import MetricInfo, metric_sign
from ..files import write_atomic
from .paired_stats import ClaimVerdict, decide_unanimously, mean_by_share
from .targets import (
    Amount,
    amount_difference,
    bytes_to,
    mean_round_seconds,
    median_amount,
    rounds_to,
    sort_amounts,
    target_from,
)

Measure = Literal["last", "rounds", "bytes", "seconds", "gain"]
Relation = Literal["more", "less", "at least", "alike"]
ALL = "*"  # all devices, tiers weighted by their share


@dataclass(frozen=True)
class ClaimSide:
    """One of the two sides that a claim compares."""

    arm: str
    tier: str = ALL
    candidate: str = ""  # empty: the first
    minus: str | tuple[str, ...] | None = None  # the side is the lead over this arm, or over the best of several

    @property
    def others(self) -> tuple[str, ...]:
        return (self.minus,) if isinstance(self.minus, str) else self.minus or ()


@dataclass(frozen=True)
class ClaimTerms:
    """How the sides are measured and compared. `targets` are by tier, for measures of cost to a target."""

    measure: Measure
    relation: Relation
    test: str = "global"
    metric: str = "accuracy"
    within: float = 0.0  # largest difference that counts as alike
    targets: Mapping[str, float] | None = None


@dataclass(frozen=True)
class Evidence:
    """Everything that was measured in a comparison, by arm."""

    runs: Mapping[str, Sequence[Sequence[Row]]]  # rows, by seed
    shares: Mapping[str, Mapping[str, float]]  # of an arm's devices, by tier
    metrics: Mapping[str, MetricInfo] = field(default_factory=dict)  # as the runs declare them

    def sign(self, metric: str) -> int:
        """1 if higher is better, else -1."""
        return metric_sign(metric, self.metrics)


@dataclass(frozen=True)
class ClaimResult:
    this: list[Amount]  # by seed
    other: list[Amount]
    gaps: list[float]
    verdict: ClaimVerdict
    agreeing: int  # seeds


def evaluate_claim(this: ClaimSide, other: ClaimSide, terms: ClaimTerms, evidence: Evidence) -> ClaimResult:
    first, second = side_amounts(this, terms, evidence), side_amounts(other, terms, evidence)
    gaps = [amount_difference(one, two) for one, two in zip(first, second, strict=True)]
    return ClaimResult(first, second, gaps, decide(gaps, terms), sum(agrees(terms, gap) for gap in gaps))


def decide(gaps: Sequence[float], terms: ClaimTerms) -> ClaimVerdict:
    return decide_unanimously(gaps, partial(agrees, terms), partial(contradicts, terms))


def agrees(terms: ClaimTerms, gap: float) -> bool:
    match terms.relation:
        case "more":
            return gap > 0
        case "less":
            return gap < 0
        case "at least":
            return gap >= 0
        case "alike":
            return abs(gap) <= terms.within


def contradicts(terms: ClaimTerms, gap: float) -> bool:
    """True for the opposite sign; a tie or NaN neither agrees nor contradicts."""
    match terms.relation:
        case "more" | "at least":
            return gap < 0
        case "less":
            return gap > 0
        case "alike":
            return abs(gap) > terms.within


def side_amounts(side: ClaimSide, terms: ClaimTerms, evidence: Evidence) -> list[Amount]:
    """The measured amounts of a side, by seed."""
    own, *others = (
        [_run_amount(rows, side, arm, terms, evidence) for rows in evidence.runs[arm]]
        for arm in (side.arm, *side.others)
    )
    if not others:
        return own
    pairs = zip(own, (best_amount(amounts, terms, evidence) for amounts in zip(*others, strict=True)), strict=True)
    if terms.measure == "gain":
        return [amount_ratio(one, two) for one, two in pairs]
    return [Amount(one.value - two.value, one.exact and two.exact) for one, two in pairs]


def best_amount(amounts: Sequence[Amount], terms: ClaimTerms, evidence: Evidence) -> Amount:
    """The best of several arms in one seed: the best value, or the least cost."""
    if terms.measure == "last":
        return max(amounts, key=lambda amount: evidence.sign(terms.metric) * amount.value)
    return sort_amounts(amounts)[0]


def amount_ratio(one: Amount, two: Amount) -> Amount:
    """How many times the first fits into the second: a lower bound if only the first reached the target, 0 if only the
    second did, NaN if neither did."""
    if not one.exact:
        return Amount(0.0 if two.exact else math.nan)
    return Amount(two.value / one.value, two.exact)


class NotMeasuredError(ValueError):
    """A claim needs a value that its runs do not have."""


def _run_amount(rows: Sequence[Row], side: ClaimSide, arm: str, terms: ClaimTerms, evidence: Evidence) -> Amount:
    if terms.measure == "seconds":
        seconds = mean_round_seconds(rows)
        if seconds is None:
            raise NotMeasuredError(f"{arm} has no simulated seconds: its tiers need a speed and a bandwidth")
        return Amount(seconds)
    curve = side_curve(rows, side, terms, evidence.shares[arm])
    if not curve:
        what = " ".join(filter(None, (side.candidate, terms.test, terms.metric)))
        raise NotMeasuredError(f"{arm} has no {what} of {'devices' if side.tier == ALL else side.tier}")
    if terms.measure == "last":
        return Amount(list(curve.values())[-1])
    reached = rounds_to((terms.targets or {})[side.tier], curve, evidence.sign(terms.metric))
    last = max(curve) if reached is None else reached
    amount = bytes_to(last, rows) if terms.measure == "bytes" else last
    return Amount(amount, reached is not None)


def side_curve(
    rows: Sequence[Row], side: ClaimSide, terms: ClaimTerms, shares: Mapping[str, float]
) -> dict[int, float]:
    """Value by evaluated round, of a tier or averaged over all devices."""
    tiers = shares if side.tier == ALL else {side.tier: 1.0}
    matching = [row for row in rows if (row.device, row.test, row.metric) == ("", terms.test, terms.metric)]
    matching = [row for row in matching if row.tier in tiers]
    candidate = side.candidate or (matching[0].candidate if matching else "")
    by_round: dict[int, dict[str, float]] = {}
    for row in matching:
        if row.candidate == candidate:
            by_round.setdefault(row.round, {})[row.tier] = row.value
    evaluated = {tier for by_tier in by_round.values() for tier in by_tier}  # a tier may have no device
    return {
        number: mean_by_share(by_tier, tiers) for number, by_tier in by_round.items() if by_tier.keys() == evaluated
    }


LAST_FIFTH, FLAT = 0.2, 1.0  # share of the rounds; largest change in them, in points, that counts as converged
FINE_TUNED = ("initial", "personalized")  # metrics before and after fine-tuning


def flatness(sides: Iterable[ClaimSide], terms: ClaimTerms, evidence: Evidence) -> dict[str, Any]:
    """How much the arms of a claim still change in the last fifth of their rounds.

    By arm and tier: the slope of the least-squares line through the values of the last fifth, times its length, mean
    over seeds; None if fewer than three of its rounds were evaluated. `converged` is None if any of them is. Of what is
    measured only once, around fine-tuning after the last round, it is the accuracy of the models that are fine-tuned.
    """
    if terms.metric in FINE_TUNED:
        terms = replace(terms, metric="accuracy")
    changes: dict[str, float | None] = {}
    for side in sides:
        for arm in (side.arm, *side.others):
            curves = [side_curve(rows, side, terms, evidence.shares[arm]) for rows in evidence.runs[arm]]
            each = [change_in_last_fifth(curve) for curve in curves]
            known = [change for change in each if change is not None]
            name = arm if side.tier == ALL else f"{arm} ({side.tier})"
            changes[name] = round(statistics.fmean(known), 4) if known and len(known) == len(each) else None
    measured = [change for change in changes.values() if change is not None]
    converged = None if len(measured) < len(changes) else all(abs(change) <= FLAT for change in measured)
    return {"changes": changes, "converged": converged}


def change_in_last_fifth(curve: Mapping[int, float]) -> float | None:
    """Slope of the last fifth times its length; None if it has fewer than three evaluated rounds."""
    if not curve:
        return None
    length = max(curve) * LAST_FIFTH
    points = [(at, value) for at, value in curve.items() if at >= max(curve) - length and math.isfinite(value)]
    if len(points) < 3:
        return None
    slope, _ = statistics.linear_regression(*zip(*points, strict=True))
    return slope * length


def baseline_target(side: ClaimSide, terms: ClaimTerms, margin: float, evidence: Evidence) -> dict[str, float]:
    """The target of the side's tier, from the baseline alone."""
    last = ClaimTerms("last", "more", terms.test, terms.metric)
    values = [amount.value for amount in side_amounts(side, last, evidence)]
    return {side.tier: target_from(values, evidence.sign(terms.metric), margin)}


def claim_record(result: ClaimResult) -> dict[str, Any]:
    """The result for JSON; what was never reached is null."""
    sides = {"this": result.this, "other": result.other}
    values = {name: [_number(one.value) if one.exact else None for one in side] for name, side in sides.items()}
    return {**values, "difference": [_number(gap) for gap in result.gaps], "agreeing_seeds": result.agreeing}


def _number(value: float) -> float | None:
    return round(value, 6) if math.isfinite(value) else None


MEASURE_UNITS: dict[Measure, tuple[float, str, str]] = {
    "last": (1, ".2f", ""),
    "rounds": (1, "g", " rounds"),
    "bytes": (1e6, ".2f", " MB"),
    "seconds": (1, ".2f", " s a round"),
    "gain": (1, ".2f", " times"),
}


def measured_text(result: ClaimResult, measure: Measure, names: tuple[str, str]) -> str:
    """Both sides, and the differences within seeds that decide the verdict."""
    amounts = zip(names, (result.this, result.other), strict=True)
    sides = [f"{name} {format_spread(side, measure)}" for name, side in amounts]
    gaps = sorted(gap for gap in result.gaps if not math.isnan(gap))
    shown = [_format_gap(gap, measure) for gap in (statistics.median_low(gaps), gaps[0], gaps[-1])] if gaps else []
    return "; ".join(sides) + ("; paired {} [{} to {}]".format(*shown) if shown else "")


def _format_gap(gap: float, measure: Measure) -> str:
    """The difference with its sign; a word if only one side reached the target, as its size is then unknown."""
    if math.isinf(gap):
        less, more = ("less", "more") if measure == "gain" else ("sooner", "later")
        return more if gap > 0 else less
    unit, digits, _ = MEASURE_UNITS[measure]
    return f"{gap / unit:+{digits}}"


def format_spread(amounts: Sequence[Amount], measure: Measure) -> str:
    """Median and range over seeds; ">" marks targets that were never reached."""
    unit, digits, name = MEASURE_UNITS[measure]
    if any(math.isnan(amount.value) for amount in amounts):
        return "not measured"
    ordered = [amount.format(unit, digits) for amount in sort_amounts(amounts)]
    return f"{median_amount(amounts).format(unit, digits)} [{ordered[0]}–{ordered[-1]}]{name}"


SCHEMA_VERSION = 1
SECTION_START, SECTION_END = "<!-- claims: written by fedloom reproduce -->", "<!-- end of claims -->"


def read_ledger(path: Path) -> dict[str, Any]:
    """The evaluated claims, and the fingerprints and versions of the comparisons behind them."""
    empty: dict[str, Any] = {"schema_version": SCHEMA_VERSION, "claims": [], "comparisons": {}, "full_size": []}
    return {**empty, **(json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {})}


def update_ledger(
    path: Path, entries: Iterable[Mapping[str, Any]], comparisons: Mapping[str, Any], order: Sequence[str]
) -> list[dict[str, Any]]:
    """Add or replace entries, in the order of the list of claims; entries of other claims stay as they are.

    A verdict that is replaced by that of other runs is kept in `earlier`.
    """
    before = read_ledger(path)
    known = {entry["claim"]: entry for entry in before["claims"]}
    by_name = known | {one["claim"]: _with_earlier(one, known.get(one["claim"])) for one in entries}
    positions = {name: position for position, name in enumerate(order)}
    claims = sorted(by_name.values(), key=lambda entry: positions.get(entry["claim"], len(positions)))
    merged = dict(sorted({**before["comparisons"], **comparisons}.items()))
    _write_ledger(path, {**before, "claims": claims, "comparisons": merged})
    return claims


EARLIER_KEYS = ("verdict", "recipe", "commit", "date")


def _with_earlier(entry: Mapping[str, Any], before: Mapping[str, Any] | None) -> dict[str, Any]:
    if before is None or "earlier" in entry:
        return dict(entry)
    earlier = list(before.get("earlier", ()))
    if entry["measured"]["text"] != before["measured"]["text"] or entry["recipe"] != before["recipe"]:
        kept = {key: before[key] for key in EARLIER_KEYS if key in before}
        earlier.append({**kept, "measured": before["measured"]["text"]})
    return {**entry, **({"earlier": earlier} if earlier else {})}


def full_size_entry(about: Mapping[str, Any], by_seed: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A number of a full-size row over its seeds: their means, and what they cost together.

    Parameters
    ----------
    about : the row, its paper, the number, what was published, and `of`, the planned rounds.
    by_seed : the runs. Those that are not finished count only if none is; then the first does.
    """
    ordered = sorted(by_seed, key=lambda run: run["seed"])
    runs = [run for run in ordered if run["rounds"] >= about["of"]] or ordered[:1]
    newest, seeds = max(runs, key=lambda run: run["date"]), [run["seed"] for run in runs]
    first = f" --first-seed {seeds[0]}" if seeds[0] else ""
    more = first + (f" --seeds {seeds[-1] - seeds[0] + 1}" if len(seeds) > 1 else "")
    return {
        **about, "measured": _mean_of(runs, "measured"), "last": _mean_of(runs, "last"),
        "rounds": min(run["rounds"] for run in runs), "seeds": seeds,
        "seconds": round(math.fsum(run["seconds"] for run in runs), 1),
        "command": f"fedloom reproduce {about['row']} --full{more}",
        "commit": newest["commit"], "date": newest["date"], "by_seed": [dict(run) for run in runs],
    }  # fmt: skip


def _mean_of(runs: Sequence[Mapping[str, Any]], key: str) -> float | None:
    """Of all seeds; None if one of them has no value."""
    values = [run[key] for run in runs]
    return None if None in values else round(math.fsum(values) / len(values), 4)


def update_full_size(path: Path, entries: Iterable[Mapping[str, Any]], order: Sequence[str]) -> list[dict[str, Any]]:
    """Add full-size rows, one entry for each published number, in the order of the papers' lists.

    Seeds that the ledger has of a row stay, so that several machines can share a table; a run of the same seed is
    replaced unless the new one got less far.
    """
    before = read_ledger(path)
    merged = {(one["row"], one["what"]): dict(one) for one in before["full_size"]}
    for entry in entries:
        key = entry["row"], entry["what"]
        merged[key] = _with_known_seeds(entry, merged.get(key))
    positions = {name: position for position, name in enumerate(order)}
    rows = sorted(merged.values(), key=lambda one: positions.get(one["row"], len(positions)))
    _write_ledger(path, {**before, "full_size": rows})
    return rows


SEED_KEYS = ("row", "paper", "of", "deviation", "what", "published")


def _with_known_seeds(entry: Mapping[str, Any], before: Mapping[str, Any] | None) -> dict[str, Any]:
    runs = {run["seed"]: run for run in (before["by_seed"] if before and before["of"] == entry["of"] else ())}
    for run in entry["by_seed"]:
        if run["seed"] not in runs or run["rounds"] >= runs[run["seed"]]["rounds"]:
            runs[run["seed"]] = run
    return full_size_entry({key: entry[key] for key in SEED_KEYS if key in entry}, list(runs.values()))


def _write_ledger(path: Path, ledger: Mapping[str, Any]) -> None:
    """Without full-size rows the key is left out."""
    content = {key: value for key, value in ledger.items() if value or key != "full_size"}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, (json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode())


def update_claim_texts(path: Path, texts: Mapping[str, Mapping[str, str]]) -> list[dict[str, Any]]:
    """Give evaluated claims the texts that the list of claims has now; numbers stay."""
    before = read_ledger(path)["claims"]
    claims = [{**entry, **texts.get(entry["claim"], {})} for entry in before]
    return update_ledger(path, claims, {}, [entry["claim"] for entry in claims]) if claims != before else claims


def write_claims_section(
    page: Path, claims: Sequence[Mapping[str, Any]], open_claims: int, notes: Mapping[str, str]
) -> None:
    """Write the claims between the page's marks; the rest of the page stays as it is."""
    _write_section(page, (SECTION_START, SECTION_END), [_claims_table(claims, open_claims), *_analyses(claims, notes)])


FULL_SIZE_START, FULL_SIZE_END = "<!-- full size: written by fedloom reproduce -->", "<!-- end of full size -->"
CLOSE = 0.5  # points: a larger difference from the published value needs an analysis


def write_full_size_section(page: Path, rows: Sequence[Mapping[str, Any]], notes: Mapping[str, str]) -> None:
    """Write the table of full-size rows between the page's marks; the rest of the page stays as it is."""
    far = list(dict.fromkeys(one["row"] for one in rows if not _is_close(one)))
    texts = [f"`{row}`: {notes.get(row, 'not analysed yet.')}" for row in far]
    _write_section(page, (FULL_SIZE_START, FULL_SIZE_END), [_full_size_table(rows), *texts])


def _is_close(entry: Mapping[str, Any]) -> bool:
    """True if it was run to its end and differs little from what was published, or if nothing was."""
    gap = full_size_gap(entry)
    return gap is None or abs(gap) <= CLOSE or entry["rounds"] < entry["of"]


def full_size_gap(entry: Mapping[str, Any]) -> float | None:
    """Measured less published; None if either is missing."""
    published, measured = entry["published"], entry["measured"]
    return None if published is None or measured is None else measured - published


def _full_size_table(rows: Sequence[Mapping[str, Any]]) -> str:
    whole = [one for one in rows if one["rounds"] >= one["of"] and full_size_gap(one) is not None]
    close = sum(_is_close(one) for one in whole)
    lines = [
        f"{len({one['row'] for one in rows})} rows; of {len(whole)} published numbers whose runs are finished, {close} "
        f"are within {CLOSE:g} of the published one. Measured: selected as published (such as the best round of all "
        "that were evaluated, every one in the last fifth), mean over seeds; last: that of the last round. A row with "
        "fewer rounds than planned is open.",
        "",
        "| row | number | published | measured | difference | last | rounds | seeds | hours | commit |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for one in rows:
        deviation = f" ({one['deviation']})" if one.get("deviation") else ""
        rounds = f"{one['rounds']}" if one["rounds"] >= one["of"] else f"{one['rounds']} of {one['of']}"
        cells = (
            f"`{one['row']}`: {one['paper']}", one["what"], _two_digits(one["published"]) + deviation,
            _two_digits(one["measured"]), _two_digits(full_size_gap(one), "+"), _two_digits(one["last"]), rounds,
            ", ".join(map(str, one["seeds"])), f"{one['seconds'] / 3600:.2f}", one["commit"] or "-",
        )  # fmt: skip
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    lines += ["", "To repeat one: `fedloom reproduce ROW --full`."]
    return "\n".join(lines)


def _two_digits(value: float | None, sign: str = "") -> str:
    return "-" if value is None else f"{value:{sign}.2f}"


def _write_section(page: Path, marks: tuple[str, str], paragraphs: Sequence[str]) -> None:
    """Replace what is between two marks of a page, or add it at the end."""
    text = page.read_text(encoding="utf-8") if page.is_file() else "# Results\n"
    before, mark, rest = text.partition(marks[0])
    after = rest.partition(marks[1])[2] if mark else "\n"
    body = "\n\n".join((marks[0], *paragraphs, marks[1]))
    write_atomic(page, (before.rstrip("\n") + "\n\n" + body + after).encode())


def _claims_table(claims: Sequence[Mapping[str, Any]], open_claims: int) -> str:
    counts = {
        verdict: sum(entry["verdict"] == verdict for entry in claims)
        for verdict in ("holds", "does not hold", "within noise")
    }
    summary = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    lines = [
        f"{len(claims)} claims evaluated ({summary}), {open_claims} not yet. A claim holds if all seeds agree, does "
        "not hold if all contradict it, and is within noise otherwise. Published figures come from the papers' own "
        "data, models and fleets; measured ones from a comparison small enough to run in minutes, whose recipe says at "
        "its head what was reduced, and names the arms. Measured: median [lowest–highest] over seeds; paired: the "
        "median and range of the differences within seeds, which is not the difference of the medians. Last fifth: how "
        f"much the arms still change in the last fifth of the rounds, in points (the largest); up to {FLAT:g} they "
        "count as converged. Earlier verdicts, of shorter or other comparisons, are shown below the table.",
        "",
        "| claim | paper | published | recipe | measured | seeds | verdict | last fifth | minutes | commit |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for entry in claims:
        measured = entry["measured"]
        cells = (
            f"`{entry['claim']}`: {entry['statement']}", entry["paper"], entry["published"], f"`{entry['recipe']}`",
            measured["text"] + _format_targets(measured.get("targets", {})),
            f"{measured['agreeing_seeds']} of {len(entry['seeds'])}", f"**{entry['verdict']}**",
            _format_flatness(measured.get("flatness")),
            f"{entry['wall_seconds'] / 60:.1f}", entry["commit"] or "-",
        )  # fmt: skip
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    lines += ["", "To repeat one: `fedloom reproduce --claim NAME`. Minutes are those of the whole comparison."]
    return "\n".join(lines)


def _format_flatness(flat: Mapping[str, Any] | None) -> str:
    if not flat or flat["converged"] is None:
        return "not measured"
    change = max(flat["changes"].values(), key=abs)
    return f"{change:+.2f}, {'converged' if flat['converged'] else 'still changing'}"


def _format_targets(targets: Mapping[str, float]) -> str:
    """The targets of the sides, which differ if their tiers do."""
    texts = [f"{target:.4g}" for target in dict.fromkeys(targets.values())]
    return f" (target {' and '.join(texts)})" if texts else ""


def _analyses(claims: Sequence[Mapping[str, Any]], notes: Mapping[str, str]) -> list[str]:
    earlier = [
        f"`{one['claim']}` was before: {before['verdict']} (`{before['recipe']}`: {before['measured']})"
        for one in claims
        for before in one.get("earlier", ())
    ]
    return earlier + [
        f"`{one['claim']}` ({one['verdict']}): {notes[one['claim']]}" for one in claims if one["claim"] in notes
    ]
