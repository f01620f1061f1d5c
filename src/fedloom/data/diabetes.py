"""The diabetes data of Efron et al., Least Angle Regression, 2004: a bundled set for regression."""

from pathlib import Path

import numpy as np
import torch

from .dataset import Dataset, Examples
from .npz import read_npz
from .preparation import PREPARATIONS
from .tasks import TASKS

_FILE = Path(__file__).parent / "bundled" / "diabetes.npz"
_AGE = 0  # the column of the patient's age


def diabetes() -> Dataset:
    """Progression of diabetes a year after ten measurements, part of the package: 354 + 88 patients, regression.

    Measurements and targets are standardized by the mean and standard deviation of the training patients, so an error
    of 1 is that of always predicting the mean. A group is a decade of age.
    """
    arrays = read_npz(_FILE)
    parts = (arrays.train_images, arrays.train_labels), (arrays.test_images, arrays.test_labels)
    columns, targets = parts[0][0].astype(np.float64), parts[0][1].astype(np.float64)
    train, test = (
        Examples(
            torch.from_numpy(((x - columns.mean(0)) / columns.std(0)).astype(np.float32)),
            torch.from_numpy(((y - targets.mean()) / targets.std()).astype(np.float32)),
        )
        for x, y in parts
    )
    decades = tuple(torch.from_numpy(x[:, _AGE] // 10).long() for x, _ in parts)
    return Dataset(
        "diabetes", train, test, 1, PREPARATIONS["plain"], groups=(decades[0], decades[1]), task=TASKS["regression"]
    )
