"""The fleet: tiers of devices, assigned once or redrawn every round (HeteroFL's Fix and Dynamic)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from ..footprints import find_footprint, find_foreign_frozen, find_slicing_problem, shape_fits, tensor_fits
from ..footprints.regions import find_regions
from ..models import Model, ModelShapes, Shapes
from ..models.axes import axis_pairs, describe_layout
from ..seeds import TIER, generator
from .device import Device, Tier

Assignment = Literal["fixed", "redrawn"]
FREEZE_ALIKE = "set requires_grad=False on it in all tiers or in none"


class InvalidTier(ValueError):  # noqa: N818 - named for what is wrong
    """A tier whose model does not fit into the global model."""


@dataclass(frozen=True)
class Fleet:
    """All devices. Device objects are created on demand, so a large fleet costs no more than its cohort.

    Parameters
    ----------
    tiers : the tiers.
    shares : the share of each tier.
    size : the number of devices.
    seed : the seed of the run.
    assignment : "fixed": every device has one tier; "redrawn": tiers are drawn anew every round.
    eligible_tiers : the tiers that take part in training; empty: all.
    holdout_devices : indices of devices that are evaluated but never train.
    device_tiers : the tier of every device; empty: by `shares`.
    """

    tiers: tuple[Tier, ...]
    shares: tuple[float, ...]
    size: int
    seed: int
    assignment: Assignment = "fixed"
    eligible_tiers: tuple[str, ...] = ()
    holdout_devices: frozenset[int] = frozenset()
    device_tiers: tuple[str, ...] = ()

    @cached_property
    def global_model(self) -> Model:
        """The model of the largest active tier."""
        return self.largest.model

    @property
    def active_tiers(self) -> tuple[Tier, ...]:
        """Tiers whose model is trained, evaluated and saved."""
        return tuple(tier for tier in self.tiers if not self.eligible_tiers or tier.name in self.eligible_tiers)

    @property
    def tier_models(self) -> dict[str, Model]:
        """The models of the active tiers, by name of the tier."""
        return {tier.name: tier.model for tier in self.active_tiers}

    @cached_property
    def largest(self) -> Tier:
        """The active tier with most parameters."""
        return max(self.active_tiers, key=lambda tier: _model_size(tier.model))

    @cached_property
    def smallest(self) -> Tier:
        """The active tier with fewest parameters."""
        return min(self.active_tiers, key=lambda tier: _model_size(tier.model))

    def restrict_tiers(self, names: Sequence[str]) -> "Fleet":
        """The same devices, but only these tiers take part; the global model is their largest.

        Parameters
        ----------
        names : the names of the tiers.
        """
        models = [(tier.name, tier.model) for tier in self.tiers]
        return replace(self, tiers=make_tiers(models, names), eligible_tiers=tuple(names))

    def eligible_indices(self, round_number: int) -> Sequence[int]:
        """Indices of the devices that may train in a round.

        Parameters
        ----------
        round_number : the round.
        """
        indices: Sequence[int] = range(self.size)
        if self.holdout_devices:
            indices = [index for index in indices if index not in self.holdout_devices]
        if self.eligible_tiers:
            indices = [index for index in indices if self._tier(index, round_number).name in self.eligible_tiers]
        return indices

    def eligible_devices(self, round_number: int) -> list[Device]:
        """The devices that may train in a round.

        Parameters
        ----------
        round_number : the round.
        """
        return [self.device(index, round_number) for index in self.eligible_indices(round_number)]

    def device(self, index: int, round_number: int) -> Device:
        """One device, with its tier of a round.

        Parameters
        ----------
        index : the index of the device, from 0.
        round_number : the round.
        """
        tier = self._tier(index, round_number)
        return Device(self.name(index), tier.name, tier.model, tier.footprint)

    def devices(self, round_number: int) -> list[Device]:
        """All devices, with their tiers of a round.

        Parameters
        ----------
        round_number : the round.
        """
        return [self.device(index, round_number) for index in range(self.size)]

    def name(self, index: int) -> str:
        """The name of a device.

        Parameters
        ----------
        index : the index of the device, from 0.
        """
        return device_name(index, self.size)

    def pooled_device(self, tier: Tier, share: float = 1.0) -> Device:
        """Simulation only: a device with the data of many devices that may train.

        Parameters
        ----------
        tier : the tier whose model it has.
        share : the share of devices, the first ones, whose data it has.
        """
        known = (
            [index for index in range(self.size) if index not in self.holdout_devices]
            if self.holdout_devices
            else range(self.size)
        )
        names = tuple(self.name(index) for index in known[: max(1, int(share * len(known) + 0.5))])
        return Device("pool", tier.name, tier.model, tier.footprint, pooled_from=names)

    def evaluation_device(self, tier: Tier) -> Device:
        """The server, evaluating a tier's model on the test set.

        Parameters
        ----------
        tier : the tier.
        """
        return Device("examiner", tier.name, tier.model, tier.footprint, is_server=True)

    def _tier(self, index: int, round_number: int) -> Tier:
        return self.tiers[self._tier_index(index, round_number)]

    def _tier_index(self, index: int, round_number: int) -> int:
        if self.assignment == "redrawn":
            draw = generator(self.seed, TIER, round_number, index)
            return int(draw.choice(len(self.tiers), p=self.shares))
        return self._fixed_tiers[index]

    @cached_property
    def _fixed_tiers(self) -> tuple[int, ...]:
        """`device_tiers`, or in index order by the shares; devices left over by rounding are of the last tier."""
        if self.device_tiers:
            names = [tier.name for tier in self.tiers]
            return tuple(names.index(name) for name in self.device_tiers)
        filled = [number for number, share in enumerate(self.shares) for _ in range(int(share * self.size + 1e-4))]
        return tuple(filled + [len(self.tiers) - 1] * (self.size - len(filled)))


def in_parts(device: Device, count: int) -> list[Device]:
    """The same device once for each part of its work, so that several processes can share it.

    The parts of a pooled device go through the same batches as the whole. How many there are must not depend on the
    machine, or results would.

    Parameters
    ----------
    device : a pooled device or the server.
    count : the number of parts.
    """
    return [replace(device, part=(index, count)) for index in range(count)]


def device_name(index: int, fleet_size: int) -> str:
    """The index, zero-padded so that names sort like numbers.

    Parameters
    ----------
    index : the index of the device, from 0.
    fleet_size : the number of devices.
    """
    return f"{index:0{len(str(fleet_size - 1))}d}"


def count_parameters(shapes: Shapes) -> int:
    """The number of weights of a model.

    Parameters
    ----------
    shapes : the shapes of its weights, as `Model.shapes` returns them.
    """
    return sum(shape.numel() for shape in shapes.values())


def _model_size(model: Model) -> tuple[int, int]:
    """Larger for the model with more trained weights, or with more frozen ones if they have equally many."""
    return count_parameters(model.shapes()), count_parameters(model.frozen_shapes())


def make_tiers(models: Sequence[tuple[str, Model]], eligible: Sequence[str] = ()) -> tuple[Tier, ...]:
    """Tiers of any models, with their footprints in the largest eligible one; they need not fit completely.

    Frozen weights that the family draws are drawn for the largest, and smaller models have their part of them.

    Parameters
    ----------
    models : the name and model of each tier.
    eligible : the tiers that take part; empty: all.
    """
    candidates = [model for name, model in models if not eligible or name in eligible]
    largest = max(candidates, key=_model_size)
    source, shapes = replace(largest, frozen_from=None), largest.shapes()
    return tuple(
        Tier(name, model.with_frozen_from(source), find_footprint(model.shapes(), shapes)) for name, model in models
    )


def make_nested_tiers(models: Sequence[tuple[str, Model]]) -> tuple[Tier, ...]:
    """Tiers whose models all fit completely into the largest; `InvalidTier` if one does not.

    Parameters
    ----------
    models : the name and model of each tier.
    """
    tiers = make_tiers(models)
    problem = find_nesting_problem(Fleet(tiers, (1.0,) * len(tiers), len(tiers), 0))
    if problem:
        raise InvalidTier(problem)
    return tiers


def find_nesting_problem(fleet: Fleet) -> str | None:
    """Why an active tier's model is no part of the global model; None if all are.

    Every weight must have a place in the global model, and the part of it that a tier covers must compute what the
    tier's model computes, which is tried.

    Parameters
    ----------
    fleet : the fleet.
    """
    problems = (_tier_problem(tier.name, tier.model, fleet.global_model) for tier in fleet.active_tiers)
    return next(filter(None, problems), None)


def _tier_problem(tier: str, model: Model, global_model: Model) -> str | None:
    problem = _slice_problem(tier, model.shapes(), global_model.shapes(), global_model)
    if problem and model.family != global_model.family:
        return (
            f"every tier must have a part of the largest tier's net, but that is of family {global_model.family!r} and "
            f"tier {tier!r} has one of {model.family!r}; use one family, or a method for any nets"
        )
    problem = problem or _frozen_problem(tier, model, global_model)
    if problem:
        return problem
    reason = find_slicing_problem(model, global_model)
    return f"tier {tier!r}: {reason}" if reason else None


def _slice_problem(tier: str, small: ModelShapes, large: ModelShapes, global_model: Model) -> str | None:
    for name, shape in small.items():
        if name not in large:
            if name in global_model.frozen_shapes():
                return f"tier {tier!r}: {name} is trained, but frozen in the global model; {FREEZE_ALIKE}"
            return (
                f"tier {tier!r}: {name} is not in the global model, which is that of the tier with most parameters; "
                "every layer of a smaller tier must be one of its"
            )
        if not shape_fits(shape, large[name]):
            return (
                f"tier {tier!r}: {name} has shape {tuple(shape)}, which does not lie in {tuple(large[name])} of the "
                "global model; every axis of a smaller tier must be at most as long"
            )
        if not tensor_fits(name, small, large):
            return f"tier {tier!r}: {_layout_problem(name, small, large)}"
    return None


def _layout_problem(name: str, small: ModelShapes, large: ModelShapes) -> str:
    pairs = axis_pairs(name, small, large) or []
    axis, pair = next((axis, pair) for axis, pair in enumerate(pairs) if not pair.fits())
    return (
        f"axis {axis} of {name} stacks {describe_layout(pair.small)}, which does not lie in "
        f"{describe_layout(pair.large)} of the global model; every head, gate or part of a smaller tier must be one of "
        "its, and at most as long"
    )


def _frozen_problem(tier: str, model: Model, global_model: Model) -> str | None:
    """Devices of two tiers train the same thing only if what is frozen beneath it is the same, or a part of it."""
    small, large = model.frozen_shapes(), global_model.frozen_shapes()
    trained = next((name for name in small if name in global_model.shapes()), None)
    if trained:
        return f"tier {tier!r}: {trained} is frozen, but trained in the global model; {FREEZE_ALIKE}"
    problem = _slice_problem(tier, small, large, global_model)
    other = None if problem else find_foreign_frozen(model, global_model)
    if other:
        return (
            f"tier {tier!r}: {other} is frozen at other values than in the global model, so the tiers would train on "
            "different features; load the same base in every tier, or use a method for unrelated models"
        )
    return problem


TierRegion = tuple[str, ...]
"""A coverage region, by the names of the tiers that hold it."""


def tier_regions(fleet: Fleet) -> list[TierRegion]:
    """The coverage regions of the active tiers. Weights outside the global model are a region of their tier alone."""
    tiers = fleet.active_tiers
    regions = find_regions(fleet.global_model.shapes(), [tier.footprint for tier in tiers])
    holders = {region.contributors for region in regions}
    holders |= {(n,) for n, tier in enumerate(tiers) if tier.model.shapes().keys() - tier.footprint.blocks.keys()}
    return [tuple(tiers[n].name for n in numbers) for numbers in sorted(holders)]


def region_name(region: TierRegion) -> str:
    return "+".join(region)
