"""How much faster or slower than its tier a device is."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..seeds import SPEED, generator
from ..settings import NonNegative
from .tiers import Fleet


@dataclass(frozen=True)
class DeviceSpeed:
    """Factors of the tier's own speed and bandwidth."""

    speed: float = 1.0
    bandwidth: float = 1.0


DeviceSpeeds = Mapping[str, DeviceSpeed]
"""By name of the device; whoever is not named is as fast as its tier."""


def lognormal(fleet: Fleet, *, speed: NonNegative = 0.5, bandwidth: NonNegative = 0.5) -> DeviceSpeeds:
    """Half of the devices slower than their tier, half faster: `speed` and `bandwidth` are the spread of the logarithm.
    A device keeps its pace throughout a run."""
    made = {}
    for index in range(fleet.size):
        drawn = generator(fleet.seed, SPEED, index).standard_normal(2)
        made[fleet.name(index)] = DeviceSpeed(math.exp(speed * drawn[0]), math.exp(bandwidth * drawn[1]))
    return made


def from_file(fleet: Fleet, *, path: str) -> DeviceSpeeds:
    """A JSON object: {"3": {"speed": 0.25, "bandwidth": 0.5}}."""
    made = {}
    try:
        for index, said in json.loads(Path(path).read_text(encoding="utf-8")).items():
            pace = DeviceSpeed(**{key: float(factor) for key, factor in said.items()})
            if not 0 <= int(index) < fleet.size:
                raise ValueError(f"there is no device {index}")
            if not (0 < pace.speed < math.inf and 0 < pace.bandwidth < math.inf):
                raise ValueError(f"the factors of device {index} must be > 0")
            made[fleet.name(int(index))] = pace
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: {error}") from error
    return made


STRAGGLERS: Mapping[str, Callable[..., DeviceSpeeds]] = {"lognormal": lognormal, "file": from_file}
