"""The workload of all systems; imports only torch, since every system's interpreter imports it.

In every round all devices train the same network for the same number of steps of ten examples, and the server takes the
mean. There is no evaluation.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import isolated, plain

BATCH = 10
RATE, MOMENTUM, DECAY, CLIP = 0.01, 0.9, 5e-4, 1.0


@dataclass(frozen=True)
class Workload:
    name: str
    channels: tuple[int, ...]
    devices: int = 20
    steps: int = 10
    rounds: int = 4
    workers: int = 1

    @property
    def share(self) -> int:
        """Examples per device."""
        return self.steps * BATCH


@dataclass
class Laps:
    """Seconds of every round; the first includes startup and imports."""

    last: float = field(default_factory=time.perf_counter)
    seconds: list[float] = field(default_factory=list)

    def lap(self) -> None:
        now = time.perf_counter()
        self.seconds.append(now - self.last)
        self.last = now


class Net(nn.Module):
    """HeteroFL's convolutional network of one width. Batch norm without running statistics: none to average."""

    def __init__(self, channels: Sequence[int]):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after, track_running_stats=False), nn.ReLU()
            )
            for before, after in zip([1, *channels], channels, strict=False)
        )
        self.classifier = nn.Linear(channels[-1], 10)

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = block(nn.functional.max_pool2d(x, 2) if number else x)
        logits: Tensor = self.classifier(x.mean((-2, -1)))
        return logits


@lru_cache(maxsize=1)
def net(workload: Workload) -> Net:
    torch.set_num_threads(1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Net(workload.channels)


def initial_weights(workload: Workload) -> dict[str, Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return {name: weight.detach().clone() for name, weight in Net(workload.channels).named_parameters()}


@lru_cache(maxsize=1)
def raw_examples(workload: Workload) -> tuple[Tensor, Tensor]:
    """All devices' images as bytes, and their labels; each device has the same number of each label."""
    draw = torch.Generator().manual_seed(0)
    shape = (workload.devices * workload.share, 1, 28, 28)
    x = torch.randint(0, 256, shape, dtype=torch.uint8, generator=draw)
    # in random order, so that it makes no difference that only fedloom shuffles
    y = torch.cat([torch.randperm(workload.share, generator=draw) % 10 for _ in range(workload.devices)])
    return x, y


@lru_cache(maxsize=1)
def examples(workload: Workload) -> tuple[Tensor, Tensor]:
    """The same as floats in [0, 1]."""
    x, y = raw_examples(workload)
    return x.float() / 255, y


def device_examples(workload: Workload, device: int) -> tuple[Tensor, Tensor]:
    """The examples of one device."""
    rows = slice(device * workload.share, (device + 1) * workload.share)
    x, y = examples(workload)
    return x[rows], y[rows]


def train_device(workload: Workload, weights: dict[str, Tensor], device: int) -> dict[str, Tensor]:
    """Train one device for a round by the plain loop."""
    x, y = device_examples(workload, device)
    plain.train(net(workload), weights, list(zip(x.split(BATCH), y.split(BATCH), strict=True)))
    return {name: weight.detach().clone() for name, weight in net(workload).named_parameters()}


@torch.no_grad()
def loss(workload: Workload, weights: dict[str, Tensor]) -> float:
    """Loss of the final model on a few examples: systems that did the same work end close to each other."""
    x, y = (part[:100] for part in examples(workload))
    return float(nn.functional.cross_entropy(torch.func.functional_call(net(workload), weights, x), y))


def read_input() -> Workload:
    task = isolated.read_input()
    return Workload(**{**task, "channels": tuple(task["channels"])})


def write_result(workload: Workload, laps: Laps, weights: dict[str, Tensor], version: str) -> None:
    result: dict[str, Any] = {"rounds": laps.seconds, "loss": loss(workload, weights), "version": version}
    isolated.write_result(result)
