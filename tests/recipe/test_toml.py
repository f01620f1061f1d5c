"""TOML that is written reads back as the same document."""

import math
import tomllib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedloom.recipe.load import dumps, dumps_value

words = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
plain = st.one_of(
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    words,
)
values = st.recursive(
    plain, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3), max_leaves=8
)
documents = st.dictionaries(words, values, max_size=5)


@given(documents)
def test_dumps_any_document_round_trips(document):
    assert tomllib.loads(dumps(document)) == document


@given(st.dictionaries(words, st.lists(st.dictionaries(words, values, max_size=3), min_size=1, max_size=3), max_size=3))
def test_dumps_list_of_tables_round_trips(document):
    assert tomllib.loads(dumps(document)) == document


@pytest.mark.parametrize("number", [math.inf, -math.inf, 1e300, 5e-324, 1e16, 0.1, -0.0, 1e-7])
def test_dumps_number_round_trips_exactly(number):
    back = tomllib.loads(dumps({"number": number}))["number"]
    assert math.copysign(1, back) == math.copysign(1, number)
    assert back == number


def test_dumps_nan_round_trips():
    assert math.isnan(tomllib.loads(dumps({"number": math.nan}))["number"])


@pytest.mark.parametrize(
    "text", ['"', "\\", "\n", "\r\n", "\t", "\x00", "\x7f", "\x85", "é", "😀", "a = 1\n[b]", "# no"]
)
def test_dumps_special_character_round_trips(text):
    assert tomllib.loads(dumps({"text": text, text: 1, "list": [text], "table": {text: text}})) == {
        "text": text, text: 1, "list": [text], "table": {text: text},
    }  # fmt: skip


@pytest.mark.parametrize("number", [np.float64(0.5), np.float64(-np.inf)])
def test_dumps_numpy_float_is_a_number(number):
    assert tomllib.loads(dumps({"table": {"number": number, "list": [number]}})) == {
        "table": {"number": float(number), "list": [float(number)]}
    }


def test_dumps_tuple_becomes_a_list():
    assert tomllib.loads(dumps({"a": (1, (2, 3)), "b": ({"c": 1}, {"c": 2})})) == {
        "a": [1, [2, 3]], "b": [{"c": 1}, {"c": 2}],
    }  # fmt: skip


def test_dumps_recipe_is_readable():
    written = dumps(
        {"rounds": 2, "data": {"dataset": "digits", "partition": {"kind": "iid"}}, "tiers": [{"name": "a"}]}
    )
    assert written == (
        'rounds = 2\ntiers = [\n    { name = "a" },\n]\n\n'
        '[data]\ndataset = "digits"\n\n[data.partition]\nkind = "iid"\n'
    )


@pytest.mark.parametrize("value", [object(), {1, 2}, b"bytes", [None]])
def test_dumps_unsupported_type_raises(value):
    with pytest.raises(TypeError, match="not TOML serializable"):
        dumps({"key": value})


def test_dumps_none_drops_the_key():
    document = {"a": None, "b": {"c": None, "d": 1}, "e": [{"f": None, "g": 2}]}
    assert tomllib.loads(dumps(document)) == {"b": {"d": 1}, "e": [{"g": 2}]}


@given(values)
def test_dumps_value_any_value_round_trips_on_one_line(value):
    text = dumps_value(value)
    assert "\n" not in text
    assert tomllib.loads(f"key = {text}") == {"key": value}


def test_dumps_value_none_raises():
    with pytest.raises(TypeError):
        dumps_value(None)
