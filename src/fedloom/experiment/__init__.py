"""From a recipe to a run: reading, checking, assembling, the loop, and comparisons."""

from .assemble import Experiment, assemble
from .controls import CONTROLS, arms, serving
from .costing import TierCost, tier_costs
from .load import Loaded, load
from .problems import Problem, RecipeError
from .run import Round, Run, recorded
from .tables import Tables

__all__ = [
    "CONTROLS",
    "Experiment",
    "Loaded",
    "Problem",
    "RecipeError",
    "Round",
    "Run",
    "Tables",
    "TierCost",
    "arms",
    "assemble",
    "load",
    "recorded",
    "serving",
    "tier_costs",
]
