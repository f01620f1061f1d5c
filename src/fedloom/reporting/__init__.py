"""Results of runs and comparisons: statistics over paired seeds, tables, charts and the HTML report."""

from .paired_stats import (
    Arm,
    Difference,
    ServedModel,
    compare_overall,
    compute_difference,
    summarize_arms,
    write_verdict,
)

__all__ = [
    "Arm", "Difference", "ServedModel", "compare_overall", "compute_difference", "summarize_arms",
    "write_verdict",
]  # fmt: skip
