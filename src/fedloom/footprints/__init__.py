"""How a small model lies inside a large one, and how many small ones become the large one again."""

from .coverage import Contribution, Merge, coverage_mean
from .dp import Electorate, PrivateMerge
from .footprint import Footprint, Place, between, carve, centred, fits, is_part, leading, part_of, rolling
from .robust import RULES, Defence, Thin

__all__ = [
    "RULES",
    "Contribution",
    "Defence",
    "Electorate",
    "Footprint",
    "Merge",
    "Place",
    "PrivateMerge",
    "Thin",
    "between",
    "carve",
    "centred",
    "coverage_mean",
    "fits",
    "is_part",
    "leading",
    "part_of",
    "rolling",
]
