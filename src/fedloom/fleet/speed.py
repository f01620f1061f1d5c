"""Stragglers: how much faster or slower than its tier each device is."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..registry import Registry
from ..seeds import SPEED, generator
from ..settings import NonNegative
from .tiers import Fleet


@dataclass(frozen=True)
class DeviceSpeed:
    """Factors on the tier's computing speed and bandwidth.

    Parameters
    ----------
    speed : the factor on the computing speed.
    bandwidth : the factor on the bandwidth.
    """

    speed: float = 1.0
    bandwidth: float = 1.0


DeviceSpeeds = Mapping[str, DeviceSpeed]
"""By device name; a device that is missing is as fast as its tier."""


LARGEST_EXPONENT = 100.0  # beyond it, products of factors and bytes would soon be infinite, or zero


def lognormal(fleet: Fleet, *, speed: NonNegative = 0.5, bandwidth: NonNegative = 0.5) -> DeviceSpeeds:
    """Log-normal stragglers: each device's speed and bandwidth get a factor with median 1, drawn once per run.

    Parameters
    ----------
    speed : the standard deviation of the logarithm of the speed's factor.
    bandwidth : the standard deviation of the logarithm of the bandwidth's factor.
    """
    speeds = {}
    for index in range(fleet.size):
        drawn = generator(fleet.seed, SPEED, index).standard_normal(2)
        exponents = speed * drawn[0], bandwidth * drawn[1]
        if max(map(abs, exponents)) > LARGEST_EXPONENT:
            raise ValueError("speeds would differ by more than a factor of 1e86; set a smaller speed and bandwidth")
        speeds[fleet.name(index)] = DeviceSpeed(*map(math.exp, exponents))
    return speeds


def from_file(fleet: Fleet, *, path: str) -> DeviceSpeeds:
    """Stragglers from a file: factors on the speed and bandwidth of some devices.

    Parameters
    ----------
    path : a JSON file such as {"3": {"speed": 0.25, "bandwidth": 0.5}}; devices that are missing are as fast as their
        tier.
    """
    speeds = {}
    try:
        for index, factors in json.loads(Path(path).read_text(encoding="utf-8")).items():
            speed = DeviceSpeed(**{key: float(factor) for key, factor in factors.items()})
            if not 0 <= int(index) < fleet.size:
                raise ValueError(f"there is no device {index}")
            if not (0 < speed.speed < math.inf and 0 < speed.bandwidth < math.inf):
                raise ValueError(f"the factors of device {index} must be > 0")
            speeds[fleet.name(int(index))] = speed
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: {error}") from error
    return speeds


STRAGGLERS: Registry[Callable[..., DeviceSpeeds]] = Registry(
    "stragglers", {"lognormal": lognormal, "file": from_file}, passed=("fleet",)
)
