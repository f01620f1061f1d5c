"""Flower is asked to be silent before anything of it is imported; where it is not installed, nothing here is tried."""

import pytest

pytest.importorskip("flwr")

import fedloom.flower  # noqa: F401
