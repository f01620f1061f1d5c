"""Arms compared at equal rounds, bytes or seconds."""

import pytest

from fedloom.evaluation import Row
from fedloom.reporting import Arm, ServedModel
from fedloom.reporting.targets import budget_lines, cumulative_cost, limit_to_budget


def rows(per_round: float, rounds: int, seconds: float = 1.0) -> list[Row]:
    built = []
    for number in range(1, rounds + 1):
        built += [
            Row(number, "server", "large", "", "global", "accuracy", 10.0 * number),
            Row(number, "", "", "", "", "bytes_down", per_round / 4),
            Row(number, "", "", "", "", "bytes_up", 3 * per_round / 4),
            Row(number, "", "", "", "", "simulated_seconds", seconds),
        ]
    return built


def arm(name: str, *runs: list[Row]) -> Arm:
    return Arm(name, {"large": ServedModel("large", True)}, runs)


ARMS = [
    arm("ours", rows(8.0, 6), rows(10.0, 6)),
    arm("dear", rows(20.0, 6, 0.5), rows(20.0, 6, 0.5)),
    arm("alone", rows(0.0, 6, 2.0), rows(0.0, 6, 2.0)),
]


def test_cumulative_cost_adds_up_over_rounds() -> None:
    assert cumulative_cost(rows(8.0, 3), "bytes") == {1: 8.0, 2: 16.0, 3: 24.0}
    assert cumulative_cost(rows(8.0, 3, 0.5), "seconds") == {1: 0.5, 2: 1.0, 3: 1.5}
    assert cumulative_cost(rows(8.0, 3), "rounds") == {1: 1, 2: 2, 3: 3}


@pytest.mark.parametrize(
    ("unit", "accuracies"),
    [
        ("rounds", [[60.0, 60.0], [60.0, 60.0], [60.0, 60.0]]),
        ("bytes", [[60.0, 60.0], [20.0, 30.0], [60.0, 60.0]]),  # 48 and 60 bytes, seed by seed
        ("seconds", [[60.0, 60.0], [60.0, 60.0], [30.0, 30.0]]),
    ],
)
def test_limit_to_budget_keeps_last_evaluation_within_budget(unit, accuracies) -> None:
    assert [one.final_values("large", "global") for one in limit_to_budget(ARMS, unit)] == accuracies


def test_limit_to_budget_below_one_round_leaves_no_rows() -> None:
    (_, dear) = limit_to_budget([ARMS[0], arm("dear", rows(100.0, 6), rows(100.0, 6))], "bytes")
    assert dear.runs == [[], []]


def test_budget_lines_state_last_round_of_each_arm() -> None:
    assert budget_lines(ARMS, "bytes")[1] == "at equal bytes: dear counts up to round 2 of 6"


def compressed(per_round: float, rounds: int, share: float) -> list[Row]:
    """The same run with compression to this share of the bytes."""
    plain = rows(per_round, rounds)
    moved = [row for row in plain if row.metric in ("bytes_down", "bytes_up")]
    return plain + [Row(row.round, "", "", "", "", f"{row.metric}_compressed", share * row.value) for row in moved]


def test_cumulative_cost_with_compression_counts_compressed_bytes() -> None:
    assert cumulative_cost(compressed(8.0, 3, 0.25), "bytes") == {1: 2.0, 2: 4.0, 3: 6.0}
    arms = [arm("plain", rows(8.0, 3)), arm("coded", compressed(16.0, 6, 0.25))]  # 24 bytes at 4 a round
    assert budget_lines(arms, "bytes")[1] == "at equal bytes: coded counts up to round 6 of 6"
    assert budget_lines(arms[::-1], "bytes") == [
        "at equal bytes: coded counts up to round 6 of 6", "at equal bytes: plain counts up to round 3 of 3",
    ]  # fmt: skip


def test_limit_to_budget_with_compression_ignores_uncompressed_bytes() -> None:
    arms = [arm("plain", rows(8.0, 3)), arm("coded", compressed(32.0, 6, 0.25)), arm("raw", rows(32.0, 6))]
    assert [one.final_values("large", "global") for one in limit_to_budget(arms[:2], "bytes")] == [[30.0], [30.0]]
    assert limit_to_budget([arms[0], arms[2]], "bytes")[1].runs == [[]]


def test_bytes_per_round_counts_compressed_bytes() -> None:
    assert arm("plain", rows(8.0, 3)).bytes_per_round() == 8.0
    assert arm("coded", compressed(8.0, 3, 0.25), compressed(16.0, 3, 0.25)).bytes_per_round() == 3.0
