"""Runs on Flower: real fleets with keys, server and devices, and simulations on Ray."""
