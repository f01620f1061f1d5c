"""Data sets, how they are shared out among devices, and how their examples become a model's input.

A reader is a function of keyword options that returns a `Dataset`; the data directory comes as `folder` if it asks.
"""

from collections.abc import Callable

from fedloom.data.cifar import cifar10, cifar100
from fedloom.data.examples import DataBroken, DataMissing, Dataset, Examples
from fedloom.data.facts import FACTS, Facts
from fedloom.data.idx import fashion_mnist, mnist
from fedloom.data.npz import npz, pathmnist, pneumoniamnist
from fedloom.data.partition import PARTITIONS, Labels, Partition, tie_to_labels
from fedloom.data.preparation import PREPARATIONS, Preparation
from fedloom.data.shipped import digits, fashion_mini

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
