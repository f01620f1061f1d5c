"""Data sets, how they are shared out among devices, and how their examples become a model's input.

A reader is a function of keyword options that returns a `Dataset`; the data directory comes as `folder` if it asks.
"""

from collections.abc import Callable

from .bundled_sets import digits, fashion_mini
from .catalog import FACTS, Facts, facts_of, made_up_labels
from .cifar import cifar10, cifar100
from .dataset import DataBroken, DataError, DataMissing, Dataset, Examples
from .embeddings import word_vectors
from .idx import fashion_mnist, mnist
from .npz import npz, pathmnist, pneumoniamnist
from .partition import Labels, Partition, labels_of
from .partitions import PARTITIONS, at_most, correlate_tiers_with_labels, held_out, subsample
from .preparation import PREPARATIONS, Preparation
from .sentiment140 import sentiment140
from .wikitext import wikitext2

__all__ = [
    "DATASETS",
    "FACTS",
    "PARTITIONS",
    "PREPARATIONS",
    "DataBroken",
    "DataError",
    "DataMissing",
    "Dataset",
    "Examples",
    "Facts",
    "Labels",
    "Partition",
    "Preparation",
    "at_most",
    "correlate_tiers_with_labels",
    "facts_of",
    "held_out",
    "labels_of",
    "made_up_labels",
    "subsample",
    "word_vectors",
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
    "wikitext2": wikitext2,
    "sentiment140": sentiment140,
    "npz": npz,
}
