"""More than one run: comparisons, attacks, and what papers published."""
