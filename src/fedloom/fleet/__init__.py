"""The fleet as the server knows it: devices, tiers, who takes part, and one turn of a method."""

from .candidate import Candidate, DeviceModel, ServerModel, slices
from .cohort import draw_cohort
from .device import Ask, Device, Engine, Reply, Tier
from .tiers import Assignment, BadTier, Fleet, nested, parameters
from .turn import Traffic, Turn

__all__ = [
    "Ask",
    "Assignment",
    "BadTier",
    "Candidate",
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
    "parameters",
    "slices",
]
