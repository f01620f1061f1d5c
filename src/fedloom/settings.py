"""Types of settings with their valid ranges, so that every recipe error can name the range."""

import math
from typing import Annotated, Any

from annotated_types import Ge, Interval

Share = Annotated[float, Interval(gt=0, le=1)]
Fraction = Annotated[float, Interval(ge=0, le=1)]
Count = Annotated[int, Ge(1)]
Natural = Annotated[int, Ge(0)]
Positive = Annotated[float, Interval(gt=0, lt=math.inf)]
NonNegative = Annotated[float, Interval(ge=0, lt=math.inf)]


class FrozenDict(dict[str, Any]):
    """A hashable dict of settings; it must not be changed."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(sorted(self.items())))
