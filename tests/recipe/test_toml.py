"""What is written as TOML is read back as it was."""

import math
import tomllib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedloom.recipe.toml import dumps

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
def test_any_document_comes_back(document):
    assert tomllib.loads(dumps(document)) == document


@given(st.dictionaries(words, st.lists(st.dictionaries(words, values, max_size=3), min_size=1, max_size=3), max_size=3))
def test_lists_of_tables_come_back(document):
    assert tomllib.loads(dumps(document)) == document


@pytest.mark.parametrize("number", [math.inf, -math.inf, 1e300, 5e-324, 1e16, 0.1, -0.0, 1e-7])
def test_numbers_come_back_to_the_bit(number):
    back = tomllib.loads(dumps({"number": number}))["number"]
    assert math.copysign(1, back) == math.copysign(1, number)
    assert back == number


def test_what_is_not_a_number_comes_back_as_such():
    assert math.isnan(tomllib.loads(dumps({"number": math.nan}))["number"])


@pytest.mark.parametrize(
    "text", ['"', "\\", "\n", "\r\n", "\t", "\x00", "\x7f", "\x85", "é", "😀", "a = 1\n[b]", "# no"]
)
def test_every_character_comes_back(text):
    assert tomllib.loads(dumps({"text": text, text: 1, "list": [text], "table": {text: text}})) == {
        "text": text, text: 1, "list": [text], "table": {text: text},
    }  # fmt: skip


@pytest.mark.parametrize("number", [np.float64(0.5), np.float64(-np.inf)])
def test_numpys_numbers_are_numbers(number):
    assert tomllib.loads(dumps({"table": {"number": number, "list": [number]}})) == {
        "table": {"number": float(number), "list": [float(number)]}
    }


def test_tuples_are_written_as_lists():
    assert tomllib.loads(dumps({"a": (1, (2, 3)), "b": ({"c": 1}, {"c": 2})})) == {
        "a": [1, [2, 3]], "b": [{"c": 1}, {"c": 2}],
    }  # fmt: skip


def test_a_recipe_reads_like_one_written_by_hand():
    written = dumps(
        {"rounds": 2, "data": {"dataset": "digits", "partition": {"kind": "iid"}}, "tiers": [{"name": "a"}]}
    )
    assert written == (
        'rounds = 2\n\n[data]\ndataset = "digits"\npartition = { kind = "iid" }\n\n[[tiers]]\nname = "a"\n'
    )


@pytest.mark.parametrize("value", [None, object(), {1, 2}, b"bytes"])
def test_what_toml_cannot_say_is_refused(value):
    with pytest.raises(TypeError, match="TOML has no word for"):
        dumps({"key": value})
