"""Types of settings that a recipe can get wrong: the range is part of the type, so every error names it."""

import math
from typing import Annotated

from annotated_types import Ge, Interval

Share = Annotated[float, Interval(gt=0, le=1)]
Fraction = Annotated[float, Interval(ge=0, le=1)]
Count = Annotated[int, Ge(1)]
Natural = Annotated[int, Ge(0)]
Positive = Annotated[float, Interval(gt=0, lt=math.inf)]
NotNegative = Annotated[float, Interval(ge=0, lt=math.inf)]
