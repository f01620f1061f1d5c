"""How a small model lies inside a large one, and how many small ones become the large one again."""

from .coverage import Contribution, Merge, coverage_mean
from .footprint import Footprint, Place, between, carve, centred, fits, is_part, leading, part_of, rolling

__all__ = [
    "Contribution",
    "Footprint",
    "Merge",
    "Place",
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
