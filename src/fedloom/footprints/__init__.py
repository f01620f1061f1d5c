"""Where a small model lies inside a large one, and how updates of differently sized models are aggregated."""

from .coverage import Aggregate, ClientUpdate, coverage_mean
from .dp import DPAggregator, ExpectedParticipation
from .footprint import (
    AxisSlicer,
    Footprint,
    centered,
    find_footprint,
    find_foreign_frozen,
    is_submodel,
    leading,
    rolling,
    shape_fits,
    subnet_footprint,
    take_block,
)
from .robust import RULES, LowCoverage, RobustAggregator, Rule

__all__ = [
    "RULES", "Aggregate", "AxisSlicer", "ClientUpdate", "DPAggregator", "ExpectedParticipation", "Footprint",
    "LowCoverage", "RobustAggregator", "Rule", "centered", "coverage_mean", "find_footprint", "find_foreign_frozen",
    "is_submodel", "leading", "rolling", "shape_fits", "subnet_footprint", "take_block",
]  # fmt: skip
