"""Other systems on the same workload, each in its own process and, if needed, with its own interpreter."""
