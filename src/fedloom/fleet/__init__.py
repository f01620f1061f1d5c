"""The fleet as the server knows it: devices, tiers, who takes part, and one turn of a method."""

from .device import AT_THE_SERVER, PLAIN, Ask, Coding, Device, Engine, Reply, Tier
from .eval_targets import Candidate, Carried, DeviceModel, ServerModel, slices
from .round_context import Traffic, Turn
from .sampling import Sampling, draw_cohort, expected_voters
from .tiers import Assignment, BadTier, Fleet, nested, nesting_problem, number_name, parameters, side_by_side

__all__ = [
    "AT_THE_SERVER",
    "PLAIN",
    "Ask",
    "Assignment",
    "BadTier",
    "Candidate",
    "Carried",
    "Coding",
    "Device",
    "DeviceModel",
    "Engine",
    "Fleet",
    "Reply",
    "Sampling",
    "ServerModel",
    "Tier",
    "Traffic",
    "Turn",
    "draw_cohort",
    "expected_voters",
    "nested",
    "nesting_problem",
    "number_name",
    "parameters",
    "side_by_side",
    "slices",
]
