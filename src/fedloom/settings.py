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
    """A hashable dict of settings, which cannot be changed."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise TypeError("these settings are frozen; make a copy with dict(…) and change that")

    __setitem__ = __delitem__ = __ior__ = update = setdefault = pop = popitem = clear = _refuse

    def __reduce__(self) -> Any:  # copy and pickle would fill an empty one
        return FrozenDict, (dict(self),)
