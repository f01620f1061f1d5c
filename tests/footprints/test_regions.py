"""Coverage regions, and entries with too few contributors, which keep their value."""

import torch

from fedloom.footprints import ClientUpdate, coverage_mean, find_footprint
from fedloom.footprints.regions import LowCoverageHold, find_regions


def part(rows: int, value: float, weight: float = 1.0) -> ClientUpdate:
    small, large = {"w": torch.Size([rows, 2])}, {"w": torch.Size([4, 2])}
    return ClientUpdate(find_footprint(small, large), {"w": torch.full((rows, 2), value)}, weight)


def test_find_regions_nested_footprints_group_entries_by_contributors() -> None:
    outer, inner = find_regions({"w": torch.Size([4, 2])}, [part(4, 0.0).footprint, part(2, 0.0).footprint])
    assert (outer.contributors, outer.entries["w"].tolist()) == ((0,), [4, 5, 6, 7])
    assert (inner.contributors, inner.entries["w"].tolist()) == ((0, 1), [0, 1, 2, 3])


def test_hold_low_coverage_few_contributors_stays_bit_for_bit() -> None:
    whole = {"w": torch.randn(4, 2), "uncovered": torch.randn(3)}
    updates = [part(4, 3.0), part(2, 1.0), part(2, 2.0, 5.0), part(4, 7.0, 0.0)]  # an update of weight 0 does not count
    plain = coverage_mean(whole, updates)
    for least, moved in ((1, 4), (2, 2), (3, 2), (4, 0)):
        result = LowCoverageHold(coverage_mean, least)(whole, iter(updates))
        assert torch.equal(result["w"][:moved], plain["w"][:moved])
        assert torch.equal(result["w"][moved:], whole["w"][moved:])
        assert torch.equal(result["uncovered"], whole["uncovered"])
