"""The scenarios' answers have the form that readers of the JSON rely on."""

import argparse

import pytest

from benchmarks.__main__ import known, measured, profile_text, text
from benchmarks.profiling import where
from benchmarks.scenarios import SCENARIOS, Scenario, Training, overhead, training

TINY = Scenario("tiny", lambda workers: training(Training("convnet", {"e": 3}, 1), workers), 1e9, 0.0)


def test_a_scenario_says_ratio_goals_and_memory() -> None:
    found = measured(TINY, repeats=1, workers=1)
    assert {"name", "ratio", "must", "moonshot", "low", "high", "met", "megabytes", "worker_megabytes"} == set(found)
    assert found["met"]
    assert found["megabytes"] > 10
    assert "tiny" in text([found])


def test_without_another_side_own_time_counts() -> None:
    found = measured(Scenario("hardly any work", overhead, 1e9, 0.0, scale=10), repeats=1, workers=1)
    assert found["low"] <= found["ratio"] <= found["high"]


def test_a_profile_names_operations_and_functions() -> None:
    with TINY.sides(1) as sides:
        found = where(sides.ours)
    assert any("conv" in row["name"] for row in found["operations"])
    assert sum(row["share"] for row in found["operations"]) <= 1.01
    assert found["functions"][0]["self_ms"] >= found["functions"][-1]["self_ms"]
    assert "own ms" in profile_text({"name": "tiny", **found})


def test_a_scenario_is_known_by_the_beginning_of_its_name() -> None:
    assert known("overhead") == SCENARIOS[-1].name
    assert known("missed") == "missed"
    with pytest.raises(argparse.ArgumentTypeError, match="ResNet e"):
        known("ResNet")
