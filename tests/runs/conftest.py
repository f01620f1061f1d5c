"""Fixtures of runs of a small recipe."""

from tests.run_fixtures import document, run  # noqa: F401
