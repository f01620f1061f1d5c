"""Where a small model lies inside a large one, and how updates of differently sized models are aggregated."""

from ..models.axes import AxisSlicer
from .coverage import Aggregate, ClientUpdate, coverage_mean
from .dp import DPAggregator, ExpectedParticipation
from .footprint import (
    Footprint,
    centered,
    find_footprint,
    find_foreign_frozen,
    find_sliced_stack,
    is_submodel,
    leading,
    read_submodel,
    rolling,
    shape_fits,
    subnet_footprint,
    take_block,
    tensor_fits,
)
from .proof import find_slicing_problem
from .robust import RULES, LowCoverage, RobustAggregator, Rule

__all__ = [
    "RULES", "Aggregate", "AxisSlicer", "ClientUpdate", "DPAggregator", "ExpectedParticipation", "Footprint",
    "LowCoverage", "RobustAggregator", "Rule", "centered", "coverage_mean", "find_footprint", "find_foreign_frozen",
    "find_sliced_stack", "find_slicing_problem", "is_submodel", "leading", "read_submodel", "rolling", "shape_fits",
    "subnet_footprint", "take_block", "tensor_fits",
]  # fmt: skip
