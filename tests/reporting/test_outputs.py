"""A result as Markdown, CSV and LaTeX, and who wins."""

import csv
import io
from dataclasses import replace

import pytest

from fedloom.evaluation import Row
from fedloom.reporting import Arm, Serving
from fedloom.reporting.outputs import CSV_COLUMNS, as_csv, latex, markdown
from fedloom.reporting.result import Result, Terms, conclude

TERMS = Terms(["large", "small"], {"large": 0.5, "small": 0.5}, "global", 10_000, baseline="other", margin=0.5)


def rows(large: float, small: float) -> list[Row]:
    """Two rounds, the first of which is five points worse."""
    found = [
        Row(number, "server", tier, "", "global", "accuracy", value - 5 * (2 - number))
        for number in (1, 2)
        for tier, value in (("large", large), ("small", small))
    ]
    return found + [Row(number, "", "", "", "", "down", 1e6) for number in (1, 2)]


def arm(name: str, large: float, small: float, seeds: int = 2, carried: bool = True) -> Arm:
    serving = {"large": Serving("large", True), "small": Serving("small" if carried else "large", carried)}
    return Arm(name, serving, [rows(large + seed / 10, small + seed / 10) for seed in range(seeds)])


def result(*arms: Arm) -> Result:
    return conclude(arms, TERMS)


@pytest.fixture
def clear() -> Result:
    return result(arm("this", 80, 60), arm("other", 70, 60.05), arm("a|b_c", 60, 99, carried=False))


def test_only_beyond_noise_there_is_a_winner(clear: Result) -> None:
    assert clear.winners == {"large": "this", "small": None}


def test_who_cannot_be_carried_does_not_win() -> None:
    assert result(arm("this", 80, 60), arm("other", 70, 90, carried=False)).winners == {"large": "this", "small": None}


def test_one_arm_wins_nothing() -> None:
    terms = replace(TERMS, baseline=None)
    assert conclude([arm("this", 80, 60)], terms).winners == {"large": None, "small": None}


def test_markdown(clear: Result) -> None:
    said = markdown(clear)
    head, rule, *lines = said.splitlines()
    assert head == "| arm | large | small | served | MB a round |"
    assert rule == "| --- | ---: | ---: | ---: | ---: |"
    assert lines[0] == "| this | **80.0 ± 0.1** | 60.0 ± 0.1 | 100 % | 1.00 |"
    assert lines[2].startswith("| a\\|b_c | 60.0 ± 0.1 | (60.0 ± 0.1) | 50 %")
    assert "| this | large | 69.5 | 1 [1–1] | 1.00 [1.00–1.00] | – | 2.0 |" in said
    assert all(f"- {line}" in said for line in clear.verdict)


def test_csv_has_numbers_as_they_are(clear: Result) -> None:
    read = list(csv.DictReader(io.StringIO(as_csv(clear))))
    assert tuple(read[0]) == CSV_COLUMNS
    assert [(one["arm"], one["tier"]) for one in read][:3] == [("this", "large"), ("this", "small"), ("other", "large")]
    assert float(read[0]["accuracy_mean"]) == pytest.approx(80.05)
    assert [one["winner"] for one in read] == ["1", "0", "0", "0", "0", "0"]
    assert (read[0]["reached"], read[0]["rounds_to_target"], read[0]["gain"]) == ("1", "1.0", "2.0")
    assert read[5]["target"] == ""


def test_latex_is_balanced_and_escaped(clear: Result) -> None:
    said = latex(clear)
    for name in ("table", "tabular"):
        assert said.count(f"\\begin{{{name}}}") == said.count(f"\\end{{{name}}}") == 2
    assert r"\textbf{80.0 $\pm$ 0.1}" in said
    assert r"a|b\_c" in said and "100 \\%" in said
    tables = [line for line in said.splitlines() if not line.startswith("%")]
    assert "±" not in "".join(tables) and "–" not in "".join(tables)


def test_a_tier_without_devices_is_a_dash() -> None:
    empty = arm("this", 80, 60)
    nobody = replace(empty, runs=[[row for row in run if row.tier != "small"] for run in empty.runs])
    said = markdown(conclude([nobody], replace(TERMS, baseline=None)))
    assert "| this | 80.0 ± 0.1 | – | 100 % |" in said
