"""Normalization by the training set: its mean and standard deviation become part of a data set's preparation."""

import logging
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from .dataset import DataBroken, Dataset

logger = logging.getLogger(__name__)

ROWS = 4096  # examples in double precision at a time


def normalize_by_training_set(dataset: Dataset) -> Dataset:
    """The same data set with a preparation that normalizes.

    Mean and standard deviation are those of the training examples alone: per channel of images and time series, per
    feature of rows. What is constant in training is only shifted.

    Parameters
    ----------
    dataset : the data set, whose preparation does not normalize yet.
    """
    x = dataset.train.x
    if x.dtype != torch.uint8 and not x.is_floating_point():
        raise DataBroken(f"{dataset.name}: token ids cannot be normalized", "Leave normalize out.")
    if dataset.preparation.mean:
        raise DataBroken(
            f"{dataset.name}: the preparation normalizes already", "Leave normalize, or mean and std, out."
        )
    mean, std = compute_normalization(x)
    constant = int((std <= 1e-7 * mean.abs().clamp(min=1)).sum())
    if constant:
        what = "features" if x.dim() == 2 else "channels"
        logger.warning("%s: %d of %d %s are constant and only shifted", dataset.name, constant, len(std), what)
    std = torch.where(std <= 1e-7 * mean.abs().clamp(min=1), 1.0, std)
    preparation = replace(dataset.preparation, mean=tuple(mean.tolist()), std=tuple(std.tolist()))
    return replace(dataset, preparation=preparation)


def compute_normalization(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation along the second axis, in double precision; bytes are divided by 255.

    Parameters
    ----------
    x : examples [n, channels, ...].
    """
    scale = 255.0 if x.dtype == torch.uint8 else 1.0
    mean = _mean(x, lambda rows: rows / scale)
    variance = _mean(x, lambda rows: (rows / scale - mean.view(-1, *[1] * (x.dim() - 2))) ** 2)
    return mean, variance.sqrt()


def _mean(x: Tensor, transform: Callable[[Tensor], Tensor]) -> Tensor:
    axes = tuple(axis for axis in range(x.dim()) if axis != 1)
    total = sum(transform(rows.double()).sum(axes) for rows in x.split(ROWS))
    return torch.as_tensor(total) / (x.numel() / x.shape[1])
