"""Rules that a few bad devices cannot bend. Each works ring by ring, on what its voters say about its entries.

Where a rule ranks what devices say, every device has one vote: the number of examples is the device's own word, and a
word must not buy votes. Where a rule averages whole contributions (`clipping`, `multi_krum`) weights count as given.

A rule for every ring that has enough votes, and what becomes of those that have not.
"""

import math
import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import torch
from annotated_types import Interval
from torch import Tensor

from ..settings import Count, Positive
from ..tensors import Tensors, combine
from .coverage import ClientUpdate
from .regions import Region, copied, regions_of

Minority = Annotated[float, Interval(ge=0, lt=0.5)]
AtLeastOne = Annotated[float, Interval(ge=1, lt=math.inf)]


class Voters(NamedTuple):
    """Those who have a vote on a ring: how much the method lets each count, and of which kind it is."""

    weights: Sequence[float]
    kinds: Sequence[Hashable]


def kind(one: ClientUpdate) -> Hashable:
    """Devices of one tier cover parts of the same sizes. First axes do not count: labels' rows may be missing."""
    return frozenset((name, tuple(one.tensors[name].shape[1:])) for name in one.footprint.blocks)


class Rule(ABC):
    def heard(self, whole: Tensors, said: list[ClientUpdate]) -> list[ClientUpdate]:
        """What is listened to at all, before it is looked at ring by ring."""
        return said

    @abstractmethod
    def merged(self, old: Tensor, told: Tensor, voters: Voters) -> Tensor:
        """(a ring's entries, [voters, entries], who they are) -> the ring's new entries; all in float64."""


@dataclass(frozen=True)
class Clipping(Rule):
    """Nobody pulls harder than the others: a longer update is shortened, then the mean is taken, weighted as given.

    The length allowed is `multiple` times the median voter's on the ring. A fixed `norm` instead holds for a device's
    whole update, on all that it covers."""

    multiple: Positive = 1.0
    norm: Positive | None = None

    def heard(self, whole: Tensors, said: list[ClientUpdate]) -> list[ClientUpdate]:
        return said if self.norm is None else [_shortened(whole, one, self.norm) for one in said]

    def merged(self, old: Tensor, told: Tensor, voters: Voters) -> Tensor:
        return mean(told if self.norm is not None else clipped(old, told, self.multiple), voters.weights)


@dataclass(frozen=True)
class Median(Rule):
    """Entry by entry the voter in the middle; of an even number, half-way between the two. One device, one vote."""

    def merged(self, old: Tensor, told: Tensor, voters: Voters) -> Tensor:
        return middle(told)


@dataclass(frozen=True)
class TrimmedMean(Rule):
    """Entry by entry without the lowest and the highest `share` of the voters, rounded up, as long as one is left.
    One device, one vote."""

    share: Minority = 0.2

    def merged(self, old: Tensor, told: Tensor, voters: Voters) -> Tensor:
        votes = len(told)
        cut = min(portion(self.share, votes), (votes - 1) // 2)
        return mean(told.sort(0).values[cut : votes - cut], [1.0] * (votes - 2 * cut))


@dataclass(frozen=True)
class GeometricMedian(Rule):
    """The point with the least sum of distances to what the voters say on the ring: Weiszfeld's steps, so many, from
    the coordinate median on. One device, one vote."""

    iterations: Count = 16

    def merged(self, old: Tensor, told: Tensor, voters: Voters) -> Tensor:
        at = middle(told)
        nearest = 1e-9 * max(float((told - at).norm(dim=1).median()), 1e-30)  # who sits on a voter stays there
        for _ in range(self.iterations):
            at = mean(told, [1 / max(gap, nearest) for gap in (told - at).norm(dim=1).tolist()])
        return at


@dataclass(frozen=True)
class MultiKrum(Rule):
    """Leave out the `share` of devices, rounded up, that lie farthest from their nearest fellows, then take the mean,
    weighted as given. They are compared on the ring that is common to all; where there is none, nothing is heard."""

    share: Minority = 0.3

    def heard(self, whole: Tensors, said: list[ClientUpdate]) -> list[ClientUpdate]:
        common = [region for region in regions_of(whole, said) if len(region.voters) == len(said)]
        if not common:
            return []
        told = common[0].hear(whole, said)
        bad = portion(self.share, len(said))
        near = max(1, len(said) - bad - 2)
        scores = [sum(sorted(_gaps(told, one))[:near]) for one in range(len(said))]
        kept = sorted(range(len(said)), key=lambda one: scores[one])[: len(said) - bad]
        return [said[one] for one in sorted(kept)]

    def merged(self, old: Tensor, told: Tensor, voters: Voters) -> Tensor:
        return mean(told, voters.weights)


@dataclass(frozen=True)
class NearestMean(Rule):
    """The default defence: on each ring voters are heard who lie no farther from the coordinate median of their own
    kind than `reach` times the median voter of it; what they say is clipped to `multiple` times the median length on
    the ring and averaged. A kind with fewer than three voters there is held against all.

    Devices of one tier are of one kind. Against all, an honest tier whose updates differ from the others' would not be
    heard on the very ring it lives on, would not learn, and so would go on to differ. Who is heard is clipped, so that
    even a kind with a bad majority moves a ring little farther than honest devices do. One device, one vote."""

    reach: AtLeastOne = 2.0
    multiple: Positive = 2.0

    def merged(self, old: Tensor, told: Tensor, voters: Voters) -> Tensor:
        near = self._near(told)
        for alike in set(voters.kinds):
            own = torch.tensor([one == alike for one in voters.kinds])
            if int(own.sum()) >= 3:
                near[own] = self._near(told[own])
        return mean(clipped(old, told, self.multiple)[near], [1.0] * int(near.sum()))

    def _near(self, told: Tensor) -> Tensor:
        gaps: Tensor = (told - middle(told)).norm(dim=1)
        return gaps <= self.reach * gaps.median()


def no_rule() -> None:
    """The mean over those who cover an entry, as the papers have it."""


RULES: Mapping[str, Callable[..., Rule | None]] = {
    "none": no_rule,
    "default": NearestMean,
    "clipping": Clipping,
    "median": Median,
    "trimmed_mean": TrimmedMean,
    "geometric_median": GeometricMedian,
    "multi_krum": MultiKrum,
}


def clipped(old: Tensor, told: Tensor, multiple: float) -> Tensor:
    """Updates no longer than so many times the median voter's; of an even number, the shorter of the two."""
    lengths = (told - old).norm(dim=1)
    return shortened(old, told, multiple * float(lengths.median()))


def shortened(old: Tensor, told: Tensor, limit: float) -> Tensor:
    """Updates no longer than this; those that are not longer stay to the bit."""
    lengths = (told - old).norm(dim=1, keepdim=True)
    factors = limit / lengths.clamp_min(torch.finfo(lengths.dtype).tiny)
    return torch.where(lengths > limit, old + (told - old) * factors, told)


def mean(told: Tensor, weights: Sequence[float]) -> Tensor:
    """The weighted mean, added up in the order given."""
    total, mass = torch.zeros_like(told[0]), 0.0
    for row, weight in zip(told, weights, strict=True):
        total, mass = total + row * weight, mass + weight
    return total / mass


def middle(told: Tensor) -> Tensor:
    ranked = told.sort(0).values
    return (ranked[(len(told) - 1) // 2] + ranked[len(told) // 2]) / 2


def portion(share: float, votes: int) -> int:
    """So many of the votes, rounded up: 0.2 of 6 are 2."""
    return math.ceil(share * votes - 1e-9)


def _gaps(told: Tensor, one: int) -> list[float]:
    """Squared distances to the others."""
    gaps = (told - told[one]).square().sum(1).tolist()
    return [gap for other, gap in enumerate(gaps) if other != one]


def _shortened(whole: Tensors, one: ClientUpdate, norm: float) -> ClientUpdate:
    old = combine(Tensor.double, one.footprint.read(whole))
    updates = combine(lambda new, before: new.double() - before, {name: one.tensors[name] for name in old}, old)
    length = math.sqrt(math.fsum(float(update.square().sum()) for update in updates.values()))
    if length <= norm:
        return one
    return one._replace(tensors=combine(lambda before, update: before + update * (norm / length), old, updates))


Thin = Literal["hold", "clipped"]


@dataclass(frozen=True)
class RobustAggregator:
    """A `Aggregate`. A ring with fewer than `min_contributors` votes, where nobody can be outvoted, either holds, bit for bit; or
    takes the mean of its voters, one vote each, none of whom may change an entry by more, on average, than the median
    device does where there are votes enough. Where there are nowhere enough, it holds."""

    rule: Rule
    thin: Thin = "hold"
    min_contributors: Count = 3

    def __call__(self, whole: Tensors, contributions: Iterable[ClientUpdate]) -> dict[str, Tensor]:
        said = self.rule.heard(whole, [one for one in contributions if one.weight > 0])
        found = regions_of(whole, said)
        made = copied(whole, found)
        sizes = _Sizes(len(said))
        for region in found:
            if len(region.voters) >= self.min_contributors:
                old, told = region.read(whole), region.hear(whole, said)
                sizes.note(region, told - old)
                speak = [said[voter] for voter in region.voters]
                voters = Voters([one.weight for one in speak], [kind(one) for one in speak])
                region.write(made, self.rule.merged(old, told, voters))
        usual = sizes.usual() if self.thin == "clipped" else None
        for region in found:
            if len(region.voters) < self.min_contributors and usual is not None:
                region.write(made, _no_farther(region, whole, said, usual))
        return made


class _Sizes:
    """How far each device changes an entry, on average, where there are votes enough."""

    def __init__(self, devices: int):
        self.squares, self.entries = [0.0] * devices, [0] * devices

    def note(self, region: Region, updates: Tensor) -> None:
        for voter, square in zip(region.voters, updates.square().sum(1).tolist(), strict=True):
            self.squares[voter] += square
            self.entries[voter] += len(region)

    def usual(self) -> float | None:
        known = zip(self.squares, self.entries, strict=True)
        sizes = [math.sqrt(square / entries) for square, entries in known if entries]
        return statistics.median_low(sizes) if sizes else None


def _no_farther(region: Region, whole: Tensors, said: Sequence[ClientUpdate], usual: float) -> Tensor:
    told = shortened(region.read(whole), region.hear(whole, said), usual * math.sqrt(len(region)))
    return mean(told, [1.0] * len(told))
