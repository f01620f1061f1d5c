"""Devices that take part each by its own chance, and how many of each tier are expected to."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from fedloom.fleet import Fleet, draw_cohort, expected_participants, make_nested_tiers


@pytest.fixture
def fleet(tiny_model: Callable[..., Any]) -> Fleet:
    models = [(name, tiny_model("mlp", width=width)) for name, width in (("large", 1.0), ("small", 0.5))]
    return Fleet(make_nested_tiers(models), (0.25, 0.75), 40, seed=1)


def drawn(fleet: Fleet, number: int, participation: float = 0.3) -> list[str]:
    return [one.name for one in draw_cohort(fleet, participation, number, sampling="poisson")]


def test_draw_cohort_poisson_devices_are_independent(fleet: Fleet) -> None:
    rounds = 2000
    cohorts = [set(drawn(fleet, number)) for number in range(1, rounds + 1)]
    spread = math.sqrt(0.3 * 0.7 / rounds)
    names = [device.name for device in fleet.devices(1)]
    assert all(abs(sum(name in one for one in cohorts) / rounds - 0.3) < 4 * spread for name in names)
    both = sum(names[0] in one and names[1] in one for one in cohorts) / rounds
    assert abs(both - 0.09) < 4 * math.sqrt(0.09 * 0.91 / rounds)
    sizes = [len(one) for one in cohorts]
    mean = sum(sizes) / rounds
    assert abs(mean - 12) < 4 * math.sqrt(40 * 0.21 / rounds)
    assert abs(sum((size - mean) ** 2 for size in sizes) / rounds - 40 * 0.21) < 1.2


def test_draw_cohort_poisson_is_reproducible_and_ordered(fleet: Fleet) -> None:
    assert drawn(fleet, 5) == drawn(replace(fleet, assignment="redrawn"), 5) == sorted(drawn(fleet, 5))
    assert drawn(fleet, 5) != drawn(fleet, 6)
    assert drawn(fleet, 5) != drawn(replace(fleet, seed=2), 5)


def test_draw_cohort_poisson_probability_one_takes_every_device(fleet: Fleet) -> None:
    assert len(drawn(fleet, 1, participation=1.0)) == 40
    assert [] in [drawn(fleet, number, participation=0.01) for number in range(1, 20)]


def test_draw_cohort_poisson_takes_only_eligible_devices(fleet: Fleet) -> None:
    able = replace(fleet, eligible_tiers=("small",), holdout_devices=frozenset({20, 21}))
    names = set(drawn(able, 3, participation=1.0))
    assert names == {fleet.name(index) for index in range(10, 40)} - {"20", "21"}


def test_expected_participants_fixed_tiers_counts_devices(fleet: Fleet) -> None:
    assert expected_participants(fleet, 0.5) == {"large": 5.0, "small": 15.0}
    assert expected_participants(replace(fleet, holdout_devices=frozenset({0, 20, 21})), 0.5) == {
        "large": 4.5,
        "small": 14.0,
    }
    assert expected_participants(replace(fleet, eligible_tiers=("small",)), 0.1) == {"small": 3.0}
    assert expected_participants(replace(fleet, shares=(0.01, 0.99)), 1.0) == {"large": 0.0, "small": 40.0}


def test_expected_participants_redrawn_tiers_uses_shares(fleet: Fleet) -> None:
    """By the shares, although no round may have just these."""
    other = replace(fleet, assignment="redrawn", holdout_devices=frozenset(range(8)))
    assert expected_participants(other, 0.5) == {"large": 4.0, "small": 12.0}
    rounds = range(1, 301)
    found = [sum(one.tier == "large" for one in draw_cohort(other, 0.5, n, sampling="poisson")) for n in rounds]
    assert abs(sum(found) / 300 - 4.0) < 4 * math.sqrt(32 * 0.125 * 0.875 / 300)
