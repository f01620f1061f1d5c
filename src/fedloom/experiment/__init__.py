"""From a recipe to a run: reading, checking, assembling, the loop, and comparisons."""

from ..reporting.result import Result
from .assemble import Experiment, assemble
from .compare import Comparison, comparison
from .controls import CONTROLS, arms, serving
from .costing import TierCost, tier_costs
from .faults import NoQuorum
from .load import Loaded, load
from .problems import Problem, RecipeError
from .record import NothingAdmitted, recorded
from .run import Round, Run
from .tables import Tables

__all__ = [
    "CONTROLS",
    "Comparison",
    "Experiment",
    "Loaded",
    "NoQuorum",
    "NothingAdmitted",
    "Problem",
    "RecipeError",
    "Result",
    "Round",
    "Run",
    "Tables",
    "TierCost",
    "arms",
    "assemble",
    "comparison",
    "load",
    "recorded",
    "serving",
    "tier_costs",
]
