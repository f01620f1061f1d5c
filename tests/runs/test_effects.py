"""Settings that a method would silently ignore are refused by name, or mentioned."""

import logging
from typing import Any

import pytest

import fedloom
from fedloom.recipe.errors import RecipeError
from fedloom.reporting.charts.participation import enough_updates


def recipe(method: str, **sections: Any) -> dict[str, Any]:
    return {
        "rounds": sections.pop("rounds", 1),
        "data": {"dataset": "digits", "devices": 4, **sections.pop("data", {})},
        "model": {"family": "mlp", "hidden": [4]},
        "tiers": [{"name": "all", "share": 1.0}],
        "method": {"name": method},
        **sections,
    }


IDLE: dict[str, dict[str, Any]] = {
    "aggregation.rule": {"aggregation": {"rule": "median"}},
    "faults.min_coverage": {"faults": {"min_coverage": 2}},
    "compression.uplink": {"compression": {"uplink": {"kind": "float16"}}},
    "compression.downlink": {"compression": {"downlink": {"kind": "float16"}}},
    "admission.norm": {"admission": {"norm": 3.0}},
}


@pytest.mark.parametrize("key", IDLE)
def test_check_setting_that_the_method_ignores_is_refused(key: str) -> None:
    fedloom.check(recipe("fedavg", **IDLE[key]))
    with pytest.raises(RecipeError) as refused:
        fedloom.check(recipe("standalone", **IDLE[key]))
    (issue,) = refused.value.issues
    assert (issue.code, ".".join(map(str, issue.key_path))) == ("NO_EFFECT", key)
    assert issue.message.endswith(f"; {key} has no effect")


def test_check_aggregation_rule_without_average_names_method_and_key() -> None:
    with pytest.raises(RecipeError, match=r"standalone averages nothing; aggregation\.rule has no effect"):
        fedloom.check(recipe("standalone", aggregation={"rule": "median"}))


def test_check_method_that_uploads_kernels_has_no_rule_but_compression() -> None:
    public = {"public": {"examples": 16}}
    fedloom.check(recipe("fedhenn", data=public, compression={"uplink": {"kind": "float16"}}))
    with pytest.raises(RecipeError, match=r"fedhenn averages nothing; aggregation\.rule has no effect"):
        fedloom.check(recipe("fedhenn", data=public, aggregation={"rule": "median"}))


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        (
            recipe("fedavg", data={"public": {"examples": 16}}),
            "data.public has no effect here: fedavg",
        ),
        (recipe("standalone", evaluation={"fine_tune": {"epochs": 1}}), "evaluation.fine_tune has no effect here"),
        (recipe("fedavg", evaluation={"statistics": {"batch_size": 5}}), "evaluation.statistics has no effect here"),
        (recipe("fedavg", aggregation={"min_contributors": 5}), "aggregation.min_contributors has no effect here"),
        (recipe("fedavg", faults={"stragglers": {"kind": "lognormal"}}), "faults.stragglers has no effect here"),
        (
            recipe("fedavg", training={"lr_schedule": {"kind": "cosine", "rounds": 3}}, rounds=8),
            "nothing is learned from round 4 of 8 on: training.lr_schedule",
        ),
        (
            recipe("fedavg", aggregation={"rule": "median", "min_contributors": 5}),
            "weights that all devices hold never change: a round has at most 4 updates of them, and "
            "aggregation.min_contributors asks for 5",
        ),
        (
            recipe("fedavg", faults={"min_coverage": 3}, fleet={"participation": 0.5}),
            "weights that all devices hold never change: a round has at most 2 updates of them, and faults",
        ),
        (
            recipe(
                "heterofl",
                aggregation={"rule": "median"},
                tiers=[{"name": "large", "share": 0.5}, {"name": "small", "share": 0.5, "width": 0.5}],
            ),
            "weights that large devices hold never change: a round has at most 2 updates of them",
        ),
    ],
)
def test_check_harmless_setting_without_effect_is_mentioned(
    document: dict[str, Any], expected: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "fedloom")
    fedloom.check(document)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(expected)


def test_check_poisson_cohort_may_be_large_enough_for_a_quorum(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fedloom")
    fedloom.check(recipe("fedavg", faults={"min_coverage": 3}, fleet={"participation": 0.5, "sampling": "poisson"}))
    assert not caplog.records


@pytest.mark.parametrize("key", ["aggregation.rule", "faults.min_coverage"])
def test_check_centralized_has_one_update_and_so_no_rule(key: str) -> None:
    with pytest.raises(RecipeError, match=rf"centralized averages nothing; {key} has no effect"):
        fedloom.check(recipe("centralized", **IDLE[key]))


def test_coverage_chart_counts_what_a_robust_rule_asks_for() -> None:
    assert (
        enough_updates({"faults": {"min_coverage": 2}, "aggregation": {"rule": "median", "min_contributors": 5}}) == 5
    )
    assert enough_updates({"faults": {"min_coverage": 2}, "aggregation": {"rule": "none", "min_contributors": 5}}) == 2
    assert enough_updates({}) == 1


def test_check_plain_recipe_mentions_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fedloom")
    fedloom.check(recipe("fedavg"))
    assert not caplog.records


def test_compare_with_standalone_control_drops_what_it_ignores(tmp_path: Any) -> None:
    defended = recipe("fedavg", aggregation={"rule": "median"}, compression={"uplink": {"kind": "float16"}})
    compared = fedloom.compare(defended, controls=["standalone"], out=tmp_path / "out", progress=False)
    assert [record["arm"] for record in compared.result.records] == ["fedavg", "standalone"]
