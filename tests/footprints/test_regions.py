"""Entries with too few voices stay as they are, all others are as they would have been."""

import torch

from fedloom.footprints import ClientUpdate, coverage_mean, find_footprint
from fedloom.footprints.regions import find_regions, hold_low_coverage


def part(rows: int, value: float, weight: float = 1.0) -> ClientUpdate:
    small, large = {"w": torch.Size([rows, 2])}, {"w": torch.Size([4, 2])}
    return ClientUpdate(find_footprint(small, large), {"w": torch.full((rows, 2), value)}, weight)


def test_every_entry_is_in_the_ring_of_those_who_cover_it() -> None:
    outer, inner = find_regions({"w": torch.Size([4, 2])}, [part(4, 0.0).footprint, part(2, 0.0).footprint])
    assert (outer.contributors, outer.entries["w"].tolist()) == ((0,), [4, 5, 6, 7])
    assert (inner.contributors, inner.entries["w"].tolist()) == ((0, 1), [0, 1, 2, 3])


def test_a_thin_ring_stays_bit_for_bit() -> None:
    whole = {"w": torch.randn(4, 2), "nobody": torch.randn(3)}
    said = [part(4, 3.0), part(2, 1.0), part(2, 2.0, 5.0), part(4, 7.0, 0.0)]  # who has no weight has no voice
    plain = coverage_mean(whole, said)
    for least, moved in ((1, 4), (2, 2), (3, 2), (4, 0)):
        made = hold_low_coverage(coverage_mean, least)(whole, iter(said))
        assert torch.equal(made["w"][:moved], plain["w"][:moved])
        assert torch.equal(made["w"][moved:], whole["w"][moved:])
        assert torch.equal(made["nobody"], whole["nobody"])
