"""Configure Flower before it is imported, and skip these tests without it."""

import pytest

import fedloom.flower  # noqa: F401

pytest.importorskip("flwr")
