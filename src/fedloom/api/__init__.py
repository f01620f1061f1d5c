"""The Python API: simulations composed of objects or names, and a function for every verb of the command line."""
