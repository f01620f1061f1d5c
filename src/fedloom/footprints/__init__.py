"""How a small model lies inside a large one, and how many small ones become the large one again."""

from .coverage import Aggregate, ClientUpdate, coverage_mean
from .dp import DPAggregator, ExpectedParticipation
from .footprint import Footprint, Place, between, carve, centered, fits, is_part, leading, part_of, rolling
from .robust import RULES, RobustAggregator, Thin

__all__ = [
    "RULES",
    "Aggregate",
    "ClientUpdate",
    "DPAggregator",
    "ExpectedParticipation",
    "Footprint",
    "Place",
    "RobustAggregator",
    "Thin",
    "between",
    "carve",
    "centered",
    "coverage_mean",
    "fits",
    "is_part",
    "leading",
    "part_of",
    "rolling",
]
