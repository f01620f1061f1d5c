"""The ledger of claims: one file for programs, from which the part for people is written. Never by hand."""

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..durable import write_whole
from .claims import Finding, Measure
from .targets import Amount, in_order, median

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
