"""Tables and lines as people read them."""

import io
from dataclasses import replace

import pytest

from fedloom.api.progress import format_round
from fedloom.cli.compare import left_out_lines, verdict_lines
from fedloom.cli.output import columns, emphasize, wants_json
from fedloom.engines import Refusal
from fedloom.evaluation import Row
from fedloom.fleet import Traffic
from fedloom.reporting import Difference
from fedloom.reporting.tables import ComparisonResult
from fedloom.runs.loop import RoundResult


def test_columns_text_left_and_numbers_right():
    table = columns(("name", "value", "note"), [("a", "1.5", ""), ("longer", "1,200", "x")])
    assert table.splitlines() == ["name    value  note", "a         1.5", "longer  1,200  x"]


def test_columns_accuracies_with_spread_are_numbers():
    table = columns(("arm", "large"), [("a", "71.5 ± 0.3"), ("b", "(9.0)")])
    assert table.splitlines() == ["arm       large", "a    71.5 ± 0.3", "b         (9.0)"]


def test_columns_without_rows_is_the_header():
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
def test_wants_json_reads_the_format_option(arguments, json):
    assert wants_json(arguments) is json


def round_of(rows, down=1_790, up=1_800_000, refused=()):
    return RoundResult(3, 12, Traffic(down, up, asked=4, replied=4 - len(refused)), refused, tuple(rows), 1.25, {})


def accuracy(tier, value, test="global", device=""):
    return Row(3, "server", tier, device, test, "accuracy", value)


def test_format_round_has_metrics_replies_bytes_and_seconds():
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


def test_format_round_compressed_shows_compressed_bytes():
    rows = [
        Row(3, "", "", "", "", name, size)
        for name, size in (("bytes_down_compressed", 450.0), ("bytes_up_compressed", 200_000.0))
    ]
    assert "  1.79 kB down 1.8 MB up (compressed 450 B and 200 kB)  " in format_round("x", round_of(rows))


def test_format_round_without_global_test_shows_local():
    assert "  local test: small  40.0 %  " in format_round("x", round_of([accuracy("small", 40.0, test="local")]))


def test_format_round_after_the_last_round_is_the_last_exchange():
    last = replace(round_of([accuracy("small", 40.0)]), number=13)
    assert format_round("fedhenn", last).startswith("fedhenn  last exchange  small  40.0 %  ")
    assert last.title.startswith("last exchange: ")


def test_format_round_without_evaluation_has_no_metrics():
    assert format_round("x", round_of([])).startswith("x  round  3/12  ")


def test_format_round_refusals_show_count_and_first():
    refused = (Refusal("7", "SHAPE", "weights: w has shape (1,), declared (2,)"),)
    line = format_round("x", round_of([], refused=refused))
    assert "3/4 replies, 1 refused (SHAPE: weights: w has shape (1,), declared (2,))  " in line


def test_format_round_refusals_count_devices_once_and_void_rounds_apart():
    """Six devices whose replies were refused, one of them twice, and what follows from it: not "7 refused"."""
    refused = [Refusal(str(device), "SHAPE", "wrong shape") for device in (0, 1, 2, 0, 3)]
    refused += [Refusal("4", "DROPOUT", "no reply"), Refusal("", "QUORUM", "0 of 6 replied: the round does not count")]
    line = format_round("x", replace(round_of([]), traffic=Traffic(asked=6), refused=tuple(refused)))
    expected = "0/6 replies, 4 refused (SHAPE: wrong shape), 1 missing (DROPOUT: no reply), 0 of 6 replied: the round"
    assert expected in line


def test_format_round_of_personal_models_shows_their_own_test():
    rows = [accuracy("all", 28.9), accuracy("all", 98.0, test="local")]
    result = replace(round_of(rows), test="local")
    assert "  local test: all  98.0 %  " in format_round("ditto", result)
    assert result.metrics == {"all": {"accuracy": 98.0}}


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1_000, "1 kB"),
        (2_500_000, "2.5 MB"),
        (3.2e9, "3.2 GB"),
        (5e12, "5 TB"),
        (999_900, "1 MB"),
    ],
)
def test_format_round_bytes_use_three_digits(count, expected):
    assert f"  {expected} down " in format_round("x", round_of([], down=count))


def result_of(
    statements=(), notes=(), gains=(), finding="heterofl beats the best simple alternative on small devices."
):
    verdict = [*statements, *notes]
    return ComparisonResult([], verdict, finding=finding, gains=list(gains), statements=list(statements))


def gain_of(tier, mean, noise=1.0, beyond=True):
    return Difference(tier, "heterofl", "small-for-all", 70.0 + mean, 70.0, mean, noise, beyond)


@pytest.mark.parametrize("tiers", [1, 3, 9])
def test_verdict_lines_are_at_most_five_and_fit(tiers, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    statements = [f"heterofl beats arm {number} on the average device by 3 points" for number in range(12)]
    gains = [gain_of(f"tier{number}", 3.0) for number in range(tiers)]
    lines = verdict_lines(result_of(statements, gains=gains))
    assert len(lines) <= 5 and max(map(len, lines)) <= 80
    assert lines[0] == "  heterofl beats the best simple alternative on small devices."
    assert lines[1] == "  tier0: +3.0 points against small-for-all (± 1.0, 1 seed): beyond noise"


def test_verdict_lines_always_show_what_failed():
    lines = verdict_lines(
        result_of(["a statement"] * 8, ["fjord failed"], [gain_of(str(number), 1.0) for number in range(8)])
    )
    assert "  fjord failed" in lines


def test_verdict_lines_of_a_loss_within_noise_say_so():
    (_, line) = verdict_lines(result_of(gains=[gain_of("small", -0.4, 1.0, False)]))
    assert line == "  small: -0.4 points against small-for-all (± 1.0, 1 seed): within noise"


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("variables", "bold"),
    [({}, True), ({"NO_COLOR": "1"}, False), ({"NO_COLOR": ""}, True), ({"TERM": "dumb"}, False)],
)
def test_emphasize_respects_no_color(monkeypatch, variables, bold):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.stdout", Terminal())
    assert emphasize("text") == ("\x1b[1mtext\x1b[0m" if bold else "text")


def test_emphasize_elsewhere_than_on_a_terminal_is_plain(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr("sys.stdout", io.StringIO())
    assert emphasize("text") == "text"


def test_left_out_lines_name_all_methods_of_a_reason_together():
    left_out = {"fedavg": "one model", "fedin": "three parts", "ditto": "one model"}
    assert left_out_lines(left_out) == ["fedavg, ditto: one model", "fedin: three parts"]
