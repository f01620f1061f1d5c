"""fedloom attack: every attack against every rule, with the same malicious devices in all."""

import pytest

from fedloom.engines import ATTACKS

pytestmark = pytest.mark.slow  # tests/engines/test_attacks.py tries every attack with every method

SIX = ("devices = 4", "devices = 10")


@pytest.fixture(scope="module")
def matrix(fedloom_in):
    call, write, _ = fedloom_in
    write(SIX)
    result = call(
        "attack", "my.toml", "--attacks", "scaling,wrong_tier,label_flip", "--rules", "default,median", "--seeds", "2",
        "--share", "0.3", "--format", "json",
    )  # fmt: skip
    assert result.code == 0
    return result


def cell(result, attack, rule):
    (found,) = [one for one in result.data["cells"] if (one["attack"], one["rule"]) == (attack, rule)]
    return found


def test_attack_any_choice_includes_honest_fleet_and_plain_mean(matrix):
    assert list(matrix.data) == ["share", "bad", "test", "cells"]
    assert [(one["attack"], one["rule"]) for one in matrix.data["cells"]] == [
        (attack, rule)
        for attack in ("none", "scaling", "wrong_tier", "label_flip")
        for rule in ("none", "default", "median")
    ]
    assert (matrix.data["share"], matrix.data["test"]) == (0.3, "global")


def test_attack_json_lists_malicious_devices_by_seed(matrix):
    bad = matrix.data["bad"]
    assert list(bad) == ["0", "1"]
    assert all(len(names) == 3 for names in bad.values())
    assert bad["0"] != bad["1"]


def test_attack_accuracy_is_mean_by_share_and_worst_tier(matrix):
    for one in matrix.data["cells"]:
        assert list(one) == ["attack", "rule", "accuracy", "worst_tier", "tiers", "points_lost", "refused"]
        tiers = {name: value["mean"] for name, value in one["tiers"].items()}
        assert list(tiers) == ["large", "small"]
        assert one["accuracy"]["mean"] == pytest.approx(sum(tiers.values()) / 2)
        assert one["worst_tier"]["mean"] <= min(tiers.values()) + 1e-9
    base = cell(matrix, "none", "none")["accuracy"]["mean"]
    assert cell(matrix, "none", "none")["points_lost"] == 0
    lost = cell(matrix, "scaling", "none")
    assert lost["points_lost"] == pytest.approx(base - lost["accuracy"]["mean"])


def test_attack_wrong_tier_is_the_only_refused_attack(matrix):
    refused = {(one["attack"], one["rule"]): one["refused"] for one in matrix.data["cells"]}
    assert {place for place, count in refused.items() if count} == {
        ("wrong_tier", rule) for rule in ("none", "default", "median")
    }
    assert refused["wrong_tier", "none"] == 3 * 2 * 2  # devices, rounds, seeds


def test_attack_none_equals_the_plain_run(matrix, fedloom_in):
    call, _, _ = fedloom_in
    result = call("run", "my.toml", "--format", "json", "--quiet", "--out", "plain", "--set", "rounds=2")
    assert result.code == 0
    from pathlib import Path

    from fedloom.runs.folder import read_rows

    last = {
        row.tier: row.value
        for row in read_rows(Path("plain"))
        if (row.device, row.test, row.metric) == ("", "global", "accuracy")
    }
    again = call("attack", "my.toml", "--attacks", "none", "--rules", "none", "--format", "json", "--quiet")
    assert {tier: value["mean"] for tier, value in cell(again, "none", "none")["tiers"].items()} == last


def test_attack_cell_is_independent_of_other_cells(matrix, fedloom_in):
    call, _, _ = fedloom_in
    alone = call(
        "attack", "my.toml", "--attacks", "scaling", "--rules", "median", "--seeds", "2", "--share", "0.3",
        "--workers", "1", "--format", "json", "--quiet",
    )  # fmt: skip
    assert cell(alone, "scaling", "median") == cell(matrix, "scaling", "median")


def test_attack_text_is_a_table_and_a_verdict(fedloom, write):
    write(SIX)
    result = fedloom("attack", "my.toml", "--attacks", "scaling", "--set", "rounds=1", "--quiet")
    assert result.code == 0
    table, verdict = result.out.split("\n\n")
    header, honest, scaled, legend = table.splitlines()
    assert header.split() == ["attack", "plain", "mean", "default"]
    assert honest.startswith("no attack")
    assert scaled.startswith("scaling")
    assert "20 % of the devices malicious" in legend
    assert [line.split(":")[0].strip() for line in verdict.splitlines()[1:]] == ["plain mean", "default"]


def test_attack_default_runs_all_attacks(fedloom, write, files):
    write(SIX)
    before = files()
    result = fedloom("attack", "my.toml", "--rules", "none", "--set", "rounds=1", "--format", "json", "--quiet")
    assert [one["attack"] for one in result.data["cells"]] == ["none", *ATTACKS]
    assert files() == before  # runs under attack are not saved


def test_attack_rule_settings_come_from_the_recipe(fedloom, write):
    write(SIX)
    common = ("attack", "my.toml", "--attacks", "scaling", "--rules", "trimmed_mean", "--format", "json", "--quiet")
    mild, strict = (
        fedloom(*common, "--set", f"aggregation={{rule='trimmed_mean', share={share}}}") for share in (0.0, 0.45)
    )
    assert cell(mild, "none", "none") == cell(strict, "none", "none")
    assert cell(mild, "scaling", "trimmed_mean") != cell(strict, "scaling", "trimmed_mean")


@pytest.mark.parametrize(
    ("option", "name", "code", "hint"),
    [("--attacks", "scalling", "ATTACK_NAME", "scaling"), ("--rules", "medain", "RULE_NAME", "median")],
)
def test_attack_unknown_name_is_refused_with_hint(option, name, code, hint, fedloom, write):
    write()
    result = fedloom("attack", "my.toml", option, name)
    (issue,) = result.issues
    assert (result.code, issue.code) == (4, code)
    assert hint in issue.hint


@pytest.mark.parametrize(
    ("change", "code", "hint"),
    [
        ("aggregation.rule=medain", "RECIPE_NAME", "median"),
        ("aggregation.low_coverage=holds", "RECIPE_VALUE", ""),
        ("aggregation.min_contributors=0", "RECIPE_RANGE", ""),
        ("aggregation.shar=0.1", "RECIPE_KEY", ""),
        ("aggregation={rule='trimmed_mean', share=0.5}", "RECIPE_RANGE", ""),
        ("aggregation={rule='median', share=0.1}", "RECIPE_KEY", ""),
    ],
)
def test_check_invalid_aggregation_is_refused(change, code, hint, fedloom, write):
    write()
    result = fedloom("check", "my.toml", "--set", change)
    assert result.code == 4
    assert result.issues[0].code == code
    assert hint in result.issues[0].hint


def test_attack_recipe_with_faults_is_refused(fedloom, write):
    done = fedloom("attack", write(("rounds = 2", "rounds = 2\n[faults]\ndropout = 0.5\n")))
    assert (done.code, done.issues[0].code) == (4, "FAULTS_TOO")
