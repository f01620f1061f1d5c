"""Who was asked in a round and what came of it, tier by tier: what a report shows, and rows do not say."""

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from ...engines import Refusal
from ...fleet import Traffic, Turn

ADMITTED, MISSING = "admitted", "missing"
Line = dict[str, Any]


def attendance(turn: Turn, refusals: Iterable[Refusal], with_norms: bool) -> tuple[Line, ...]:
    """One line for each tier and outcome: the devices, what they were sent, what they sent, bundle by bundle, and how
    far they moved what they were given (least, median, most)."""
    lost: dict[str, str] = {}
    for refusal in refusals:
        lost.setdefault(refusal.device, refusal.code)
    groups: dict[tuple[str, str], list[str]] = {}
    for name in sorted(turn.traffic.carriers):
        heard = ADMITTED if name in turn.traffic.examples else MISSING
        groups.setdefault((turn.traffic.carriers[name].tier, lost.get(name, heard)), []).append(name)
    return tuple(
        {
            "round": turn.number, "tier": tier, "outcome": outcome, "devices": names,
            **_moved(turn.traffic, names), **(_norms(turn.traffic, names) if with_norms else {}),
        }
        for (tier, outcome), names in sorted(groups.items())
    )  # fmt: skip


def _moved(traffic: Traffic, names: Sequence[str]) -> Line:
    up: Counter[str] = Counter()
    for name in names:
        up.update(traffic.sent.get(name, {}))
    return {"down": sum(traffic.moved[name] for name in names) - up.total(), "up": dict(sorted(up.items()))}


def _norms(traffic: Traffic, names: Sequence[str]) -> Line:
    found = [traffic.norms[name] for name in names if name in traffic.norms]
    if not found:
        return {}
    return {"norms": [float(f"{one:.6g}") for one in (min(found), statistics.median(found), max(found))]}
