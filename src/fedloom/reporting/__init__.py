"""What happened, for people and for programs."""

from .comparison import Arm, Difference, Serving, difference, table, verdict
from .journal import Journal, read_manifest, read_rows, versions
from .summary import Final, summarise

__all__ = [
    "Arm",
    "Difference",
    "Final",
    "Journal",
    "Serving",
    "difference",
    "read_manifest",
    "read_rows",
    "summarise",
    "table",
    "verdict",
    "versions",
]
