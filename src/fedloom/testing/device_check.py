"""A self-test of a torch device: every method against the CPU, its speed and memory, and whether it repeats its bits.

It is for hardware that the tests of the package do not have. `fedloom doctor --device cuda` prints its table.
"""

import math
import statistics
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch

from ..analysis.profiling import fits_memory, gradient_seconds
from ..client import Schedule
from ..methods import METHODS, Method
from ..models import MODELS
from ..placement import ON_CPU, Compute, hardware_name
from ..results import Record, Result
from ..tensors import Parcel, fingerprint, relative_distance
from .world import TINY_METHODS, TinyWorld, home_family, takes_family, tiny_model

SIZES = (12, 12, 12)  # examples of three devices: three steps each
BATCH = 4
SECOND_FAMILIES = ("mlp", "preactresnet", "convnet", "lenet")  # the first of them that a method takes
TOLERANCE = 1e-2
"""How far weights may be from the CPU's after three steps, relative to their norm."""
LARGEST_BLOCK = 256
TIMED_BATCH, TIMED_BLOCK, TIMED = 32, 8, 3


@dataclass(frozen=True)
class MethodOnDevice:
    """A method on a device, against the CPU.

    Parameters
    ----------
    method, family : the method and the family of its models.
    difference : the distance of the weights after three steps, relative to their norm; NaN: it failed.
    repeats_bits : whether a second time gave the same bits.
    error : why it failed; "": it did not.
    """

    method: str
    family: str
    difference: float
    repeats_bits: bool
    error: str = ""

    @property
    def passed(self) -> bool:
        """True if the device computes what the CPU computes, but for rounding."""
        return self.difference <= TOLERANCE


@dataclass(frozen=True, repr=False)
class DeviceReport(Result):
    """What a device can do.

    Parameters
    ----------
    device : its torch name.
    hardware : what its maker calls it.
    torch : the version of torch.
    methods : every method with two families.
    speed : gradients of a block per second, as a multiple of the CPU's.
    largest_block : devices of a small net that fit into its memory at once; more than the largest tried are not tried.
    seconds : how long the self-test took.
    """

    device: str
    hardware: str
    torch: str
    methods: tuple[MethodOnDevice, ...]
    speed: float
    largest_block: int
    seconds: float

    @property
    def passed(self) -> bool:
        """True if every method computes what it computes on the CPU."""
        return all(one.passed for one in self.methods)

    @property
    def title(self) -> str:
        return f"{self.device} ({self.hardware}), torch {self.torch}"

    def records(self) -> list[Record]:
        rows = [
            {
                "what": f"{one.method} on {one.family}",
                "result": one.error or ("ok" if one.passed else "DIFFERS"),
                "difference": "0" if one.difference == 0 else f"{one.difference:.1e}",
                "repeats its bits": "yes" if one.repeats_bits else "no",
            }
            for one in self.methods
        ]
        varying = sorted({one.method for one in self.methods if not one.repeats_bits})
        more = "at least " if self.largest_block == LARGEST_BLOCK else ""
        facts = {
            "speed": f"{self.speed:.2f} times one core of the CPU",
            "largest block": f"{more}{self.largest_block} devices",
            "not deterministic": ", ".join(varying) or "none",
            "took": f"{self.seconds:.0f} s",
        }
        empty = {"difference": "", "repeats its bits": ""}
        return [*rows, *({"what": what, "result": text, **empty} for what, text in facts.items())]

    def content(self) -> dict[str, Any]:
        return {
            "device": self.device, "hardware": self.hardware, "torch": self.torch, "passed": self.passed,
            "methods": [vars(one) for one in self.methods], "speed": self.speed, "largest_block": self.largest_block,
            "seconds": self.seconds,
        }  # fmt: skip


def check_device(device: str, methods: Collection[str] = ()) -> DeviceReport:
    """Try every method on a torch device for three steps, and measure the device.

    Parameters
    ----------
    device
        The torch device.
    methods
        Names of built-in methods; by default all.

    Returns
    -------
    DeviceReport

    Examples
    --------
    >>> from fedloom.testing import check_device
    >>> check_device("cuda")
    """
    started, compute = time.perf_counter(), Compute(device)
    tried = tuple(_try_methods(sorted(methods or METHODS), compute))
    net = tiny_model("preresnet", (3, 16, 16), hidden=(16, 16))
    sizes = [2**power for power in range(int(math.log2(LARGEST_BLOCK)) + 1)]
    fitting = list(takewhile(lambda size: fits_memory(net, TIMED_BATCH, size, compute), sizes))
    block = min(TIMED_BLOCK, max(fitting, default=1))
    seconds = {
        where: statistics.median(gradient_seconds(net, TIMED_BATCH, block, where) for _ in range(TIMED))
        for where in ((ON_CPU, compute) if fitting else ())
    }
    speed = seconds[ON_CPU] / max(seconds[compute], 1e-9) if seconds else 0.0
    return DeviceReport(
        device, hardware_name(compute.torch_device), str(torch.__version__), tried, speed,
        max(fitting, default=0), time.perf_counter() - started,
    )  # fmt: skip


def _try_methods(names: Collection[str], compute: Compute) -> Iterator[MethodOnDevice]:
    for name in names:
        method = METHODS[name].from_settings(TINY_METHODS.get(name, {}), METHODS)
        home = home_family(method)
        others = (family for family in (*SECOND_FAMILIES, *sorted(MODELS)) if family != home)
        second = next((family for family in others if takes_family(method, family)), None)
        for family in filter(None, (home, second)):
            yield _try_method(name, method, family, compute)


def _try_method(name: str, method: Method, family: str, compute: Compute) -> MethodOnDevice:
    world = TinyWorld.for_method(method, family, sizes=SIZES, schedule=Schedule(BATCH))
    expected = _play(world, method, ON_CPU)
    try:
        found, again = _play(world, method, compute), _play(world, method, compute)
    except Exception as error:  # the table shows what failed, and the rest
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        return MethodOnDevice(name, family, math.nan, False, reason)
    return MethodOnDevice(name, family, relative_distance(found, expected), fingerprint(found) == fingerprint(again))


def _play(world: TinyWorld, method: Method, compute: Compute) -> Parcel:
    """What server and devices know after a round."""
    engine = world.engine(method, compute=compute)
    server = world.play(method, engine, rounds=1)
    states = {
        f"{device.name} {bundle}": tensors
        for device in world.fleet.devices(1)
        for bundle, tensors in engine.client_states.read(device).items()
    }
    return {**server, **states}
