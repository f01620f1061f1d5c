"""Data sets, how they are shared out among devices, and how their examples become a model's input.

A reader is a function of keyword options that returns a `Dataset`; the data directory comes as `folder` if it asks.
"""

from collections.abc import Callable

from .cifar import cifar10, cifar100
from .examples import DataBroken, DataMissing, Dataset, Examples
from .facts import FACTS, Facts
from .idx import fashion_mnist, mnist
from .npz import npz, pathmnist, pneumoniamnist
from .partition import PARTITIONS, Labels, Partition, at_most, held_out, thinned, tie_to_labels
from .preparation import PREPARATIONS, Preparation
from .shipped import digits, fashion_mini

__all__ = [
    "DATASETS",
    "FACTS",
    "PARTITIONS",
    "PREPARATIONS",
    "DataBroken",
    "DataMissing",
    "Dataset",
    "Examples",
    "Facts",
    "Labels",
    "Partition",
    "Preparation",
    "at_most",
    "held_out",
    "thinned",
    "tie_to_labels",
]

DATASETS: dict[str, Callable[..., Dataset]] = {
    "digits": digits,
    "fashion-mini": fashion_mini,
    "mnist": mnist,
    "fashion-mnist": fashion_mnist,
    "cifar10": cifar10,
    "cifar100": cifar100,
    "pathmnist": pathmnist,
    "pneumoniamnist": pneumoniamnist,
    "npz": npz,
}
