"""Where a small model lies inside a large one, and how updates of differently sized models are aggregated."""

from ..models.axes import AxisSlicer
from .coverage import Aggregate, ClientUpdate, count_contributors, coverage_mean, updated_entries
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
from .server_optimizer import SERVER_OPTIMIZERS, ServerOptimizer, ServerStep, split_moments

__all__ = [
    "RULES", "SERVER_OPTIMIZERS", "Aggregate", "AxisSlicer", "ClientUpdate", "DPAggregator", "ExpectedParticipation",
    "Footprint", "LowCoverage", "RobustAggregator", "Rule", "ServerOptimizer", "ServerStep", "centered",
    "count_contributors", "coverage_mean", "find_footprint", "find_foreign_frozen", "find_sliced_stack",
    "find_slicing_problem", "is_submodel", "leading", "read_submodel", "rolling", "shape_fits",
    "split_moments", "subnet_footprint", "take_block", "tensor_fits", "updated_entries",
]  # fmt: skip
