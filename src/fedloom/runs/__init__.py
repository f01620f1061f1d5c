"""A run: the loop, what it writes down, and how it goes on after a crash."""
