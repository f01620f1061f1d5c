"""Settings that a method would silently ignore are refused by name, or mentioned."""

import logging
from typing import Any

import pytest

import fedloom
from fedloom.recipe.errors import RecipeError


def recipe(method: str, **sections: Any) -> dict[str, Any]:
    return {
        "rounds": 1,
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
    ],
)
def test_check_harmless_setting_without_effect_is_mentioned(
    document: dict[str, Any], expected: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "fedloom")
    fedloom.check(document)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(expected)


def test_check_plain_recipe_mentions_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fedloom")
    fedloom.check(recipe("fedavg"))
    assert not caplog.records


def test_compare_with_standalone_control_drops_what_it_ignores(tmp_path: Any) -> None:
    defended = recipe("fedavg", aggregation={"rule": "median"}, compression={"uplink": {"kind": "float16"}})
    compared = fedloom.compare(defended, controls=["standalone"], out=tmp_path / "out", progress=False)
    assert [record["arm"] for record in compared.result.records] == ["fedavg", "standalone"]
