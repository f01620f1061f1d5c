"""Which tier each of a fleet's real devices can carry, how long a round then takes, and how often each part of the
model is trained."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..fleet import Fleet, Tier, count_parameters
from ..footprints.regions import find_regions
from ..methods import Method
from ..recipe.load import LoadedRecipe
from ..recipe.registry import Registry
from ..runs.build import build
from ..runs.data import outline
from .costs import TierCost, examples_per_device
from .hardware import DeviceSpec

HEADROOM = 1.5  # a process takes more than its tensors: what the kernels need for themselves, and gaps


@dataclass(frozen=True)
class TierDemand:
    """What one of a machine's devices would spend on a tier in a round."""

    tier: str
    memory: float  # bytes
    moving: float  # seconds
    training: float

    @property
    def seconds(self) -> float:
        return self.moving + self.training

    def problem(self, spec: DeviceSpec) -> str:
        """Why it is too much; "": it is not."""
        if self.memory > spec.memory:
            return f"needs {self.memory / 1e6:.3g} MB of memory, has {spec.memory / 1e6:.3g} MB"
        if self.seconds > spec.deadline:
            return f"needs {self.seconds:.3g} s a round, has {spec.deadline:.3g} s"
        return ""


@dataclass(frozen=True)
class DevicePlan:
    spec: DeviceSpec
    fit: TierDemand | None  # None: no tier is small enough
    problem: str = ""  # of the next larger tier, or of the smallest


@dataclass(frozen=True)
class RegionPlan:
    """A part of the global model that only these tiers hold."""

    tiers: tuple[str, ...]
    parameters: int
    devices: int
    contributors: float  # a round, on average
    trained: float  # the share of rounds in which anybody speaks for it


@dataclass(frozen=True)
class FleetPlan:
    planned: tuple[DevicePlan, ...]
    regions: tuple[RegionPlan, ...]
    seconds: float  # of a round in which the slowest takes part

    @property
    def shares(self) -> dict[str, float]:
        """Of all devices that can take part, by tier: what the recipe's tiers should say."""
        counts: dict[str, int] = {}
        for one in self.planned:
            if one.fit:
                counts[one.fit.tier] = counts.get(one.fit.tier, 0) + one.spec.count
        total = sum(counts.values())
        return {tier: count / total for tier, count in counts.items()}

    def record(self) -> dict[str, Any]:
        return {
            "devices": [_told(one) for one in self.planned],
            "regions": [{**vars(one), "tiers": list(one.tiers)} for one in self.regions],
            "round_seconds": self.seconds,
            "shares": self.shares,
        }


def plan_fleet(
    loaded: LoadedRecipe, registry: Registry, folder: Path, specs: Sequence[DeviceSpec], costs: Sequence[TierCost],
    headroom: float = HEADROOM,
) -> FleetPlan:  # fmt: skip
    """`costs` are those of the recipe's tiers, memory among them."""
    seen = outline(loaded, registry, folder)
    fleet, method = build(loaded, registry, seen)
    usual = examples_per_device(loaded, seen)
    spent = {one.name: one for one in costs}
    largest_first = sorted(fleet.active_tiers, key=lambda tier: -count_parameters(tier.model.shapes()))

    def fit(spec: DeviceSpec, tier: Tier) -> TierDemand:
        memory = headroom * (spent[tier.name].training_memory or 0)
        work = _work(loaded, method, tier, spec.examples or usual)
        return TierDemand(tier.name, memory, spent[tier.name].bytes_moved / spec.bandwidth, work / spec.speed_for(tier.name))

    planned = tuple(_largest(spec, [fit(spec, tier) for tier in largest_first]) for spec in specs)
    seconds = max((one.fit.seconds for one in planned if one.fit), default=0.0)
    return FleetPlan(planned, _region_plans(loaded, fleet, method, planned), seconds)


def _work(loaded: LoadedRecipe, method: Method, tier: Tier, examples: int) -> float:
    part = loaded.recipe.training
    steps = part.epochs * -(-examples // part.batch_size)
    return method.device_macs(tier.model, part.epochs * examples, steps)


def _largest(spec: DeviceSpec, fits: Sequence[TierDemand]) -> DevicePlan:
    """The first that is not too much; and what is wrong with the one before it."""
    problem = ""
    for fit in fits:
        found = fit.problem(spec)
        if not found:
            return DevicePlan(spec, fit, problem)
        problem = f"{fit.tier} {found}"
    return DevicePlan(spec, None, problem)


def _region_plans(loaded: LoadedRecipe, fleet: Fleet, method: Method, planned: Sequence[DevicePlan]) -> tuple[RegionPlan, ...]:
    """None where models are not parts of one."""
    if method.info.heterogeneity == "any":
        return ()
    held = {tier.name: 0 for tier in fleet.active_tiers}
    for one in planned:
        if one.fit:
            held[one.fit.tier] += one.spec.count
    able = sum(held.values())
    cohort = math.ceil(loaded.recipe.fleet.participation * able - 1e-9)
    found = []
    for region in find_regions(fleet.global_model.shapes(), [tier.footprint for tier in fleet.active_tiers]):
        tiers = tuple(fleet.active_tiers[voter].name for voter in region.contributors)
        holders = sum(held[tier] for tier in tiers)
        votes = cohort * holders / able if able else 0.0
        found.append(RegionPlan(tiers, len(region), holders, votes, 1 - _silence(able, holders, cohort)))
    return tuple(found)


def _silence(able: int, holders: int, cohort: int) -> float:
    """How likely none of the holders is among a cohort drawn from all that are able."""
    if not holders or not cohort:
        return 1.0
    return math.comb(able - holders, cohort) / math.comb(able, cohort)


def _told(one: DevicePlan) -> dict[str, Any]:
    fit = one.fit
    return {
        "name": one.spec.name, "count": one.spec.count, "tier": fit.tier if fit else None,
        "memory": fit.memory if fit else None, "seconds": fit.seconds if fit else None,
        "moving_seconds": fit.moving if fit else None, "training_seconds": fit.training if fit else None,
        "next": one.problem,
    }  # fmt: skip
