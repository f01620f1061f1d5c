"""Tables and lines as people read them."""

import pytest

from fedloom.cli.output import columns, wants_json
from fedloom.cli.progress import format_round
from fedloom.engines import Refusal
from fedloom.evaluation import Row
from fedloom.fleet import Traffic
from fedloom.runs.loop import RoundResult


def test_words_stand_to_the_left_and_numbers_to_the_right():
    table = columns(("name", "value", "note"), [("a", "1.5", ""), ("longer", "1,200", "x")])
    assert table.splitlines() == ["name    value  note", "a         1.5", "longer  1,200  x"]


def test_a_column_of_accuracies_with_spread_and_brackets_is_one_of_numbers():
    table = columns(("arm", "large"), [("a", "71.5 ± 0.3"), ("b", "(9.0)")])
    assert table.splitlines() == ["arm       large", "a    71.5 ± 0.3", "b         (9.0)"]


def test_a_table_without_rows_is_its_header():
    assert columns(("one", "two"), []) == "one  two"


@pytest.mark.parametrize(
    ("arguments", "json"),
    [
        (["run", "--format", "json"], True),
        (["run", "--format=json"], True),
        (["run", "--format", "text", "json"], False),
        (["run", "json"], False),
        ([], False),
    ],
)
def test_who_wants_json(arguments, json):
    assert wants_json(arguments) is json


def round_of(rows, down=1_790, up=1_800_000, refused=()):
    return RoundResult(3, 12, Traffic(down, up, asked=4, replied=4 - len(refused)), refused, tuple(rows), 1.25, {})


def accuracy(tier, value, test="global", device=""):
    return Row(3, "server", tier, device, test, "accuracy", value)


def test_a_line_of_a_round():
    rows = [
        accuracy("large", 71.25),
        accuracy("large", 50.0, test="local"),
        accuracy("large", 99.0, device="1"),
        accuracy("small", 9.0),
        Row(3, "server", "large", "", "global", "loss", 1.0),
    ]
    assert format_round("heterofl", round_of(rows)) == (
        "heterofl  round  3/12  large  71.2 %  small   9.0 %  4/4 replies  1.79 kB down 1.8 MB up  1.2 s"
    )


def test_a_line_says_what_travelled_where_a_codec_made_it_less():
    rows = [
        Row(3, "", "", "", "", name, size)
        for name, size in (("bytes_down_compressed", 450.0), ("bytes_up_compressed", 200_000.0))
    ]
    assert "  1.79 kB down 1.8 MB up (compressed 450 B and 200 kB)  " in format_round("x", round_of(rows))


def test_a_line_without_the_whole_test_set_shows_devices_own():
    assert "  small  40.0 %  " in format_round("x", round_of([accuracy("small", 40.0, test="local")]))


def test_a_line_of_a_round_that_was_not_judged():
    assert format_round("x", round_of([])).startswith("x  round  3/12  ")


def test_a_line_says_what_was_refused():
    refused = (Refusal("7", "SHAPE", "weights: w has shape (1,), declared (2,)"),)
    said = format_round("x", round_of([], refused=refused))
    assert "3/4 replies  1 refused (SHAPE: weights: w has shape (1,), declared (2,))  " in said


@pytest.mark.parametrize(
    ("count", "said"),
    [(0, "0 B"), (999, "999 B"), (1_000, "1 kB"), (2_500_000, "2.5 MB"), (3.2e9, "3.2 GB"), (5e12, "5e+03 GB")],
)
def test_sizes(count, said):
    assert f"  {said} down " in format_round("x", round_of([], down=count))
