"""A run whose devices are elsewhere: on Ray, or on machines of their own."""
