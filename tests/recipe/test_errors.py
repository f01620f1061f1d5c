"""Where a key stands in a recipe, and how a problem is said."""

import pytest

from fedloom.recipe.errors import RecipeError, RecipeIssue, dotted, find_key_lines, suggest

TEXT = """\
# a comment, with key = value
seed = 0
training.epochs = 2
"quoted" = 1

[data]  # a comment behind a header
dataset = "digits"  # and one behind a value
# devices = 9
devices = 4
partition = { kind = "iid" }

[model]
hidden = [
    2,
    4,
]
  normalization = "group"

[[tiers]]
name = "large"
width = 1.0

[[tiers]]
name = "small"

  [[ tiers ]]
  name = "tiny"

[evaluation.statistics]
query = "pooled"

[[deep.list]]
key = 1
[[deep.list]]
key = 2
"""

LINES = {
    ("seed",): 2,
    ("training", "epochs"): 3,
    ("quoted",): 4,
    ("data",): 6,
    ("data", "dataset"): 7,
    ("data", "devices"): 9,
    ("data", "partition"): 10,
    ("model",): 12,
    ("model", "hidden"): 13,
    ("model", "normalization"): 17,
    ("tiers",): 19,
    ("tiers", 0): 19,
    ("tiers", 0, "name"): 20,
    ("tiers", 0, "width"): 21,
    ("tiers", 1): 23,
    ("tiers", 1, "name"): 24,
    ("tiers", 2): 26,
    ("tiers", 2, "name"): 27,
    ("evaluation", "statistics"): 29,
    ("evaluation", "statistics", "query"): 30,
    ("deep", "list"): 32,
    ("deep", "list", 0): 32,
    ("deep", "list", 0, "key"): 33,
    ("deep", "list", 1): 34,
    ("deep", "list", 1, "key"): 35,
}


def test_every_key_has_its_line():
    assert find_key_lines(TEXT) == LINES


def test_nothing_has_no_lines():
    assert find_key_lines("") == {}
    assert find_key_lines("# key = value\n\n   # [table]\n") == {}


@pytest.mark.parametrize(
    ("place", "said"),
    [
        (("rounds",), "rounds"),
        (("tiers", 2, "width"), "tiers[2].width"),
        (("data", "partition", "kind"), "data.partition.kind"),
        ((), ""),
    ],
)
def test_a_place_is_spelled_as_it_would_be_written(place, said):
    assert dotted(place) == said


def test_the_nearest_name_or_else_all_of_them():
    assert suggest("hetrofl", ["heterofl", "fedavg"]) == "did you mean 'heterofl'?"
    assert suggest("zzz", ["heterofl", "fedavg"]) == "known: fedavg, heterofl"


def test_a_problem_is_said_with_its_place_value_and_hint():
    text = "[[tiers]]\nname = 'a'\nwidth = 1.5\n"
    problem = RecipeIssue(("tiers", 0, "width"), "RECIPE_RANGE", "width must be <= 1", "did you mean 0.5?", 1.5)
    error = RecipeError([problem], "my.toml", text)
    assert str(error) == (
        "my.toml:3  tiers[0].width = 1.5\n  error RECIPE_RANGE: width must be <= 1\n  hint: did you mean 0.5?"
    )


@pytest.mark.parametrize(
    ("place", "where"),
    [
        (("tiers", 0, "share"), "my.toml:2"),
        (("tiers", 1, "share"), "my.toml:2"),
        (("data", "partition", "kind", "x"), "my.toml:5"),
        (("rounds",), "my.toml"),
        ((), "my.toml"),
    ],
    ids=["missing key of a table", "missing table", "inline table", "missing key", "no place"],
)
def test_what_has_no_line_has_that_of_what_it_is_in(place, where):
    error = RecipeError(
        [RecipeIssue(place, "X", "x")], "my.toml", "seed = 0\n[[tiers]]\nname = 'a'\n[data]\npartition = {}\n"
    )
    assert error.lines()[0].split("  ")[0] == where


@pytest.mark.parametrize(
    ("place", "where"),
    [
        (("data",), "my.toml:1"),
        (("data", "devices"), "--set"),
        (("data", "devices", 3), "--set"),
        (("data", "d"), "my.toml:1"),
    ],
)
def test_what_was_set_on_the_command_line_has_no_line(place, where):
    error = RecipeError([RecipeIssue(place, "X", "x")], "my.toml", "[data]\ndevices = 3\n", [("data", "devices")])
    assert error.lines()[0].split("  ")[0] == where


def test_long_values_are_not_repeated():
    error = RecipeError([RecipeIssue(("a",), "X", "x", value=value) for value in ([1], {"b": 1}, (1,), None)])
    assert [line for line in error.lines() if not line.startswith("  ")] == ["recipe  a"] * 4
