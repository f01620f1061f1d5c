"""A recipe small enough to run in a blink, as a mapping."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import fedloom
from fedloom.analysis.run import Run


def small(**changes: Any) -> dict[str, Any]:
    """Two tiers on the bundled digits; a change `training__epochs=2` is of a section, one of two words of the top."""
    document: dict[str, Any] = {
        "seed": 0,
        "rounds": 2,
        "data": {"dataset": "digits", "devices": 4},
        "model": {"family": "convnet", "hidden": [2, 4]},
        "tiers": [{"name": "large", "share": 0.5, "width": 1.0}, {"name": "small", "share": 0.5, "width": 0.5}],
        "training": {"batch_size": 100},
        "method": {"name": "heterofl"},
    }
    for place, value in changes.items():
        section, _, key = place.partition("__")
        if key:
            document[section] = {**document.get(section, {}), key: value}
        else:
            document[section] = value
    return document


@pytest.fixture(scope="session")
def document() -> Callable[..., dict[str, Any]]:
    return small


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Run]:
    """Run the small recipe with changes, into a folder of that name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDLOOM_DATA", raising=False)

    def go(name: str = "run", own: Mapping[str, Any] | None = None, **changes: Any) -> Run:
        return fedloom.run(small(**changes), out=tmp_path / name, **(own or {}))

    return go
