"""The fleet as the server knows it: devices, tiers, who takes part, and one turn of a method."""

from .candidate import Candidate, Carried, DeviceModel, ServerModel, slices
from .cohort import draw_cohort
from .device import AT_THE_SERVER, Ask, Device, Engine, Reply, Tier
from .tiers import Assignment, BadTier, Fleet, nested, nesting_problem, parameters, side_by_side
from .turn import Traffic, Turn

__all__ = [
    "AT_THE_SERVER",
    "Ask",
    "Assignment",
    "BadTier",
    "Candidate",
    "Carried",
    "Device",
    "DeviceModel",
    "Engine",
    "Fleet",
    "Reply",
    "ServerModel",
    "Tier",
    "Traffic",
    "Turn",
    "draw_cohort",
    "nested",
    "nesting_problem",
    "parameters",
    "side_by_side",
    "slices",
]
