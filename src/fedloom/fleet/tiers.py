"""Which device belongs to which tier: fixed by index, or redrawn every round (HeteroFL's Fix and Dynamic)."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from ..footprints import Footprint, between, fits
from ..models import Model, Shapes
from ..seeds import generator
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
    eligible: tuple[str, ...] = ()  # tiers that take part in training; empty: all

    @cached_property
    def whole(self) -> Model:
        """The global model: that of the largest tier."""
        return self.largest.model

    @property
    def served(self) -> tuple[Tier, ...]:
        """Tiers whose model is trained, and so judged and kept."""
        return tuple(tier for tier in self.tiers if not self.eligible or tier.name in self.eligible)

    @cached_property
    def largest(self) -> Tier:
        return max(self.tiers, key=lambda tier: parameters(tier.model.shapes()))

    @cached_property
    def smallest(self) -> Tier:
        return min(self.tiers, key=lambda tier: parameters(tier.model.shapes()))

    def device(self, index: int, round_number: int) -> Device:
        tier = self.tiers[self._tier_index(index, round_number)]
        return Device(self.name(index), tier.name, tier.model, tier.footprint)

    def devices(self, round_number: int) -> list[Device]:
        return [self.device(index, round_number) for index in range(self.size)]

    def name(self, index: int) -> str:
        return f"{index:0{len(str(self.size - 1))}d}"  # names sort like numbers

    def pool(self, tier: Tier, share: float = 1.0) -> Device:
        """Simulation alone: one device that holds the data of the first `share` of all devices."""
        held = tuple(self.name(index) for index in range(max(1, int(share * self.size + 0.5))))
        return Device("pool", tier.name, tier.model, tier.footprint, gathers=held)

    def _tier_index(self, index: int, round_number: int) -> int:
        if self.assignment == "redrawn":
            draw = generator(self.seed, "tier", round_number, index)
            return int(draw.choice(len(self.tiers), p=self.shares))
        return self._by_index[index]

    @cached_property
    def _by_index(self) -> tuple[int, ...]:
        """Filled in index order by the shares; what rounding leaves over takes the last tier."""
        filled = [number for number, share in enumerate(self.shares) for _ in range(int(share * self.size + 1e-4))]
        return tuple(filled + [len(self.tiers) - 1] * (self.size - len(filled)))


def parameters(shapes: Shapes) -> int:
    return sum(shape.numel() for shape in shapes.values())


def nested(models: Sequence[tuple[str, Model]]) -> tuple[Tier, ...]:
    """Tiers of one family, each found inside the largest by its shapes."""
    whole = max((model for _, model in models), key=lambda model: parameters(model.shapes()))
    return tuple(Tier(name, model, _footprint(name, model, whole)) for name, model in models)


def _footprint(tier: str, model: Model, whole: Model) -> Footprint:
    small, large = model.shapes(), whole.shapes()
    for name, shape in small.items():
        if name not in large:
            raise BadTier(
                f"tier {tier!r}: {name} is not in the global model, which is that of the tier with most parameters; "
                "every layer of a smaller tier must be one of its"
            )
        if not fits(shape, large[name]):
            raise BadTier(
                f"tier {tier!r}: {name} has shape {tuple(shape)}, which does not lie in {tuple(large[name])} of the "
                "global model; every axis of a smaller tier must be at most as long"
            )
        if name in whole.unsliceable() and shape != large[name]:
            raise BadTier(
                f"tier {tier!r}: {name} stacks several things on one axis (gates, heads), so its first part is not a "
                "smaller layer; give every tier the same size of this layer"
            )
    return between(small, large)
