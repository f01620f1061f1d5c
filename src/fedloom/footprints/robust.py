"""Robust aggregation rules, applied to each coverage region separately.

Rules that rank updates give every device one vote: the number of examples is the device's own claim and must not buy
influence. Rules that average whole updates (`clipping`, `multi_krum`) use the method's weights.
"""

import math
import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import torch
from annotated_types import Interval
from torch import Tensor

from ..registry import Registry
from ..settings import Count, Positive
from ..tensors import Tensors, combine
from .coverage import ClientUpdate
from .regions import Region, clone_touched, mark_regions, update_regions

Minority = Annotated[float, Interval(ge=0, lt=0.5)]
AtLeastOne = Annotated[float, Interval(ge=1, lt=math.inf)]
LowCoverage = Literal["hold", "clipped"]


class Contributors(NamedTuple):
    """The contributors of a region.

    Parameters
    ----------
    weights : the weight of each in the average.
    groups : the group of similar models that each belongs to.
    """

    weights: Sequence[float]
    groups: Sequence[Hashable]


class Rule(ABC):
    """A robust aggregation rule, which is applied to every coverage region separately.

    Examples
    --------
    >>> @dataclass(frozen=True)
    ... class Midrange(Rule):
    ...     def aggregate(self, old: Tensor, values: Tensor, contributors: Contributors) -> Tensor:
    ...         return (values.amin(0) + values.amax(0)) / 2
    """

    def select(self, weights: Tensors, updates: list[ClientUpdate]) -> list[ClientUpdate]:
        """Drop or clip whole updates before the regions are aggregated. By default all are kept.

        Parameters
        ----------
        weights : the global weights.
        updates : the updates of weight above 0.
        """
        return updates

    @abstractmethod
    def aggregate(self, old: Tensor, values: Tensor, contributors: Contributors) -> Tensor:
        """Aggregate one region.

        Parameters
        ----------
        old : the old entries, [entries] in float64.
        values : the contributors' values, [contributors, entries] in float64.
        contributors : their weights and groups.

        Returns
        -------
        The new entries, [entries].
        """


@dataclass(frozen=True)
class RobustAggregator:
    """An `Aggregate` that applies a rule to every region with enough contributors.

    With fewer contributors an outlier cannot be identified.

    Parameters
    ----------
    rule : the rule.
    low_coverage : what a region with fewer contributors does: "hold" keeps its value bit for bit; "clipped" takes the
        unweighted mean of its updates, each clipped so that its RMS change per entry is at most the median device's in
        the other regions. Without other regions it keeps its value.
    min_contributors : how many contributors are enough.
    """

    rule: Rule
    low_coverage: LowCoverage = "hold"
    min_contributors: Count = 3

    def __call__(self, weights: Tensors, updates: Iterable[ClientUpdate]) -> dict[str, Tensor]:
        selected = self.rule.select(weights, [update for update in updates if update.weight > 0])
        regions = update_regions(weights, selected)
        result = clone_touched(weights, regions)
        sizes = _UpdateSizes(len(selected))
        for region in regions:
            if len(region.contributors) >= self.min_contributors:
                old, values = region.read(weights), region.read_updates(weights, selected)
                sizes.record(region, values - old)
                members = [selected[number] for number in region.contributors]
                contributors = Contributors([one.weight for one in members], [model_group(one) for one in members])
                region.write(result, self.rule.aggregate(old, values, contributors))
        limit = sizes.median() if self.low_coverage == "clipped" else None
        for region in regions:
            if len(region.contributors) < self.min_contributors and limit is not None:
                region.write(result, _clipped_mean(region, weights, selected, limit))
        return result

    def updated_entries(self, weights: Tensors, updates: Sequence[ClientUpdate]) -> dict[str, Tensor]:
        """The regions with enough contributors among the selected updates; with "clipped", then all of them.

        Parameters
        ----------
        weights : the global weights.
        updates : what devices returned.
        """
        selected = self.rule.select(weights, [update for update in updates if update.weight > 0])
        regions = update_regions(weights, selected)
        enough = [region for region in regions if len(region.contributors) >= self.min_contributors]
        return mark_regions(weights, regions if enough and self.low_coverage == "clipped" else enough)


@dataclass(frozen=True)
class Clipping(Rule):
    """Norm clipping (Sun et al., 2019), then the weighted mean.

    Parameters
    ----------
    multiple : the limit, as a multiple of the median update norm in the region.
    norm : the largest norm of each device's whole update, instead; None: `multiple` counts.
    """

    multiple: Positive = 1.0
    norm: Positive | None = None

    def select(self, weights: Tensors, updates: list[ClientUpdate]) -> list[ClientUpdate]:
        return updates if self.norm is None else [_clip_update(weights, update, self.norm) for update in updates]

    def aggregate(self, old: Tensor, values: Tensor, contributors: Contributors) -> Tensor:
        clipped = values if self.norm is not None else clip_to_median(old, values, self.multiple)
        return weighted_mean(clipped, contributors.weights)


@dataclass(frozen=True)
class Median(Rule):
    """The coordinate-wise median (Yin et al., ICML 2018), unweighted."""

    def aggregate(self, old: Tensor, values: Tensor, contributors: Contributors) -> Tensor:
        return coordinate_median(values)


@dataclass(frozen=True)
class TrimmedMean(Rule):
    """The coordinate-wise trimmed mean (Yin et al., ICML 2018), unweighted.

    Parameters
    ----------
    share : the share of the lowest and of the highest values that is left out, rounded up; at least one value is kept.
    """

    share: Minority = 0.2

    def aggregate(self, old: Tensor, values: Tensor, contributors: Contributors) -> Tensor:
        count = len(values)
        cut = min(share_of(self.share, count), (count - 1) // 2)
        return weighted_mean(values.sort(0).values[cut : count - cut], [1.0] * (count - 2 * cut))


@dataclass(frozen=True)
class GeometricMedian(Rule):
    """The point with the least sum of distances to the updates (Pillutla et al., 2022), unweighted.

    Parameters
    ----------
    iterations : the steps of Weiszfeld's algorithm, which starts at the coordinate-wise median.
    """

    iterations: Count = 16

    def aggregate(self, old: Tensor, values: Tensor, contributors: Contributors) -> Tensor:
        point = coordinate_median(values)
        smallest = 1e-9 * max(float((values - point).norm(dim=1).median()), 1e-30)  # no division by zero at an update
        for _ in range(self.iterations):
            gaps = (values - point).norm(dim=1).tolist()
            point = weighted_mean(values, [1 / max(gap, smallest) for gap in gaps])
        return point


@dataclass(frozen=True)
class MultiKrum(Rule):
    """Multi-Krum: drop the devices farthest from their neighbors, then average (Blanchard et al., NeurIPS 2017).

    Devices are compared on the region that all of them cover; without one, no update is used. The mean is weighted.

    Parameters
    ----------
    share : the share of devices to drop, rounded up.
    """

    share: Minority = 0.3

    def select(self, weights: Tensors, updates: list[ClientUpdate]) -> list[ClientUpdate]:
        count = len(updates)
        common = [region for region in update_regions(weights, updates) if len(region.contributors) == count]
        if not common:
            return []
        values = common[0].read_updates(weights, updates)
        dropped = share_of(self.share, count)
        neighbors = max(1, count - dropped - 2)
        scores = [sum(sorted(_squared_distances(values, index))[:neighbors]) for index in range(count)]
        kept = sorted(range(count), key=lambda index: scores[index])[: count - dropped]
        return [updates[index] for index in sorted(kept)]

    def aggregate(self, old: Tensor, values: Tensor, contributors: Contributors) -> Tensor:
        return weighted_mean(values, contributors.weights)


@dataclass(frozen=True)
class NearestMean(Rule):
    """The default rule: drop outliers within each group of similar models, clip, and average, unweighted.

    A group is the devices of one tier; a group with fewer than three contributors is compared with all of them. Without
    groups, an honest tier whose updates differ from the others' would be dropped in every round, would not learn, and
    so would go on to differ. Clipping bounds what a group with a malicious majority can do.

    Parameters
    ----------
    reach : an update is kept if its distance to the coordinate-wise median of its group is at most `reach` times the
        group's median distance.
    multiple : kept updates are clipped to `multiple` times the region's median norm.
    """

    reach: AtLeastOne = 2.0
    multiple: Positive = 2.0

    def aggregate(self, old: Tensor, values: Tensor, contributors: Contributors) -> Tensor:
        kept = self._is_near(values)
        for group in set(contributors.groups):
            members = torch.tensor([other == group for other in contributors.groups])
            if int(members.sum()) >= 3:
                kept[members] = self._is_near(values[members])
        return weighted_mean(clip_to_median(old, values, self.multiple)[kept], [1.0] * int(kept.sum()))

    def _is_near(self, values: Tensor) -> Tensor:
        gaps: Tensor = (values - coordinate_median(values)).norm(dim=1)
        return gaps <= self.reach * gaps.median()


def no_rule() -> None:
    """No robust rule: the coverage mean, as published."""


RULES: Registry[Callable[..., Rule | None]] = Registry(
    "aggregation",
    {
        "none": no_rule,
        "default": NearestMean,
        "clipping": Clipping,
        "median": Median,
        "trimmed_mean": TrimmedMean,
        "geometric_median": GeometricMedian,
        "multi_krum": MultiKrum,
    },
)


def model_group(update: ClientUpdate) -> Hashable:
    """Equal for devices of one tier. The first axis is ignored, since rows of labels may be left out."""
    return frozenset((name, tuple(update.tensors[name].shape[1:])) for name in update.footprint.blocks)


def clip_to_median(old: Tensor, values: Tensor, multiple: float) -> Tensor:
    """Clip updates to `multiple` times the median norm; of an even number, the smaller of the middle two."""
    norms = (values - old).norm(dim=1)
    return clip_norms(old, values, multiple * float(norms.median()))


def clip_norms(old: Tensor, values: Tensor, limit: float) -> Tensor:
    """Clip updates to an L2 norm; shorter updates stay bit for bit."""
    norms = (values - old).norm(dim=1, keepdim=True)
    factors = limit / norms.clamp_min(torch.finfo(norms.dtype).tiny)
    return torch.where(norms > limit, old + (values - old) * factors, values)


def weighted_mean(values: Tensor, weights: Sequence[float]) -> Tensor:
    """Added up in the given order."""
    total, mass = torch.zeros_like(values[0]), 0.0
    for row, weight in zip(values, weights, strict=True):
        total, mass = total + row * weight, mass + weight
    return total / mass


def coordinate_median(values: Tensor) -> Tensor:
    """Of an even number, the mean of the middle two."""
    ranked = values.sort(0).values
    return (ranked[(len(values) - 1) // 2] + ranked[len(values) // 2]) / 2


def share_of(share: float, count: int) -> int:
    """A share of a number, rounded up: 0.2 of 6 is 2."""
    return math.ceil(share * count - 1e-9)


class _UpdateSizes:
    """Each device's RMS change per entry over the regions with enough contributors."""

    def __init__(self, devices: int):
        self.squares, self.entries = [0.0] * devices, [0] * devices

    def record(self, region: Region, changes: Tensor) -> None:
        for contributor, square in zip(region.contributors, changes.square().sum(1).tolist(), strict=True):
            self.squares[contributor] += square
            self.entries[contributor] += len(region)

    def median(self) -> float | None:
        known = zip(self.squares, self.entries, strict=True)
        sizes = [math.sqrt(square / entries) for square, entries in known if entries]
        return statistics.median_low(sizes) if sizes else None


def _clipped_mean(region: Region, weights: Tensors, updates: Sequence[ClientUpdate], limit: float) -> Tensor:
    values = region.read_updates(weights, updates)
    clipped = clip_norms(region.read(weights), values, limit * math.sqrt(len(region)))
    return weighted_mean(clipped, [1.0] * len(clipped))


def _squared_distances(values: Tensor, index: int) -> list[float]:
    """From one row to each of the others."""
    gaps = (values - values[index]).square().sum(1).tolist()
    return [gap for other, gap in enumerate(gaps) if other != index]


def _clip_update(weights: Tensors, update: ClientUpdate, norm: float) -> ClientUpdate:
    old = combine(Tensor.double, update.footprint.read(weights))
    changes = combine(lambda new, before: new.double() - before, {name: update.tensors[name] for name in old}, old)
    length = math.sqrt(math.fsum(float(change.square().sum()) for change in changes.values()))
    if length <= norm:
        return update
    return update._replace(tensors=combine(lambda before, change: before + change * (norm / length), old, changes))
