"""Fixtures for the tests of models."""

import inspect

import pytest

from fedloom.models import MODELS

LAST_LAYERS = {"columnnet": "columns.1.classifier"}
"""Of the tiny families whose last layer is not called `classifier`."""

NORMED = [name for name, build in sorted(MODELS.items()) if "normalization" in inspect.signature(build).parameters]
OF_TOKENS = [name for name, build in sorted(MODELS.items()) if "tokens" in inspect.signature(build).parameters]


@pytest.fixture(params=NORMED)
def normed_family(request: pytest.FixtureRequest) -> str:
    """Every model family whose normalization can be chosen."""
    return str(request.param)


@pytest.fixture(params=OF_TOKENS)
def token_family(request: pytest.FixtureRequest) -> str:
    """Every model family for token sequences."""
    return str(request.param)
