"""Pareto fronts of cost and gain, and their hypervolume."""

from collections.abc import Iterable
from itertools import pairwise

CostGain = tuple[float, float]
"""(cost, gain)."""


def pareto_front(points: Iterable[CostGain]) -> list[CostGain]:
    """The points that no other dominates, by cost: none costs no more, gains no less, and differs in one of them."""
    front: list[CostGain] = []
    for point in sorted(points, key=lambda point: (point[0], -point[1])):
        if not front or point[1] > front[-1][1] or point == front[-1]:
            front.append(point)
    return front


def hypervolume(points: Iterable[CostGain], reference: CostGain) -> float:
    """The area dominated by the points, up to the largest cost and down to the smallest gain of `reference`."""
    max_cost, min_gain = reference
    corners = pareto_front(point for point in points if point[0] <= max_cost and point[1] >= min_gain)
    steps = pairwise([*corners, (max_cost, min_gain)])
    return sum((next_cost - cost) * (gain - min_gain) for (cost, gain), (next_cost, _) in steps)
