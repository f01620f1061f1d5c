"""What happened, for people and for programs."""

from .comparison import Arm, Difference, Overall, Serving, difference, overall, table, verdict
from .journal import Journal, peak_memory, read_manifest, read_rows, versions
from .summary import Final, summarise

__all__ = [
    "Arm",
    "Difference",
    "Final",
    "Journal",
    "Overall",
    "Serving",
    "difference",
    "overall",
    "peak_memory",
    "read_manifest",
    "read_rows",
    "summarise",
    "table",
    "verdict",
    "versions",
]
