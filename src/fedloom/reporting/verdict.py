"""The one rule for a claim over paired seeds."""

from collections.abc import Callable, Sequence
from typing import Literal

Verdict = Literal["holds", "does not hold", "within noise"]


def more(gap: float) -> bool:
    return gap > 0


def less(gap: float) -> bool:
    return gap < 0


def unanimous(gaps: Sequence[float], agrees: Callable[[float], bool], contradicts: Callable[[float], bool]) -> Verdict:
    """It holds if every seed says so, and does not if every seed says the opposite; a tie or no number is neither."""
    if gaps and all(map(agrees, gaps)):
        return "holds"
    if gaps and all(map(contradicts, gaps)):
        return "does not hold"
    return "within noise"
