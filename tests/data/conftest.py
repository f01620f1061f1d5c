"""Tiny data sets and label lists for the tests of this folder."""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fedloom.data import Labels
from tests.pickles import pickles_heard


@pytest.fixture(autouse=True)
def _no_downloads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDLOOM_DOWNLOAD", raising=False)


@pytest.fixture(autouse=True)
def _no_pickles() -> Iterator[None]:
    """No test of this folder may load a pickle."""
    with pickles_heard() as observed:
        yield
    assert observed == []


@pytest.fixture
def even_labels() -> Labels:
    """Four classes with 8 training and 4 test examples each, mixed."""
    return Labels(np.tile(np.arange(4), 8), np.tile(np.arange(4), 4), 4)


@pytest.fixture
def real_folder() -> Path:
    """The user's data directory; tests that need real files are skipped without one."""
    folder = os.environ.get("FEDLOOM_DATA")
    if not folder:
        pytest.skip("FEDLOOM_DATA is not set")
    return Path(folder)
