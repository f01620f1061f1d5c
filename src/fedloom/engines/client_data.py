"""What each simulated device holds: its own rows of the data, reached by name."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..client import PaddedIndices
from ..data import IGNORED, Dataset, Partition
from ..evaluation.test_set import local_order
from ..fleet import Device, Fleet
from ..models import Model


@dataclass(frozen=True)
class ClientData:
    """What each simulated device holds: its own rows of a data set.

    Parameters
    ----------
    dataset : the data set of all devices.
    train : the training rows of each device, by name.
    test : the test rows of each device, by name.
    sizes : the models of the tiers that take part, by name.
    seed : the seed of the run.
    """

    dataset: Dataset
    train: dict[str, Tensor]
    test: dict[str, Tensor]
    sizes: dict[str, Model] = field(default_factory=dict)
    seed: int = 0

    def rows(self, device: Device) -> Tensor:
        """A device's training rows; a pseudo-device that gathers others holds theirs, the server none.

        Parameters
        ----------
        device : the device.
        """
        if device.is_server:
            return torch.zeros(0, dtype=torch.int64)
        if device.pooled_from:
            return torch.cat([self.train[name] for name in device.pooled_from])
        return self.train[device.name]

    def count(self, device: Device) -> int:
        """The number of a device's training examples.

        Parameters
        ----------
        device : the device.
        """
        if device.is_server:
            return 0
        return sum(len(self.train[name]) for name in device.pooled_from or (device.name,))

    def seen_labels(self, device: Device) -> Tensor:
        """Which labels a device has, booleans [classes]; all if the task is not about labels that a device may lack.

        Parameters
        ----------
        device : the device.
        """
        if not self.dataset.task.has_label_sets:
            return torch.ones(self.dataset.classes, dtype=torch.bool)
        labels = self.dataset.train.y[self.rows(device)].flatten()
        if self.dataset.task.positions:
            labels = labels[labels != IGNORED]
        return torch.bincount(labels, minlength=self.dataset.classes) > 0

    def tests(self, device: Device) -> Tensor:
        """A device's test rows, for a batch-dependent model in an order of its own.

        Parameters
        ----------
        device : the device.
        """
        rows = self.test.get(device.name, torch.zeros(0, dtype=torch.int64))
        if self.dataset.task.is_sequence or not device.model.is_batch_dependent():
            return rows
        return rows[local_order(len(rows), self.seed, device.name)]


def pad_indices(held: Sequence[Tensor]) -> PaddedIndices:
    """The rows of a block, the shorter lists padded with their own first row."""
    longest = max(len(rows) for rows in held)
    rows = torch.zeros(len(held), longest, dtype=torch.int64)
    real = torch.zeros(len(held), longest, dtype=torch.bool)
    for number, own in enumerate(held):
        rows[number, : len(own)] = own
        rows[number, len(own) :] = own[0] if len(own) else 0
        real[number, : len(own)] = True
    return PaddedIndices(rows, real, tuple(map(len, held)))


MANY_IN_MATRICES = 250_000
"""Weights of linear layers beyond which the lane kernels run a device alone; bits do not depend on it."""


def devices_at_once(model: Model) -> int:
    """How many devices to run as one network. `fedloom calibrate` measures instead.

    Narrow layers waste most of a core on overhead, wide ones nothing. It is a fixed rule, not a timing, so that results
    do not depend on the machine.

    Parameters
    ----------
    model : the devices' model.
    """
    if not model.is_foldable():
        return 1  # side by side it would take as long as one after the other
    in_matrices = sum(math.prod(shape) for shape in model.shapes().values() if len(shape) == 2)
    if in_matrices > MANY_IN_MATRICES and model.trains_interleaved():
        return 1  # their time is that of reading them, and those of several devices do not fit into a cache
    widest = max((shape[0] for shape in model.shapes().values() if len(shape) > 2), default=64)
    return next(count for limit, count in ((128, 8), (256, 4), (math.inf, 1)) if widest <= limit)


DevicesPerBlock = int | Mapping[str, int] | None
"""Devices that run as one network: in every tier, tier by tier, or by the rule of `devices_at_once`."""


def block_size(setting: DevicesPerBlock, device: Device) -> int:
    return block_size_of(setting, device.tier, device.model)


def block_size_of(setting: DevicesPerBlock, tier: str, model: Model) -> int:
    """How many devices of a tier run as one network."""
    chosen = setting.get(tier) if isinstance(setting, Mapping) else setting
    return chosen or devices_at_once(model)


def build_client_data(dataset: Dataset, partition: Partition, fleet: Fleet) -> ClientData:
    """The data of every device of a fleet.

    Parameters
    ----------
    dataset : the data set.
    partition : which rows each device holds, in index order.
    fleet : the fleet.
    """
    names = [fleet.name(index) for index in range(fleet.size)]
    return ClientData(
        dataset,
        {name: torch.from_numpy(rows) for name, rows in zip(names, partition.train, strict=True)},
        {name: torch.from_numpy(rows) for name, rows in zip(names, partition.test, strict=True)},
        {tier.name: tier.model for tier in fleet.active_tiers},
        fleet.seed,
    )
