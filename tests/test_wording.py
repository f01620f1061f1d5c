"""Numbers in sentences: counts with their noun, zeros without a sign, readable units."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedloom.wording import (
    format_amount,
    format_bytes,
    format_number,
    format_points,
    format_range,
    format_seconds,
    join_words,
    pluralize,
    wrap,
)


@pytest.mark.parametrize(
    ("number", "word", "expected"),
    [(0, "round", "0 rounds"), (1, "round", "1 round"), (1200, "reply", "1,200 replies"), (2, "class", "2 classes")],
)
def test_pluralize_follows_the_number(number: int, word: str, expected: str) -> None:
    assert pluralize(number, word) == expected


def test_format_range_of_equal_ends_is_one_count() -> None:
    assert format_range(100, 100, "example") == "100 examples"
    assert format_range(1, 1, "class") == "1 class"
    assert format_range(90, 1100, "example") == "90 to 1,100 examples"


@given(st.floats(allow_nan=False, allow_infinity=False, width=32), st.booleans())
def test_format_number_zero_has_no_sign(value: float, signed: bool) -> None:
    text = format_number(value, signed=signed)
    assert float(text) == float(f"{value:.1f}")
    assert not re.fullmatch(r"[+-]0\.0", text)
    assert text.startswith("+") == (signed and float(text) > 0)


def test_format_points_small_loss_is_zero() -> None:
    assert format_points(-0.04, signed=True) == "0.0 points"


@given(st.integers(0, 10**16))
def test_format_amount_has_three_digits_and_a_unit(count: int) -> None:
    number, _, unit = format_amount(count).partition(" ")
    scale = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}[unit]
    assert float(number.replace(",", "")) * scale == pytest.approx(count, rel=0.006, abs=0.5)
    assert "e" not in number and (unit in ("", "T") or 1 <= float(number) < 1000)


def test_format_amount_of_a_tiny_net_has_no_leading_zeros() -> None:
    assert format_amount(1180) == "1.18 k"
    assert format_bytes(480_400) == "480 kB"
    assert format_seconds(100) == "0:01:40"


def test_join_words_has_one_and() -> None:
    assert [join_words(list("abc")[:count]) for count in (1, 2, 3)] == ["a", "a and b", "a, b and c"]


def test_wrap_stays_within_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    lines = wrap("a sentence that is longer than the terminal is wide, by far", "  ", "    ").splitlines()
    assert len(lines) == 2 and max(map(len, lines)) <= 50
    assert lines[0].startswith("  a") and lines[1].startswith("    ")
