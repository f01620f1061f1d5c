"""The recipe's defence reaches every merge, and a recipe without one merges as the papers do."""

import pytest

from fedloom.footprints import RULES, RobustAggregator, coverage_mean
from fedloom.footprints.robust import TrimmedMean
from fedloom.recipe.schema import AggregationConfig
from fedloom.runs.build import build_aggregate
from fedloom.runs.folder import read_manifest


def test_without_a_defence_it_is_the_papers_mean_itself():
    assert build_aggregate(AggregationConfig()) is coverage_mean


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "none"])
def test_every_rule_can_be_named(rule):
    made = build_aggregate(AggregationConfig(rule=rule, low_coverage="clipped", min_contributors=4))
    assert isinstance(made, RobustAggregator)
    assert (made.rule, made.low_coverage, made.min_contributors) == (RULES[rule](), "clipped", 4)


def test_settings_of_the_rule_stand_beside_it():
    made = build_aggregate(AggregationConfig(rule="trimmed_mean", share=0.4))
    assert isinstance(made, RobustAggregator)
    assert made.rule == TrimmedMean(0.4)


@pytest.mark.parametrize(
    "method",
    ["heterofl", *(pytest.param(one, marks=pytest.mark.slow) for one in ("fedrolex", "fjord", "noside", "decouple"))],
)
def test_a_run_merges_by_its_defence(run, method):
    """With more votes asked for than there are, every ring holds: the run ends with what it began with."""
    found = {}
    for name, defence in {
        "plain": {},
        "none": {"rule": "none", "min_contributors": 99},
        "median": {"rule": "median", "min_contributors": 1},
        "held": {"rule": "median", "min_contributors": 99},
        "held longer": {"rule": "median", "min_contributors": 99},
    }.items():
        rounds = 3 if name == "held longer" else 2
        made = run(name, method={"name": method}, aggregation=defence, rounds=rounds, data__devices=6)
        found[name] = read_manifest(made.folder)["sha256"]
    assert found["plain"] == found["none"]
    assert found["held"] == found["held longer"]
    assert len({found["plain"], found["median"], found["held"]}) == 3
