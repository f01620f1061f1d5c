"""The work that every side does; imports nothing but torch, since every side's interpreter imports it.

All devices take part in every round, train the same net for the same number of steps of ten examples, and the server
takes the mean. Nobody evaluates.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import apart, plain

BATCH = 10
RATE, MOMENTUM, DECAY, CLIP = 0.01, 0.9, 5e-4, 1.0


@dataclass(frozen=True)
class Block:
    name: str
    channels: tuple[int, ...]
    devices: int = 20
    steps: int = 10
    rounds: int = 4
    workers: int = 1

    @property
    def share(self) -> int:
        """Examples a device holds."""
        return self.steps * BATCH


@dataclass
class Laps:
    """Seconds of every round; the first includes all it takes to start, imports of the system too."""

    last: float = field(default_factory=time.perf_counter)
    seconds: list[float] = field(default_factory=list)

    def lap(self) -> None:
        now = time.perf_counter()
        self.seconds.append(now - self.last)
        self.last = now


class Net(nn.Module):
    """HeteroFL's convolutional net of one width; its batch norm keeps no statistics, so there are none to average."""

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
def net(work: Block) -> Net:
    torch.set_num_threads(1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Net(work.channels)


def initial(work: Block) -> dict[str, Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return {name: weight.detach().clone() for name, weight in Net(work.channels).named_parameters()}


@lru_cache(maxsize=1)
def pixels(work: Block) -> tuple[Tensor, Tensor]:
    """All devices' images as bytes, and their labels; every device holds the same number of each label."""
    draw = torch.Generator().manual_seed(0)
    shape = (work.devices * work.share, 1, 28, 28)
    x = torch.randint(0, 256, shape, dtype=torch.uint8, generator=draw)
    # in random order, so that it does not matter that fedloom shuffles and the others do not
    y = torch.cat([torch.randperm(work.share, generator=draw) % 10 for _ in range(work.devices)])
    return x, y


@lru_cache(maxsize=1)
def examples(work: Block) -> tuple[Tensor, Tensor]:
    """The same, ready to be trained on."""
    x, y = pixels(work)
    return x.float() / 255, y


def own(work: Block, device: int) -> tuple[Tensor, Tensor]:
    """What one device holds."""
    here = slice(device * work.share, (device + 1) * work.share)
    x, y = examples(work)
    return x[here], y[here]


def trained(work: Block, weights: dict[str, Tensor], device: int) -> dict[str, Tensor]:
    """One device's round in the ordinary loop."""
    x, y = own(work, device)
    plain.train(net(work), weights, list(zip(x.split(BATCH), y.split(BATCH), strict=True)))
    return {name: weight.detach().clone() for name, weight in net(work).named_parameters()}


@torch.no_grad()
def loss(work: Block, weights: dict[str, Tensor]) -> float:
    """Of the final model on a few examples: sides that did the same work end close to each other."""
    x, y = (part[:100] for part in examples(work))
    return float(nn.functional.cross_entropy(torch.func.functional_call(net(work), weights, x), y))


def read() -> Block:
    said = apart.read()
    return Block(**{**said, "channels": tuple(said["channels"])})


def answer(work: Block, laps: Laps, weights: dict[str, Tensor], version: str) -> None:
    found: dict[str, Any] = {"rounds": laps.seconds, "loss": loss(work, weights), "version": version}
    apart.answer(found)
