"""From a recipe to a run: reading, checking, assembling, the loop, and comparisons."""

from ..reporting.result import Result
from .assembly.assemble import Experiment, assemble
from .assembly.faults import NoQuorum
from .costs.costing import TierCost, tier_costs
from .recipes.load import Loaded, load
from .recipes.problems import Problem, RecipeError
from .recipes.tables import Tables
from .running.record import NothingAdmitted, recorded
from .running.run import Round, Run
from .studies.compare import Comparison, comparison
from .studies.controls import CONTROLS, arms, serving

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
