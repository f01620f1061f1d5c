"""Data sets, their partitions over devices, and the preparation of their examples for a model.

A reader is a function from keyword options to a `Dataset`; a parameter `folder` receives the data directory.
"""

from collections.abc import Callable

from ..registry import Registry
from .adapters import as_dataset
from .catalog import DATASET_INFO, DatasetInfo, describe_deviation, lookup_dataset_info, synthetic_labels
from .checks import check_values
from .cifar import cifar10, cifar100
from .dataset import DataBroken, DataError, DataMissing, Dataset, Examples
from .diabetes import diabetes
from .digit_canvases import digits_multilabel, digits_segmentation
from .embeddings import read_word_vectors
from .folders import folder
from .idx import fashion_mnist, mnist
from .npz import digits, fashion_mini, npz, pathmnist, pneumoniamnist
from .partition import Labels, Partition, extract_labels
from .partitions import PARTITIONS, correlate_tiers_with_labels, hold_out, limit_examples, subsample
from .preparation import PREPARATIONS, Preparation
from .sentiment140 import sentiment140
from .tasks import CLASSIFICATION, IGNORED, TASKS, LearningTask
from .ucihar import ucihar
from .wikitext import wikitext2

__all__ = [
    "CLASSIFICATION", "DATASETS", "DATASET_INFO", "IGNORED", "PARTITIONS", "PREPARATIONS", "TASKS", "DataBroken",
    "DataError", "DataMissing", "Dataset", "DatasetInfo", "Examples", "Labels", "LearningTask", "Partition",
    "Preparation", "as_dataset", "check_values", "correlate_tiers_with_labels", "describe_deviation",
    "extract_labels", "hold_out", "limit_examples", "lookup_dataset_info", "read_word_vectors", "subsample",
    "synthetic_labels",
]  # fmt: skip

DATASETS: Registry[Callable[..., Dataset]] = Registry(
    "datasets",
    {
        "digits": digits,
        "fashion-mini": fashion_mini,
        "diabetes": diabetes,
        "digits-multilabel": digits_multilabel,
        "digits-segmentation": digits_segmentation,
        "mnist": mnist,
        "fashion-mnist": fashion_mnist,
        "cifar10": cifar10,
        "cifar100": cifar100,
        "pathmnist": pathmnist,
        "pneumoniamnist": pneumoniamnist,
        "wikitext2": wikitext2,
        "sentiment140": sentiment140,
        "ucihar": ucihar,
        "npz": npz,
        "folder": folder,
    },
    passed=("folder", "task"),
)
