"""The trade of cost for gain: which points are worth having, and how much a set of points is worth as one number."""

from collections.abc import Iterable
from itertools import pairwise

Point = tuple[float, float]
"""(cost, gain)."""


def pareto_front(points: Iterable[Point]) -> list[Point]:
    """Those that no other point betters: costs no more and gains no less, one of the two strictly. By cost."""
    kept: list[Point] = []
    for point in sorted(points, key=lambda one: (one[0], -one[1])):
        if not kept or point[1] > kept[-1][1] or point == kept[-1]:
            kept.append(point)
    return kept


def hypervolume(points: Iterable[Point], reference: Point) -> float:
    """The area of all that is no better than one of the points, up to the largest cost and down to the least gain."""
    most, least = reference
    corners = pareto_front(point for point in points if point[0] <= most and point[1] >= least)
    steps = pairwise([*corners, (most, least)])
    return sum((after - cost) * (gain - least) for (cost, gain), (after, _) in steps)
