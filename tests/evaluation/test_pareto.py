"""The front and its hyper-volume: worked by hand, and against brute force."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedloom.evaluation.metrics import CostGain, hypervolume, pareto_front

POINTS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=12)


def betters(one: CostGain, other: CostGain) -> bool:
    return one != other and one[0] <= other[0] and one[1] >= other[1]


@pytest.mark.parametrize(
    ("points", "kept"),
    [
        ([(1, 50), (2, 60), (3, 55)], [(1, 50), (2, 60)]),
        ([(3, 55), (2, 60), (1, 50)], [(1, 50), (2, 60)]),
        ([(1, 50), (1, 40)], [(1, 50)]),
        ([(1, 50), (2, 50)], [(1, 50)]),
        ([(1, 50), (1, 50)], [(1, 50), (1, 50)]),  # neither is strictly better
        ([], []),
    ],
    ids=["by hand", "in any order", "same cost", "same gain", "twins", "nothing"],
)
def test_pareto_front_examples_match_hand_results(points: list[CostGain], kept: list[CostGain]) -> None:
    assert pareto_front(points) == kept


@given(POINTS)
def test_pareto_front_any_points_matches_brute_force(points: list[CostGain]) -> None:
    assert pareto_front(points) == sorted(one for one in points if not any(betters(other, one) for other in points))


@pytest.mark.parametrize(
    ("points", "reference", "area"),
    [
        ([(1, 50), (2, 60), (3, 55)], (3, 0), 110),  # 50 from 1 to 2, 60 from 2 to 3
        ([(1, 50), (2, 60), (3, 55)], (3, 40), 30),
        ([(3, 55)], (3, 0), 0),
        ([(4, 90), (1, 50)], (3, 0), 100),  # beyond the reference counts for nothing
        ([(1, 50), (1, 50)], (2, 0), 50),
        ([], (3, 0), 0),
    ],
)
def test_hypervolume_examples_match_hand_results(points: list[CostGain], reference: CostGain, area: float) -> None:
    assert hypervolume(points, reference) == area


@given(POINTS)
def test_hypervolume_integer_points_counts_unit_squares(points: list[CostGain]) -> None:
    squares = [(cost, gain) for cost in range(9) for gain in range(1, 10)]
    under = sum(any(c <= cost and g >= gain for c, g in points) for cost, gain in squares)
    assert hypervolume(points, (9, 0)) == under


@given(POINTS, st.tuples(st.integers(0, 9), st.integers(0, 9)))
def test_hypervolume_additional_point_never_decreases(points: list[CostGain], more: CostGain) -> None:
    assert hypervolume([*points, more], (9, 0)) >= hypervolume(points, (9, 0))
    assert math.isclose(hypervolume(pareto_front(points), (9, 0)), hypervolume(points, (9, 0)))
