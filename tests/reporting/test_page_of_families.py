"""A page can be built for every family of methods and every kind of fleet."""

from pathlib import Path

import pytest

import fedloom
from fedloom.reporting.page import build_page
from fedloom.reporting.report_data import read_report_data
from tests.chaos import FAMILIES, recipe

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tests", [["global", "local"], ["local"]], ids=["both tests", "local"])
def test_page_of_every_family_is_built(family: str, tests: list[str], tmp_path: Path) -> None:
    document = recipe(family, rounds=3)
    evaluation = {**document["evaluation"], "every": 1, "tests": tests}
    fedloom.run({**document, "evaluation": evaluation}, out=tmp_path / "run")
    built = build_page(read_report_data([tmp_path / "run"]))
    assert {"learning_rounds.csv", "participation.csv", "partition.csv", "devices.csv", "time.csv"} <= built.csvs.keys()


@pytest.mark.parametrize(
    "changes", [{"assignment": "redrawn"}, {"eligible": ["large"]}, {"holdout_fraction": 0.5}], ids=str
)
def test_page_of_every_kind_of_fleet_is_built(changes: dict[str, object], tmp_path: Path) -> None:
    document = recipe("heterofl", rounds=3)
    fedloom.run({**document, "fleet": {**document["fleet"], **changes}}, out=tmp_path / "run")
    assert "devices.csv" in build_page(read_report_data([tmp_path / "run"])).csvs
