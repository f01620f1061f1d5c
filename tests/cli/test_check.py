"""fedloom check: is a recipe valid? Nothing is run and nothing written."""

import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECIPES = sorted(one for one in (ROOT / "recipes").rglob("*.toml") if one.parent.name != "ledger")  # lists


def test_check_good_recipes_are_ok(fedloom, write, files):
    write()
    write(('"digits"', '"cifar10"'), to="other.toml")
    before = files()
    result = fedloom("check", "my.toml", "other.toml")
    assert (result.code, result.out, result.err) == (0, "my.toml  ok\nother.toml  ok\n", "")
    assert files() == before


def test_check_json_has_an_object_per_recipe(fedloom, write):
    write()
    write(to="other.toml")
    result = fedloom("check", "my.toml", "other.toml", "--format", "json")
    assert (result.code, result.err) == (0, "")
    assert result.data == [{"recipe": "my.toml", "problems": []}, {"recipe": "other.toml", "problems": []}]


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (("rounds = 2", "rounds = 0"), "RECIPE_RANGE"),
        (("devices = 4", "devces = 4"), "RECIPE_KEY"),
        (('"heterofl"', '"fedavg"'), "METHOD_REFUSES"),
        (("width = 0.5", "width = 0.5\nhidden = [8, 1]"), "TIER_SHAPE"),
        (("devices = 4", "devices = 4\npartition = { kind = 'sorted_shards', shards_per_device = 0 }"), "RECIPE_VALUE"),
    ],
    ids=["words", "keys", "method", "tiers", "partition"],
)
def test_check_bad_recipe_is_refused(change, code, fedloom, write, files):
    write(change)
    before = files()
    result = fedloom("check", "my.toml")
    assert (result.code, result.out) == (4, "")
    assert [one.code for one in result.issues] == [code]
    assert result.issues[0].where.startswith("my.toml:")
    assert "BUG" not in result.err
    as_json = fedloom("check", "my.toml", "--format", "json")
    assert (as_json.code, as_json.failure["error_code"]) == (4, code)
    assert files() == before


def test_check_two_bad_recipes_are_both_reported(fedloom, write):
    write(("rounds = 2", "rounds = 0"), to="first.toml")
    write(to="second.toml")
    write(('"heterofl"', '"fedavg"'), to="third.toml")
    result = fedloom("check", "first.toml", "second.toml", "third.toml", "fourth.toml")
    assert result.code == 4
    assert result.out == "second.toml  ok\n"
    assert [(one.where.partition(":")[0], one.code) for one in result.issues] == [
        ("first.toml", "RECIPE_RANGE"),
        ("third.toml", "METHOD_REFUSES"),
        ("fourth.toml", "FILE_MISSING"),
    ]


def test_check_missing_data_does_not_hide_other_recipes(fedloom, write):
    write(('"digits"', '"npz"\nfile = "mine.npz"'), to="first.toml")
    write(("rounds = 2", "rounds = 0"), to="second.toml")
    result = fedloom("check", "first.toml", "second.toml")
    assert result.code == 4
    assert "DATA_MISSING" in result.err
    assert "RECIPE_RANGE" in result.err


def test_check_start_model_is_validated(fedloom, write):
    write(("[method]", "[start]\nfrom = 'nothing.safetensors'\n\n[method]"))
    result = fedloom("check", "my.toml")
    assert result.code == 4
    assert [one.code for one in result.issues] == ["FILE_MISSING"]


def test_check_set_applies_to_every_recipe(fedloom, write):
    write()
    write(to="other.toml")
    result = fedloom("check", "my.toml", "other.toml", "--set", "rounds=0")
    assert result.code == 4
    assert [(one.where, one.code) for one in result.issues] == [("--set", "RECIPE_RANGE")] * 2


def variants(recipe):
    """The --set options of the commands in a recipe's opening comment; a backslash continues a line."""
    opening = re.match(r"(#.*\n)*", recipe.read_text("utf-8"))[0]
    lines = opening.replace("\\\n#", "").splitlines()
    return [shlex.split(line[line.index("--set") :]) for line in lines if re.search(r":\s+--set", line)]


def slow_if_full_size(recipe):
    """Some of the papers' recipes, and of the reduced ones, name dozens of variants."""
    return pytest.param(recipe, marks=pytest.mark.slow) if recipe.parent.name in ("papers", "reduced") else recipe


@pytest.mark.parametrize("recipe", [slow_if_full_size(one) for one in RECIPES], ids=lambda recipe: recipe.stem)
def test_check_project_recipes_and_their_variants_are_ok(recipe, fedloom):
    for sets in ([], *variants(recipe)):
        result = fedloom("check", recipe, *sets)
        # a variant may leave settings of the recipe's own method without effect, which is said
        others = [line for line in result.err.splitlines() if not (sets and "has no effect here" in line)]
        assert (result.code, others) == (0, []), sets


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_project_recipe_commands_name_their_own_file(recipe):
    named = re.findall(r"fedloom (?:deploy )?\w+ (\S+\.toml)", recipe.read_text("utf-8"))
    assert named and set(named) == {recipe.relative_to(ROOT).as_posix()}


def test_project_recipe_variants_are_found():
    assert sum(len(variants(recipe)) for recipe in RECIPES) > 50


def test_check_bad_arm_is_refused(fedloom, write, tmp_path):
    write()
    text = (tmp_path / "my.toml").read_text() + "\n[compare.arms]\nother = [\"method={name='fedhenn_'}\"]\n"
    (tmp_path / "my.toml").write_text(text)
    result = fedloom("check", "my.toml")
    assert result.code == 4
    assert "compare.arms.other" in result.err
