"""Studies of several runs: comparisons, attack benchmarks, and reproductions of papers."""
