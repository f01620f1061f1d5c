"""A small recipe as a mapping, and a fixture that runs it."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import fedloom
from fedloom.api.run import Run


def small(**changes: Any) -> dict[str, Any]:
    """Two tiers on the bundled digits; `training__epochs=2` changes a key of a section, `rounds=1` a top-level one."""
    document: dict[str, Any] = {
        "seed": 0,
        "rounds": 2,
        "data": {"dataset": "digits", "devices": 4},
        "model": {"family": "convnet", "hidden": [2, 4]},
        "tiers": [{"name": "large", "share": 0.5, "width": 1.0}, {"name": "small", "share": 0.5, "width": 0.5}],
        "training": {"batch_size": 100},
        "method": {"name": "heterofl"},
    }
    for name, value in changes.items():
        section, _, key = name.partition("__")
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
    """Run the small recipe with changes in a folder of the given name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDLOOM_DATA", raising=False)

    def go(name: str = "run", options: Mapping[str, Any] | None = None, **changes: Any) -> Run:
        return fedloom.run(small(**changes), out=tmp_path / name, **(options or {}))

    return go
