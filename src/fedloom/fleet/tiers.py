"""Which device belongs to which tier: fixed by index, or redrawn every round (HeteroFL's Fix and Dynamic).

What only some tiers hold: where none of them is heard, nothing can be learned.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from ..footprints import find_footprint, shape_fits
from ..footprints.regions import find_regions
from ..models import Model, Shapes
from ..seeds import TIER, generator
from .device import Device, Tier

Assignment = Literal["fixed", "redrawn"]


class BadTier(ValueError):  # noqa: N818 - named for what is wrong
    """A tier whose model does not lie inside the global one."""


@dataclass(frozen=True)
class Fleet:
    """All devices, without one object for each: a fleet of ten thousand costs what its cohort costs."""

    tiers: tuple[Tier, ...]
    shares: tuple[float, ...]
    size: int
    seed: int
    assignment: Assignment = "fixed"
    eligible_tiers: tuple[str, ...] = ()  # tiers that take part in training; empty: all
    holdout_devices: frozenset[int] = frozenset()  # devices, by index, that are judged but never train
    device_tiers: tuple[str, ...] = ()  # the tier of every device where that is fixed but not by shares

    @cached_property
    def global_model(self) -> Model:
        """The global model: that of the largest tier that takes part."""
        return self.largest.model

    @property
    def active_tiers(self) -> tuple[Tier, ...]:
        """Tiers whose model is trained, and so judged and kept."""
        return tuple(tier for tier in self.tiers if not self.eligible_tiers or tier.name in self.eligible_tiers)

    @cached_property
    def largest(self) -> Tier:
        return max(self.active_tiers, key=lambda tier: count_parameters(tier.model.shapes()))

    @cached_property
    def smallest(self) -> Tier:
        return min(self.active_tiers, key=lambda tier: count_parameters(tier.model.shapes()))

    def restrict_tiers(self, names: Sequence[str]) -> "Fleet":
        """The same devices, of which only these tiers take part; the global model is the largest of theirs."""
        models = [(tier.name, tier.model) for tier in self.tiers]
        return replace(self, tiers=make_tiers(models, names), eligible_tiers=tuple(names))

    def eligible_indices(self, round_number: int) -> Sequence[int]:
        """By index, the devices that may take part in a round."""
        everybody: Sequence[int] = range(self.size)
        if self.holdout_devices:
            everybody = [i for i in everybody if i not in self.holdout_devices]
        if self.eligible_tiers:
            everybody = [i for i in everybody if self._tier(i, round_number).name in self.eligible_tiers]
        return everybody

    def eligible_devices(self, round_number: int) -> list[Device]:
        """All devices that may take part in a round."""
        return [self.device(index, round_number) for index in self.eligible_indices(round_number)]

    def device(self, index: int, round_number: int) -> Device:
        tier = self._tier(index, round_number)
        return Device(self.name(index), tier.name, tier.model, tier.footprint)

    def devices(self, round_number: int) -> list[Device]:
        return [self.device(index, round_number) for index in range(self.size)]

    def name(self, index: int) -> str:
        return device_name(index, self.size)

    def pooled_device(self, tier: Tier, share: float = 1.0) -> Device:
        """Simulation alone: one device that holds the data of the first `share` of all devices that may train."""
        known = (
            [index for index in range(self.size) if index not in self.holdout_devices]
            if self.holdout_devices
            else range(self.size)
        )
        held = tuple(self.name(index) for index in known[: max(1, int(share * len(known) + 0.5))])
        return Device("pool", tier.name, tier.model, tier.footprint, pooled_from=held)

    def evaluation_device(self, tier: Tier) -> Device:
        """The server, when it puts the test set to a tier's model."""
        return Device("examiner", tier.name, tier.model, tier.footprint, is_server=True)

    def _tier(self, index: int, round_number: int) -> Tier:
        return self.tiers[self._tier_index(index, round_number)]

    def _tier_index(self, index: int, round_number: int) -> int:
        if self.assignment == "redrawn":
            draw = generator(self.seed, TIER, round_number, index)
            return int(draw.choice(len(self.tiers), p=self.shares))
        return self._by_index[index]

    @cached_property
    def _by_index(self) -> tuple[int, ...]:
        """Filled in index order by the shares; what rounding leaves over takes the last tier. Unless it is given."""
        if self.device_tiers:
            names = [tier.name for tier in self.tiers]
            return tuple(names.index(name) for name in self.device_tiers)
        filled = [number for number, share in enumerate(self.shares) for _ in range(int(share * self.size + 1e-4))]
        return tuple(filled + [len(self.tiers) - 1] * (self.size - len(filled)))


def device_name(index: int, size: int) -> str:
    """Of a device in a fleet of this size: names sort like numbers."""
    return f"{index:0{len(str(size - 1))}d}"


def count_parameters(shapes: Shapes) -> int:
    return sum(shape.numel() for shape in shapes.values())


def make_tiers(models: Sequence[tuple[str, Model]], eligible: Sequence[str] = ()) -> tuple[Tier, ...]:
    """Tiers of any models, each found, as far as it is there, in the largest of those that take part."""
    taking_part = [model for name, model in models if not eligible or name in eligible]
    whole = max(taking_part, key=lambda model: count_parameters(model.shapes())).shapes()
    return tuple(Tier(name, model, find_footprint(model.shapes(), whole)) for name, model in models)


def make_nested_tiers(models: Sequence[tuple[str, Model]]) -> tuple[Tier, ...]:
    """Tiers of one family, each of which lies whole inside the largest."""
    tiers = make_tiers(models)
    problem = find_nesting_problem(Fleet(tiers, (1.0,) * len(tiers), len(tiers), 0))
    if problem:
        raise BadTier(problem)
    return tiers


def find_nesting_problem(fleet: Fleet) -> str | None:
    """Why the models of the tiers that take part are not all parts of one."""
    return next(
        filter(None, (_outside(tier.name, tier.model, fleet.global_model) for tier in fleet.active_tiers)), None
    )


def _outside(tier: str, model: Model, whole: Model) -> str | None:
    small, large = model.shapes(), whole.shapes()
    for name, shape in small.items():
        if name not in large:
            return (
                f"tier {tier!r}: {name} is not in the global model, which is that of the tier with most parameters; "
                "every layer of a smaller tier must be one of its"
            )
        if not shape_fits(shape, large[name]):
            return (
                f"tier {tier!r}: {name} has shape {tuple(shape)}, which does not lie in {tuple(large[name])} of the "
                "global model; every axis of a smaller tier must be at most as long"
            )
        if name in whole.unsliceable() and shape != large[name]:
            return (
                f"tier {tier!r}: {name} stacks several things on one axis (gates, heads), so its first part is not a "
                "smaller layer; give every tier the same size of this layer"
            )
    return None


TierRegion = tuple[str, ...]
"""The tiers that hold it, and nobody else does."""


def tier_regions(fleet: Fleet) -> list[TierRegion]:
    """For every part of the models the tiers that share it. A tier with weights outside the global model has a ring of
    its own."""
    tiers = fleet.active_tiers
    held = {region.contributors for region in find_regions(fleet.global_model.shapes(), [tier.footprint for tier in tiers])}
    held |= {(n,) for n, tier in enumerate(tiers) if tier.model.shapes().keys() - tier.footprint.blocks.keys()}
    return [tuple(tiers[n].name for n in holders) for holders in sorted(held)]


def region_name(region: TierRegion) -> str:
    return "+".join(region)
