"""A simulation that takes a fraction of a second, and the command line in this process."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fedloom as fl
from tests.cli.conftest import fedloom  # noqa: F401 - a fixture


def tiny(**changes: Any) -> fl.Simulation:
    """Two tiers on the bundled digits, three rounds."""
    parts: dict[str, Any] = {
        "dataset": fl.datasets.digits(),
        "partition": fl.partitions.iid(devices=4),
        "tiers": fl.tiers(
            fl.models.convnet, {"hidden": (2, 4)}, large={"share": 0.5}, small={"share": 0.5, "width": 0.5}
        ),
        "method": fl.methods.HeteroFL(),
        "client": fl.ClientConfig(batch_size=100),
        "data": {"max_examples": 100, "test_examples": 60},
        "rounds": 3,
    }
    return fl.Simulation(**{**parts, **changes})


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., fl.Simulation]:
    """Make the simulation with changes; runs and files go to a folder of the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDLOOM_DATA", raising=False)
    return tiny


def fingerprints(run: fl.Run) -> tuple[str, str]:
    return run.manifest["sha256"], run.manifest["devices_sha256"]


def results_of(run: fl.Run) -> tuple[tuple[str, str], str, str]:
    """What must be equal between two ways to run the same simulation."""
    return fingerprints(run), *((run.folder / name).read_text() for name in ("rows.jsonl", "participation.jsonl"))
