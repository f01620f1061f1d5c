"""A recipe's robust rule is used in every aggregation; without one, updates are averaged as in the papers."""

import pytest

from fedloom.footprints import RULES, RobustAggregator, coverage_mean
from fedloom.footprints.robust import TrimmedMean
from fedloom.recipe.registries import Registries
from fedloom.recipe.schema import AggregationConfig
from fedloom.runs.build import build_aggregate
from fedloom.runs.folder import read_manifest


def test_build_aggregate_without_rule_is_coverage_mean():
    assert build_aggregate(AggregationConfig(), Registries()) is coverage_mean


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "none"])
def test_build_aggregate_every_rule_name_is_built(rule):
    made = build_aggregate(AggregationConfig(rule=rule, low_coverage="clipped", min_contributors=4), Registries())
    assert isinstance(made, RobustAggregator)
    assert (made.rule, made.low_coverage, made.min_contributors) == (RULES[rule](), "clipped", 4)


def test_build_aggregate_rule_settings_reach_the_rule():
    made = build_aggregate(AggregationConfig(rule="trimmed_mean", share=0.4), Registries())
    assert isinstance(made, RobustAggregator)
    assert made.rule == TrimmedMean(0.4)


@pytest.mark.parametrize(
    "method",
    [
        "heterofl",
        "fiarse",
        *(
            pytest.param(one, marks=pytest.mark.slow)
            for one in ("fedrolex", "fjord", "noside", "decouple", "depthfl", "scalefl", "inclusivefl")
        ),
    ],
)
def test_run_with_robust_rule_aggregates_by_it(run, method):
    """With more contributors required than there are, no region changes: the run ends with its initial weights."""
    found = {}
    exits = {"family": "preactresnet", "hidden": [2, 4], "blocks": [1, 1], "exit_after": 1}
    two, small = ({"name": name, "share": 0.5} for name in ("large", "small"))
    changes = {
        "fiarse": {"tiers": [two, small]},
        "noside": {"model": exits},  # which is about early exits, as those below
        "depthfl": {"model": exits},
        "scalefl": {"model": exits},
        "inclusivefl": {"model": exits, "tiers": [two, {**small, "stages": 1}]},
    }.get(method, {})
    settings = {"momentum": 0.0} if method == "inclusivefl" else {}  # its stages differ in shape
    for name, aggregation in {
        "plain": {},
        "none": {"rule": "none", "min_contributors": 99},
        "median": {"rule": "median", "min_contributors": 1},
        "held": {"rule": "median", "min_contributors": 99},
        "held longer": {"rule": "median", "min_contributors": 99},
    }.items():
        rounds = 3 if name == "held longer" else 2
        made = run(
            name,
            method={"name": method, **settings},
            aggregation=aggregation,
            rounds=rounds,
            data__devices=6,
            **changes,
        )
        found[name] = read_manifest(made.folder)["sha256"]
    assert found["plain"] == found["none"]
    assert found["held"] == found["held longer"]
    assert len({found["plain"], found["median"], found["held"]}) == 3
