"""What happened, for people and for programs."""

from .paired_stats import Arm, Difference, Overall, Serving, difference, overall, table, verdict

__all__ = [
    "Arm",
    "Difference",
    "Overall",
    "Serving",
    "difference",
    "overall",
    "table",
    "verdict",
]
