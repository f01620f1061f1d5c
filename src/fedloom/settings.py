"""Types of settings. What a recipe can get wrong has its range in its type, so every error names it."""

import math
from typing import Annotated, Any

from annotated_types import Ge, Interval

Share = Annotated[float, Interval(gt=0, le=1)]
Fraction = Annotated[float, Interval(ge=0, le=1)]
Count = Annotated[int, Ge(1)]
Natural = Annotated[int, Ge(0)]
Positive = Annotated[float, Interval(gt=0, lt=math.inf)]
NotNegative = Annotated[float, Interval(ge=0, lt=math.inf)]


class FixedTable(dict[str, Any]):
    """A table of settings that nobody changes, so that what has it is still a value."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(sorted(self.items())))
