"""Plan a fleet of real devices: read or measure what they can do, choose the largest tier for each, and estimate the
time of a round and how often each part of the model is trained."""

import csv
import json
import math
import os
import platform
import re
import shutil
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ..client import Optimizer, Sgd
from ..fleet import Fleet, Tier, count_parameters
from ..footprints.regions import find_regions
from ..methods import Method, training_macs
from ..models import MODELS, Model, build_model
from ..recipe.errors import recipe_error
from ..recipe.load import LoadedRecipe
from ..recipe.registries import Registries
from ..registry import suggest
from ..runs.build import build
from ..runs.data import read_data_spec
from .costs import TierCost, examples_per_device
from .profiling import training_speed

HEADROOM = 1.5  # a process needs more memory than its tensors: kernels' workspaces, fragmentation
UNITS = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
QUANTITY = re.compile(r"\s*([\d.eE+]+)\s*([kMGT]?)B?(?:/s)?\s*")


@dataclass(frozen=True)
class DeviceSpec:
    """Devices of one kind. What is not set does not limit them."""

    name: str
    speed: float = math.inf  # multiply-adds per second, in training
    memory: float = math.inf  # bytes, for training
    bandwidth: float = math.inf  # bytes per second
    deadline: float = math.inf  # seconds per round
    count: int = 1
    examples: int | None = None  # training examples of one device; None: as the recipe shares them out
    speeds: Mapping[str, float] = field(default_factory=dict)  # by tier, if measured

    def speed_for(self, tier: str) -> float:
        return self.speeds.get(tier, self.speed)


@dataclass(frozen=True)
class TierDemand:
    """What a tier requires of one device in a round."""

    tier: str
    memory: float  # bytes
    transfer: float  # seconds
    training: float  # seconds

    @property
    def seconds(self) -> float:
        return self.transfer + self.training

    def explain_excess(self, spec: DeviceSpec) -> str:
        """Why the device cannot meet the demand; empty if it can."""
        if self.memory > spec.memory:
            return f"needs {self.memory / 1e6:.3g} MB of memory, has {spec.memory / 1e6:.3g} MB"
        if self.seconds > spec.deadline:
            return f"needs {self.seconds:.3g} s a round, has {spec.deadline:.3g} s"
        return ""


@dataclass(frozen=True)
class DeviceAssignment:
    spec: DeviceSpec
    demand: TierDemand | None  # of the chosen tier; None: no tier is small enough
    problem: str = ""  # of the next larger tier, or of the smallest

    def record(self) -> dict[str, Any]:
        demand = self.demand
        return {
            "name": self.spec.name, "count": self.spec.count, "tier": demand.tier if demand else None,
            "memory": demand.memory if demand else None, "seconds": demand.seconds if demand else None,
            "transfer_seconds": demand.transfer if demand else None,
            "training_seconds": demand.training if demand else None,
            "next": self.problem,
        }  # fmt: skip


@dataclass(frozen=True)
class RegionPlan:
    """A coverage region: a part of the global model that only these tiers hold."""

    tiers: tuple[str, ...]
    parameters: int
    devices: int
    contributors: float  # per round, on average
    trained: float  # the share of rounds with at least one contributor


@dataclass(frozen=True)
class FleetPlan:
    devices: tuple[DeviceAssignment, ...]
    regions: tuple[RegionPlan, ...]
    seconds: float  # of a round in which the slowest device takes part

    @property
    def shares(self) -> dict[str, float]:
        """The share of each tier among the devices that can take part, for the recipe's tiers."""
        counts: dict[str, int] = {}
        for plan in self.devices:
            if plan.demand:
                counts[plan.demand.tier] = counts.get(plan.demand.tier, 0) + plan.spec.count
        total = sum(counts.values())
        return {tier: count / total for tier, count in counts.items()}

    def record(self) -> dict[str, Any]:
        return {
            "devices": [plan.record() for plan in self.devices],
            "regions": [{**vars(region), "tiers": list(region.tiers)} for region in self.regions],
            "round_seconds": self.seconds,
            "shares": self.shares,
        }


def plan_fleet(
    loaded: LoadedRecipe, registries: Registries, folder: Path, specs: Sequence[DeviceSpec], costs: Sequence[TierCost],
    headroom: float = HEADROOM,
) -> FleetPlan:  # fmt: skip
    """Choose the largest tier for each device that its memory and deadline allow.

    `costs` are those of the recipe's tiers, with training memory; `headroom` multiplies that memory.
    """
    data_spec = read_data_spec(loaded, registries, folder)
    fleet, method = build(loaded, registries, data_spec)
    default_examples = examples_per_device(loaded, data_spec)
    costs_by_tier = {cost.name: cost for cost in costs}
    largest_first = sorted(fleet.active_tiers, key=lambda tier: -count_parameters(tier.model.shapes()))

    def demand(spec: DeviceSpec, tier: Tier) -> TierDemand:
        cost = costs_by_tier[tier.name]
        work = _training_macs(loaded, method, fleet, tier, spec.examples or default_examples)
        return TierDemand(
            tier.name, headroom * (cost.training_memory or 0), cost.bytes_moved / spec.bandwidth,
            work / spec.speed_for(tier.name),
        )  # fmt: skip

    plans = tuple(_choose_tier(spec, [demand(spec, tier) for tier in largest_first]) for spec in specs)
    seconds = max((plan.demand.seconds for plan in plans if plan.demand), default=0.0)
    return FleetPlan(plans, _plan_regions(loaded, fleet, method, plans), seconds)


def _training_macs(loaded: LoadedRecipe, method: Method, fleet: Fleet, tier: Tier, examples: int) -> float:
    training = loaded.recipe.training
    steps = training.epochs * -(-examples // training.batch_size)
    return training_macs(method, tier.model, fleet.tier_models, training.epochs * examples, steps)


def _choose_tier(spec: DeviceSpec, demands: Sequence[TierDemand]) -> DeviceAssignment:
    """The first tier that the device can train, with the reason why it cannot train the one before."""
    problem = ""
    for demand in demands:
        excess = demand.explain_excess(spec)
        if not excess:
            return DeviceAssignment(spec, demand, problem)
        problem = f"{demand.tier} {excess}"
    return DeviceAssignment(spec, None, problem)


def _plan_regions(
    loaded: LoadedRecipe, fleet: Fleet, method: Method, plans: Sequence[DeviceAssignment]
) -> tuple[RegionPlan, ...]:
    """Empty for methods whose models are not parts of a global one."""
    if method.info.heterogeneity == "any":
        return ()
    devices = {tier.name: 0 for tier in fleet.active_tiers}
    for plan in plans:
        if plan.demand:
            devices[plan.demand.tier] += plan.spec.count
    total = sum(devices.values())
    cohort = math.ceil(loaded.recipe.fleet.participation * total - 1e-9)
    region_plans = []
    for region in find_regions(fleet.global_model.shapes(), [tier.footprint for tier in fleet.active_tiers]):
        tiers = tuple(fleet.active_tiers[index].name for index in region.contributors)
        holders = sum(devices[tier] for tier in tiers)
        contributors = cohort * holders / total if total else 0.0
        trained = 1 - _absence_probability(total, holders, cohort)
        region_plans.append(RegionPlan(tiers, len(region), holders, contributors, trained))
    return tuple(region_plans)


def _absence_probability(total: int, holders: int, cohort: int) -> float:
    """The probability that a cohort drawn from all devices contains none of the holders."""
    if not holders or not cohort:
        return 1.0
    return math.comb(total - holders, cohort) / math.comb(total, cohort)


def read_device_specs(path: Path) -> list[DeviceSpec]:
    """Read a fleet from TOML ([[devices]]), CSV with a header, or JSON as `fedloom probe` writes it."""
    readers: dict[str, Callable[[str], list[Mapping[str, Any]]]] = {
        ".toml": _read_toml, ".csv": _read_csv, ".json": _read_json,
    }  # fmt: skip
    if path.suffix not in readers:
        raise recipe_error(path, "FLEET_FORMAT", f"a fleet is a file of {', '.join(readers)}")
    if not path.is_file():
        raise recipe_error(path, "FILE_MISSING", f"there is no file {path}")
    try:
        entries = readers[path.suffix](path.read_text(encoding="utf-8"))
    except (ValueError, KeyError, TypeError) as error:
        raise recipe_error(path, "FLEET_FORMAT", f"this is not a list of devices: {error}") from error
    if not entries:
        raise recipe_error(path, "FLEET_EMPTY", "there is no device in it", 'write [[devices]] and name = "phone"')
    return [_parse_spec(path, number, entry) for number, entry in enumerate(entries, 1)]


def _read_toml(text: str) -> list[Mapping[str, Any]]:
    return list(tomllib.loads(text)["devices"])


def _read_csv(text: str) -> list[Mapping[str, Any]]:
    return [{key.strip(): value for key, value in row.items() if value} for row in csv.DictReader(text.splitlines())]


def _read_json(text: str) -> list[Mapping[str, Any]]:
    content = json.loads(text)
    content = content.get("data", content) if isinstance(content, dict) else content
    return content if isinstance(content, list) else [content]


def _parse_spec(path: Path, number: int, entry: Mapping[str, Any]) -> DeviceSpec:
    known, ignored = {column.name for column in fields(DeviceSpec)}, {"memory_total", "disk_free", "cores", "machine"}
    values: dict[str, Any] = {}
    for key, value in entry.items():
        if key in ignored or value is None:
            continue
        if key not in known:
            raise recipe_error(path, "FLEET_KEY", f"device {number}: there is no key {key!r}", suggest(key, known))
        values[key] = value if key in ("name", "speeds") else _parse_quantity(path, number, key, value)
    values.setdefault("name", f"device-{number}")
    for key in ("count", "examples"):
        if key in values:
            values[key] = int(values[key])
    return DeviceSpec(**values)


def _parse_quantity(path: Path, number: int, key: str, value: Any) -> float:
    """A number, or one with a unit: 512 MB, 2.5 GB, 3e9, 10 MB/s."""
    match = QUANTITY.fullmatch(str(value))
    try:
        amount = float(match[1]) * UNITS[match[2]] if match else math.nan
    except ValueError:
        amount = math.nan
    if not amount > 0:
        message = f"device {number}: {key} = {value!r} is not an amount above 0"
        raise recipe_error(path, "FLEET_VALUE", message, "e.g. 512 MB")
    return amount


def probe(
    name: str, models: Mapping[str, Model], batch_size: int = 10, optimizer: Optimizer | None = None
) -> DeviceSpec:
    """Measure this machine: its free memory, and how fast it trains the models of each tier, or else a small net."""
    nets = models or {"": build_model("convnet", MODELS["convnet"], {"hidden": (16, 32, 64)}, (1, 28, 28), 10)}
    speeds = {tier: training_speed(net, batch_size, optimizer or Sgd(momentum=0.9)) for tier, net in nets.items()}
    by_tier = {tier: speed for tier, speed in speeds.items() if tier}
    return DeviceSpec(name, min(speeds.values()), memory=free_memory(), speeds=by_tier)


def system_info() -> dict[str, Any]:
    return {
        "memory_total": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "disk_free": shutil.disk_usage(Path.cwd()).free,
        "cores": os.cpu_count(),
        "machine": platform.machine(),
    }


def free_memory() -> float:
    """Bytes of available memory, or of all memory where the system does not report it."""
    meminfo = Path("/proc/meminfo")
    match = re.search(r"MemAvailable:\s+(\d+) kB", meminfo.read_text("utf-8")) if meminfo.is_file() else None
    return 1024.0 * int(match[1]) if match else float(system_info()["memory_total"])
