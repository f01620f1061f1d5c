"""What arms are measured by: which way is better, and how far a test set alone can tell."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from ..evaluation import Row


@dataclass(frozen=True)
class Metric:
    name: str  # of its rows
    unit: str = ""
    steps: str = ""  # what differences are counted in
    sign: Literal[1, -1] = 1  # -1: less is better

    def said(self, value: float, digits: int = 1) -> str:
        return f"{value:.{digits}f}{self.unit}"

    def gap(self, value: float) -> str:
        return f"{value:+.1f}{self.steps}"

    @property
    def axis(self) -> str:
        return f"{self.name},{self.unit}" if self.unit else self.name

    def test_error(self, level: float, examples: int) -> float:
        """The standard error that a test set leaves of a value: of shares of right answers it is known, of losses it
        is not, and then only seeds tell."""
        share = level / 100
        return 100 * math.sqrt(max(0.0, share * (1 - share)) / examples) if self.unit else 0.0


ACCURACY = Metric("accuracy", " %", " points")
PERPLEXITY = Metric("perplexity", sign=-1)
METRICS = {one.name: one for one in (ACCURACY, PERPLEXITY)}


def metric_of(rows: Iterable[Row]) -> Metric:
    """Perplexity where words are guessed, else accuracy."""
    return PERPLEXITY if any(row.metric == PERPLEXITY.name for row in rows) else ACCURACY
