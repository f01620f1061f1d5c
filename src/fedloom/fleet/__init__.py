"""The fleet as the server knows it: devices, tiers, who takes part, and one turn of a method."""

from .device import PLAIN, SERVER_PREFIX, Ask, Coding, Device, Engine, Reply, Tier
from .eval_targets import DeviceModel, EvalTarget, ModelWeights, ServerModel, tier_slices
from .round_context import RoundContext, Traffic
from .sampling import Sampling, draw_cohort, expected_participants
from .tiers import Assignment, BadTier, Fleet, make_nested_tiers, find_nesting_problem, device_name, count_parameters, make_tiers

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
    "expected_participants",
    "make_nested_tiers",
    "find_nesting_problem",
    "device_name",
    "count_parameters",
    "make_tiers",
    "tier_slices",
]
