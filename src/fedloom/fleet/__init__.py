"""The fleet as the server knows it: devices, tiers, who takes part, and one turn of a method."""

from .device import PLAIN, SERVER_PREFIX, Ask, Coding, Device, Engine, Reply, Tier
from .eval_targets import DeviceModel, EvalTarget, ModelWeights, ServerModel, slices
from .round_context import RoundContext, Traffic
from .sampling import Sampling, draw_cohort, expected_voters
from .tiers import Assignment, BadTier, Fleet, nested, nesting_problem, number_name, parameters, side_by_side

__all__ = [
    "PLAIN",
    "SERVER_PREFIX",
    "Ask",
    "Assignment",
    "BadTier",
    "Coding",
    "Device",
    "DeviceModel",
    "Engine",
    "EvalTarget",
    "Fleet",
    "ModelWeights",
    "Reply",
    "RoundContext",
    "Sampling",
    "ServerModel",
    "Tier",
    "Traffic",
    "draw_cohort",
    "expected_voters",
    "nested",
    "nesting_problem",
    "number_name",
    "parameters",
    "side_by_side",
    "slices",
]
