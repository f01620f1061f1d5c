"""Types of settings with their valid ranges, so that every recipe error can name the range.

A `SearchRange` or `SearchChoices` beside a type declares that `fedloom tune` searches the setting, and where.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Any

from annotated_types import Ge, Interval

Share = Annotated[float, Interval(gt=0, le=1)]
Fraction = Annotated[float, Interval(ge=0, le=1)]
Count = Annotated[int, Ge(1)]
Natural = Annotated[int, Ge(0)]
Positive = Annotated[float, Interval(gt=0, lt=math.inf)]
NonNegative = Annotated[float, Interval(ge=0, lt=math.inf)]


@dataclass(frozen=True)
class SearchRange:
    """Where a setting is searched: `lr: Annotated[Positive, SearchRange(0.01, 1.0, log=True)] = 0.1`.

    Parameters
    ----------
    low : the lowest value.
    high : the highest value. If both are whole numbers, so is every value between.
    log : whether orders of magnitude count the same, as for learning rates.
    """

    low: float
    high: float
    log: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            raise ValueError(f"a range goes from a lower to a higher number, not from {self.low} to {self.high}")
        if self.log and self.low <= 0:
            raise ValueError("a range searched by orders of magnitude begins above 0")

    def __str__(self) -> str:
        return f"{self.low}..{self.high}" + (":log" if self.log else "")


@dataclass(frozen=True)
class SearchChoices:
    """The values that are tried for a setting: `epochs: Annotated[Count, SearchChoices((1, 2, 4))] = 1`.

    Parameters
    ----------
    values : any values that a recipe can have.
    """

    values: tuple[Any, ...]

    def __str__(self) -> str:
        return ",".join(
            str(value.get("kind", value)) if isinstance(value, dict) else str(value) for value in self.values
        )


class FrozenDict(dict[str, Any]):
    """A hashable dict of settings, which cannot be changed."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise TypeError("these settings are frozen; make a copy with dict(…) and change that")

    __setitem__ = __delitem__ = __ior__ = update = setdefault = pop = popitem = clear = _refuse

    def __reduce__(self) -> Any:  # copy and pickle would fill an empty one
        return FrozenDict, (dict(self),)
