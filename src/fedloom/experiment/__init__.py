"""From a recipe to a run: reading, checking, assembling, the loop, and comparisons."""

from .assemble import Experiment, assemble
from .compare import Comparison, Result, comparison
from .controls import CONTROLS, arms, serving
from .costing import TierCost, tier_costs
from .load import Loaded, load
from .problems import Problem, RecipeError
from .run import NothingAdmitted, Round, Run, recorded
from .tables import Tables

__all__ = [
    "CONTROLS",
    "Comparison",
    "Experiment",
    "Loaded",
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
