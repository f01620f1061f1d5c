"""Data that is easy to learn for the modules of the zoo, and a method that can be interrupted; for `--with`."""

from pathlib import Path
from typing import Any

import torch

from fedloom.data import Dataset, Examples, Preparation
from fedloom.methods import METHODS as KNOWN

CLASSES, VOCABULARY = 4, 11
TRAINING, TEST = 96, 40


def _numbers(name: str, shape: tuple[int, ...]) -> Dataset:
    """A pattern for each label under noise."""

    def draw(count: int, seed: int) -> Examples:
        generator = torch.Generator().manual_seed(seed)
        patterns = torch.randn(CLASSES, *shape, generator=torch.Generator().manual_seed(9))
        y = torch.arange(count) % CLASSES
        return Examples(patterns[y] + 0.5 * torch.randn(count, *shape, generator=generator), y)

    return Dataset(name, draw(TRAINING, 1), draw(TEST, 2), CLASSES, Preparation())


def zoo_images() -> Dataset:
    return _numbers("zoo_images", (1, 8, 8))


def zoo_series() -> Dataset:
    return _numbers("zoo_series", (7, 3))


def zoo_signals() -> Dataset:
    return _numbers("zoo_signals", (2, 16))


def zoo_tokens() -> Dataset:
    """Rows in which two tokens of the label occur among others; 0 stands for padding."""

    def draw(count: int, seed: int) -> Examples:
        generator = torch.Generator().manual_seed(seed)
        y = torch.arange(count) % CLASSES
        x = torch.randint(0, VOCABULARY, (count, 6), generator=generator)
        x[:, 1:5] = 1 + 2 * y.unsqueeze(1) + torch.randint(0, 2, (count, 4), generator=generator)
        return Examples(x, y)

    return Dataset("zoo_tokens", draw(TRAINING, 1), draw(TEST, 2), CLASSES, Preparation(), tokens=VOCABULARY)


class Stopped(KNOWN["fedavg"]):  # type: ignore[misc]
    """FedAvg that is interrupted in its second round while there is a file `stop`."""

    def round(self, server: Any, context: Any) -> Any:
        if context.number == 2 and Path("stop").exists():
            raise KeyboardInterrupt
        return super().round(server, context)


DATASETS = {"zoo_images": zoo_images, "zoo_series": zoo_series, "zoo_signals": zoo_signals, "zoo_tokens": zoo_tokens}
METHODS = {"stopped": Stopped}
