"""A rule for every ring that has enough votes, and what becomes of those that have not."""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from ..settings import Count
from ..tensors import Tensors
from .coverage import Contribution
from .rings import Ring, copied, rings_of
from .robust import Rule, Voters, kind, mean, shortened

Thin = Literal["hold", "clipped"]


@dataclass(frozen=True)
class Defence:
    """A `Merge`. A ring with fewer than `thin_below` votes, where nobody can be outvoted, either holds, bit for bit; or
    takes the mean of its voters, one vote each, none of whom may change an entry by more, on average, than the median
    device does where there are votes enough. Where there are nowhere enough, it holds."""

    rule: Rule
    thin: Thin = "hold"
    thin_below: Count = 3

    def __call__(self, whole: Tensors, contributions: Iterable[Contribution]) -> dict[str, Tensor]:
        said = self.rule.heard(whole, [one for one in contributions if one.weight > 0])
        found = rings_of(whole, said)
        made = copied(whole, found)
        sizes = _Sizes(len(said))
        for ring in found:
            if len(ring.voters) >= self.thin_below:
                old, told = ring.read(whole), ring.hear(whole, said)
                sizes.note(ring, told - old)
                speak = [said[voter] for voter in ring.voters]
                voters = Voters([one.weight for one in speak], [kind(one) for one in speak])
                ring.write(made, self.rule.merged(old, told, voters))
        usual = sizes.usual() if self.thin == "clipped" else None
        for ring in found:
            if len(ring.voters) < self.thin_below and usual is not None:
                ring.write(made, _no_farther(ring, whole, said, usual))
        return made


class _Sizes:
    """How far each device changes an entry, on average, where there are votes enough."""

    def __init__(self, devices: int):
        self.squares, self.entries = [0.0] * devices, [0] * devices

    def note(self, ring: Ring, updates: Tensor) -> None:
        for voter, square in zip(ring.voters, updates.square().sum(1).tolist(), strict=True):
            self.squares[voter] += square
            self.entries[voter] += len(ring)

    def usual(self) -> float | None:
        known = zip(self.squares, self.entries, strict=True)
        sizes = [math.sqrt(square / entries) for square, entries in known if entries]
        return statistics.median_low(sizes) if sizes else None


def _no_farther(ring: Ring, whole: Tensors, said: Sequence[Contribution], usual: float) -> Tensor:
    told = shortened(ring.read(whole), ring.hear(whole, said), usual * math.sqrt(len(ring)))
    return mean(told, [1.0] * len(told))
