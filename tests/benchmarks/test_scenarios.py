"""The scenarios' answers have the form that readers of the JSON rely on."""

import argparse
from typing import Any

import pytest

from benchmarks.__main__ import format_profile, format_scenarios, measure, parse_scenario
from benchmarks.drawing import dropout_cnn
from benchmarks.profiling import profile_call
from benchmarks.scenarios import (
    MNIST_LABELS,
    SCENARIOS,
    Scenario,
    Training,
    drawing,
    overhead,
    training,
    tuning,
    two_label_sizes,
    unequal_data,
    whole_round,
)
from fedloom.evaluation.batchnorm import BatchNormStatistics
from fedloom.models import build_model
from fedloom.models.batching import is_stochastic

TINY = Scenario("tiny", lambda workers: training(Training("convnet", {"e": 3}, 1), workers), 1e9, 0.0)


def test_measure_scenario_has_ratio_goals_and_memory() -> None:
    found = measure(TINY, repeats=1, workers=1)
    assert {"name", "ratio", "must", "moonshot", "low", "high", "met", "megabytes", "worker_megabytes"} == set(found)
    assert found["met"]
    assert found["megabytes"] > 10
    assert "tiny" in format_scenarios([found])


def test_drawing_scenario_compares_a_net_that_draws_with_one_that_does_not() -> None:
    models = [build_model("net", dropout_cnn, {"chance": chance}, (1, 28, 28), 10) for chance in (0.5, 0.0)]
    assert [is_stochastic(model) for model in models] == [True, False]
    tiny = Scenario("tiny", lambda workers: drawing(dropout_cnn, 1, workers, devices=2), 1e9, 0.0)
    found = measure(tiny, repeats=1, workers=1)
    assert 0 < found["low"] <= found["ratio"] <= found["high"]


def test_unequal_scenario_counts_time_per_example() -> None:
    sizes = two_label_sizes()
    assert len(sizes) == 100
    assert 0.95 * sum(MNIST_LABELS) < sum(sizes) <= sum(MNIST_LABELS)
    assert len({size % 10 for size in sizes}) > 5  # incomplete batches of many sizes
    with unequal_data({"e": 2}, 1) as sides:
        assert sides.work == sum(sizes[::50]) / (2 * 600)


def test_measure_scenario_without_theirs_reports_time() -> None:
    found = measure(Scenario("hardly any work", overhead, 1e9, 0.0, scale=10), repeats=1, workers=1)
    assert found["low"] <= found["ratio"] <= found["high"]


def test_profile_call_names_operations_and_functions() -> None:
    with TINY.sides(1) as sides:
        found = profile_call(sides.ours)
    # torch's convolutions are operations, those of the lane kernels are functions
    assert any("conv" in row["name"] for kind in ("operations", "functions") for row in found[kind])
    assert sum(row["share"] for row in found["operations"]) <= 1.01
    assert found["functions"][0]["self_ms"] >= found["functions"][-1]["self_ms"]
    assert "own ms" in format_profile({"name": "tiny", **found})


def test_parse_scenario_accepts_a_unique_prefix() -> None:
    assert parse_scenario("overhead") == SCENARIOS[-1].name
    assert parse_scenario("missed") == "missed"
    with pytest.raises(argparse.ArgumentTypeError, match="ResNet e"):
        parse_scenario("ResNet")


@pytest.mark.slow
def test_tuning_scenario_runs_both_sides_and_counts_a_quarter_of_the_runs() -> None:
    with tuning(4, 1, 3, 1) as sides:
        assert sides.work == 4.0 and sides.theirs is not None
        sides.ours()
        sides.theirs()


@pytest.mark.parametrize("family", ["transformer", "lstm"])
def test_text_scenario_trains_both_sides(family: str) -> None:
    with training(Training(family, {"e": 2}, 1), 1) as sides:
        sides.ours()
        assert sides.theirs is not None
        sides.theirs()


@pytest.mark.slow
def test_whole_round_scenario_collects_statistics_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Statistics of equal weights are kept; they would make our side look faster from its second run on."""
    collected, fill = [], BatchNormStatistics.fill

    def counting(*arguments: Any) -> Any:
        collected.append(arguments)
        return fill(*arguments)

    monkeypatch.setattr(BatchNormStatistics, "fill", counting)
    with whole_round(1, devices=6, share=10) as sides:
        assert sides.theirs is not None
        for run in (sides.theirs, sides.ours, sides.ours):
            run()
    assert len(collected) == 2
