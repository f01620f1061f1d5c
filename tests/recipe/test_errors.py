"""Lines of keys in a recipe, and the text of recipe errors."""

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


def test_find_key_lines_every_key_has_its_line():
    assert find_key_lines(TEXT) == LINES


def test_find_key_lines_empty_text_has_none():
    assert find_key_lines("") == {}
    assert find_key_lines("# key = value\n\n   # [table]\n") == {}


@pytest.mark.parametrize(
    ("key_path", "text"),
    [
        (("rounds",), "rounds"),
        (("tiers", 2, "width"), "tiers[2].width"),
        (("data", "partition", "kind"), "data.partition.kind"),
        ((), ""),
    ],
)
def test_dotted_key_path_is_formatted(key_path, text):
    assert dotted(key_path) == text


def test_suggest_unknown_name_lists_closest_or_all():
    assert suggest("hetrofl", ["heterofl", "fedavg"]) == "did you mean 'heterofl'?"
    assert suggest("zzz", ["heterofl", "fedavg"]) == "known: fedavg, heterofl"


def test_recipe_error_message_has_key_value_and_hint():
    text = "[[tiers]]\nname = 'a'\nwidth = 1.5\n"
    issue = RecipeIssue(("tiers", 0, "width"), "RECIPE_RANGE", "width must be <= 1", "did you mean 0.5?", 1.5)
    error = RecipeError([issue], "my.toml", text)
    assert str(error) == (
        "my.toml:3  tiers[0].width = 1.5\n  error RECIPE_RANGE: width must be <= 1\n  hint: did you mean 0.5?"
    )


@pytest.mark.parametrize(
    ("key_path", "location"),
    [
        (("tiers", 0, "share"), "my.toml:2"),
        (("tiers", 1, "share"), "my.toml:2"),
        (("data", "partition", "kind", "x"), "my.toml:5"),
        (("rounds",), "my.toml"),
        ((), "my.toml"),
    ],
    ids=["missing key of a table", "missing table", "inline table", "missing key", "no place"],
)
def test_recipe_error_missing_key_has_line_of_its_table(key_path, location):
    error = RecipeError(
        [RecipeIssue(key_path, "X", "x")], "my.toml", "seed = 0\n[[tiers]]\nname = 'a'\n[data]\npartition = {}\n"
    )
    assert error.lines()[0].split("  ")[0] == location


@pytest.mark.parametrize(
    ("key_path", "location"),
    [
        (("data",), "my.toml:1"),
        (("data", "devices"), "--set"),
        (("data", "devices", 3), "--set"),
        (("data", "d"), "my.toml:1"),
    ],
)
def test_recipe_error_override_is_located_at_set(key_path, location):
    error = RecipeError([RecipeIssue(key_path, "X", "x")], "my.toml", "[data]\ndevices = 3\n", [("data", "devices")])
    assert error.lines()[0].split("  ")[0] == location


def test_recipe_error_compound_values_are_not_shown():
    error = RecipeError([RecipeIssue(("a",), "X", "x", value=value) for value in ([1], {"b": 1}, (1,), None)])
    assert [line for line in error.lines() if not line.startswith("  ")] == ["recipe  a"] * 4
