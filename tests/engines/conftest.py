"""A recipe small enough to run in a blink."""

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture(scope="session")
def recipe() -> Callable[..., dict[str, Any]]:
    """Two tiers of odd widths, and devices of different sizes, so that blocks are uneven: with these changes."""

    def changed(**changes: Any) -> dict[str, Any]:
        return {
            "rounds": 2,
            "data": {"dataset": "digits", "devices": 7, "partition": {"kind": "quantity", "alpha": 2.0}},
            "model": {"hidden": [3, 5]},
            "tiers": [{"name": "large", "share": 0.5, "width": 1.0}, {"name": "small", "share": 0.5, "width": 0.5}],
            "training": {"batch_size": 20, "optimizer": {"kind": "sgd", "lr": 0.1, "momentum": 0.9}},
            "method": {"name": "heterofl"},
            **changes,
        }

    return changed
