"""Real devices and what they can do: read from a file, or measured of the machine this runs on."""

import csv
import json
import math
import os
import platform
import re
import shutil
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ..client import Optimizer, Sgd
from ..models import MODELS, Model, model
from ..recipe.errors import RecipeError, recipe_error, suggest
from .profiling import training_speed

UNITS = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
QUANTITY = re.compile(r"\s*([\d.eE+]+)\s*([kMGT]?)B?(?:/s)?\s*")


@dataclass(frozen=True)
class DeviceSpec:
    """Devices of one kind. What is not said does not limit them."""

    name: str
    speed: float = math.inf  # multiply-adds a second, in training
    memory: float = math.inf  # bytes, for training
    bandwidth: float = math.inf  # bytes a second
    deadline: float = math.inf  # seconds a round may take
    count: int = 1
    examples: int | None = None  # that one of them holds; None: as the recipe shares them out
    speeds: Mapping[str, float] = field(default_factory=dict)  # tier by tier, where that was measured

    def speed_for(self, tier: str) -> float:
        return self.speeds.get(tier, self.speed)


def read_device_specs(path: Path) -> list[DeviceSpec]:
    """From TOML ([[devices]]), CSV with a header, or JSON as `fedloom probe` writes it."""
    readers: dict[str, Callable[[str], list[Mapping[str, Any]]]] = {".toml": _toml, ".csv": _csv, ".json": _json}
    if path.suffix not in readers:
        raise _wrong(path, "FLEET_FORMAT", f"a fleet is a file of {', '.join(readers)}")
    if not path.is_file():
        raise _wrong(path, "FILE_MISSING", f"there is no file {path}")
    try:
        said = readers[path.suffix](path.read_text(encoding="utf-8"))
    except (ValueError, KeyError, TypeError) as error:
        raise _wrong(path, "FLEET_FORMAT", f"this is no list of devices: {error}") from error
    if not said:
        raise _wrong(path, "FLEET_EMPTY", "there is no device in it", 'write [[devices]] and name = "phone"')
    return [_machine(path, number, one) for number, one in enumerate(said, 1)]


def probe(name: str, models: Mapping[str, Model], batch_size: int = 10, optimizer: Optimizer | None = None) -> DeviceSpec:
    """This machine: memory that is free, and how fast it trains these models, tier by tier; or a small net."""
    tried = models or {"": model("convnet", MODELS["convnet"], {"hidden": (16, 32, 64)}, (1, 28, 28), 10)}
    speeds = {tier: training_speed(one, batch_size, optimizer or Sgd(momentum=0.9)) for tier, one in tried.items()}
    own = {tier: speed for tier, speed in speeds.items() if tier}
    return DeviceSpec(name, min(speeds.values()), memory=free_memory(), speeds=own)


def system_info() -> dict[str, Any]:
    """What else there is to know of this machine."""
    return {
        "memory_total": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "disk_free": shutil.disk_usage(Path.cwd()).free,
        "cores": os.cpu_count(),
        "machine": platform.spec(),
    }


def free_memory() -> float:
    """Bytes that can be had without taking them from others, where the system says."""
    told = Path("/proc/meminfo")
    found = re.search(r"MemAvailable:\s+(\d+) kB", told.read_text("utf-8")) if told.is_file() else None
    return 1024.0 * int(found[1]) if found else float(system_info()["memory_total"])


def _toml(text: str) -> list[Mapping[str, Any]]:
    return list(tomllib.loads(text)["devices"])


def _csv(text: str) -> list[Mapping[str, Any]]:
    return [{key.strip(): value for key, value in row.items() if value} for row in csv.DictReader(text.splitlines())]


def _json(text: str) -> list[Mapping[str, Any]]:
    said = json.loads(text)
    said = said.get("data", said) if isinstance(said, dict) else said
    return said if isinstance(said, list) else [said]


def _machine(path: Path, number: int, said: Mapping[str, Any]) -> DeviceSpec:
    known, ignored = {one.name for one in fields(DeviceSpec)}, {"memory_total", "disk_free", "cores", "machine"}
    made: dict[str, Any] = {}
    for key, value in said.items():
        if key in ignored or value is None:
            continue
        if key not in known:
            raise _wrong(path, "FLEET_KEY", f"device {number}: there is no key {key!r}", suggest(key, known))
        made[key] = value if key in ("name", "speeds") else _positive(path, number, key, value)
    made.setdefault("name", f"device-{number}")
    for key in ("count", "examples"):
        if key in made:
            made[key] = int(made[key])
    return DeviceSpec(**made)


def _positive(path: Path, number: int, key: str, value: Any) -> float:
    """A number, or one with a unit: 512 MB, 2.5 GB, 3e9, 10 MB/s."""
    found = QUANTITY.fullmatch(str(value))
    try:
        amount = float(found[1]) * UNITS[found[2]] if found else math.nan
    except ValueError:
        amount = math.nan
    if not amount > 0:
        raise _wrong(path, "FLEET_VALUE", f"device {number}: {key} = {value!r} is no amount above 0", "e.g. 512 MB")
    return amount


def _wrong(path: Path, code: str, said: str, hint: str = "") -> RecipeError:
    return recipe_error(path, code, said, hint)
