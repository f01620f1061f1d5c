"""The end of a run in a few numbers: the last and the best value of everything that was judged."""

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from ..evaluation import Row


@dataclass(frozen=True)
class Final:
    """`best` is the highest accuracy of any judged round; papers often print it, claims should use `value`."""

    candidate: str
    tier: str
    test: str
    metric: str
    value: float
    best: float
    best_round: int
    mean_of_10: float  # of the last ten judgements


def summarise(rows: Iterable[Row]) -> list[Final]:
    """Per candidate, tier and test; devices' own rows are left out."""
    series: dict[tuple[str, str, str, str], list[Row]] = {}
    for row in rows:
        if not row.device:
            series.setdefault((row.candidate, row.tier, row.test, row.metric), []).append(row)
    return [_final(*key, judged) for key, judged in series.items()]


def _final(candidate: str, tier: str, test: str, metric: str, judged: list[Row]) -> Final:
    sign = 1 if metric.startswith("accuracy") else -1
    best = max(judged, key=lambda row: -math.inf if math.isnan(row.value) else sign * row.value)
    mean = statistics.fmean(row.value for row in judged[-10:])
    return Final(candidate, tier, test, metric, judged[-1].value, best.value, best.round, mean)
