"""How many devices of each tier to run as one network, measured here; the recipe then says it, so results stay a pure
function of the recipe."""

import re
import statistics
import time
from dataclasses import dataclass

import torch

from ...fleet import Fleet, Tier
from ...models import Draws, Model
from ...tensors import join
from ...training import Batch, gradient, towards_first_class

SIZES = (1, 2, 4, 8, 16)
NO_GAIN = 0.95  # a larger block must save at least a twentieth, or the smaller one is taken


@dataclass(frozen=True)
class Measured:
    """Milliseconds a device and gradient, by the number of devices at once, and the number to take."""

    tier: str
    milliseconds: dict[int, float]
    best: int


def calibrated(fleet: Fleet, batch_size: int, repeats: int = 5) -> list[Measured]:
    return [_measure(tier, batch_size, repeats) for tier in fleet.tiers]


def _measure(tier: Tier, batch_size: int, repeats: int) -> Measured:
    """Sizes in turn, again and again, so that a busy moment of the machine hits them alike."""
    times: dict[int, list[float]] = {size: [] for size in SIZES}
    for turn in range(repeats + 1):
        for size in SIZES:
            spent = _gradient_time(tier.model, batch_size, size)
            if turn:  # the first call builds what is kept
                times[size].append(1000 * spent / size)
    found = {size: statistics.median(spent) for size, spent in times.items()}
    best = SIZES[0]
    for size in SIZES[1:]:
        best = size if found[size] < NO_GAIN * found[best] else best
    return Measured(tier.name, found, best)


def _gradient_time(model: Model, batch_size: int, devices: int) -> float:
    """Of one gradient, which is most of a step; what is in the batch does not matter."""
    weights = {name: weight.clone() for name, weight in join([{"w": model.initial(0)}] * devices)["w"].items()}
    y = torch.zeros(devices, batch_size, dtype=torch.int64)
    batch = Batch(model.blank(devices, batch_size), y, Draws((0,) * devices))
    began = time.perf_counter()
    gradient(towards_first_class(model), weights, batch)
    return time.perf_counter() - began


def with_blocks(text: str, measured: list[Measured]) -> str:
    """A recipe's text with the numbers in it, everything else left as it stands."""
    inside = ", ".join(f"{one.tier} = {one.best}" for one in measured)
    line = f"blocks = {{ {inside} }}"
    if re.search(r"^blocks\s*=.*$", text, re.MULTILINE):
        return re.sub(r"^blocks\s*=.*$", line, text, flags=re.MULTILINE)
    if re.search(r"^\[engine\]\s*$", text, re.MULTILINE):
        return re.sub(r"^\[engine\]\s*$", f"[engine]\n{line}", text, flags=re.MULTILINE)
    return f"{text.rstrip()}\n\n[engine]\n{line}\n"
