"""What a task sees on a device. Tensors have a leading device axis, so a task runs for one device or for a block."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..data import Examples, Preparation
from ..models import Model, StepSeeds
from ..tensors import Parcel, Tensors, combine, per_device
from .optimizers import Optimizer
from .plan import Step


@dataclass(frozen=True)
class Batch:
    x: Tensor  # [K, batch, ...]
    y: Tensor  # [K, batch]
    step_seeds: StepSeeds | None = None  # None: evaluation mode
    label_smoothing: float = 0.0
    positions: Tensor | None = None
    number: int = 0  # of the step

    @property
    def example_positions(self) -> Tensor:
        """[K, batch]: the index of each example in its device's own list."""
        assert self.positions is not None
        return self.positions

    def cyclic_rows(self, count: int, of: int) -> Tensor:
        """`count` of `of` row numbers: successive steps cycle through all of them."""
        return (self.number * count + torch.arange(count)) % of


AuxiliaryLoss = Callable[[Tensors, Batch], Tensor]
"""(weights, batch) -> a loss, [K], that is added to a task's own."""


@dataclass(frozen=True)
class PaddedIndices:
    """Row numbers of a block's examples; the shorter lists are padded."""

    rows: Tensor  # [K, longest]
    real: Tensor  # [K, longest] booleans: False for padding


@dataclass(frozen=True)
class Client:
    """A block of devices, as a task sees it."""

    model: Model
    optimizer: Optimizer
    examples: Examples  # of all devices: use `batch` and `train_batches`, which read only a device's own
    tests: Examples
    test_indices: PaddedIndices
    preparation: Preparation
    plan: tuple[Step, ...]
    seen_labels: Tensor  # [K, classes] booleans
    state: Parcel  # kept from round to round
    label_smoothing: float = 0.0
    tier_models: Mapping[str, Model] = field(default_factory=dict)
    train_indices: PaddedIndices | None = None  # all training examples, in their device's order
    auxiliary_loss: AuxiliaryLoss | None = None

    def batch(self, step: Step) -> Batch:
        x = self.preparation(self.examples.x[step.rows], step.augmentation or None)
        y = self.examples.y[step.rows]
        return Batch(x, y, step.step_seeds, self.label_smoothing, step.positions, step.number)

    @property
    def num_examples(self) -> int:
        """Training examples per device; the minimum if the block's devices differ."""
        return 0 if self.train_indices is None else int(self.train_indices.real.sum(1).min())

    def train_batches(self, size: int) -> Iterator[tuple[Batch, Tensor]]:
        """The training examples in order, without augmentation, and which of them are not padding."""
        assert self.train_indices is not None
        yield from self._batches(self.examples, self.train_indices, size)

    def test_batches(self, size: int) -> Iterator[tuple[Batch, Tensor]]:
        """The devices' own test examples in order, and which of them are not padding."""
        yield from self._batches(self.tests, self.test_indices, size)

    def _batches(self, store: Examples, indices: PaddedIndices, size: int) -> Iterator[tuple[Batch, Tensor]]:
        for start in range(0, indices.rows.shape[1], size):
            rows, real = indices.rows[:, start : start + size], indices.real[:, start : start + size]
            yield Batch(self.preparation(store.x[rows]), store.y[rows]), real


@dataclass(frozen=True)
class ClientResult:
    """What a task returns: the upload, and the device's new state (None: unchanged)."""

    upload: Parcel
    state: Parcel | None = None


@torch.no_grad()
def sum_batch_statistics(client: Client, weights: Tensors, max_batches: int | None) -> tuple[dict[str, Tensor], Tensor]:
    """Sums of the batches' means and variances over the plan, and the number of batches of each device: [K]."""
    devices = len(client.seen_labels)
    total = {name: torch.zeros(devices, *shape) for name, shape in client.model.statistics().items()}
    batches = torch.zeros(devices, dtype=torch.int32)
    for step in client.plan[:max_batches]:
        statistics = client.model.batch_statistics(weights, client.batch(step).x)
        counts = step.active.bool() & _is_finite(statistics)  # a single value has no variance
        for name, sums in total.items():
            sums += torch.where(per_device(counts, sums), statistics[name], 0)
        batches += counts
    return total, batches


def with_batchnorm_statistics(client: Client, weights: Tensors) -> dict[str, Tensor]:
    """The weights with the statistics of the device's own data, unless they contain statistics already."""
    if client.model.statistics().keys() <= weights.keys():
        return dict(weights)
    total, batches = sum_batch_statistics(client, weights, None)
    return {**weights, **combine(lambda sums: sums / per_device(batches.to(sums), sums), total)}


def _is_finite(tensors: Tensors) -> Tensor:
    """[K]: True for devices whose tensors are all finite."""
    each = [torch.isfinite(tensor).reshape(len(tensor), -1).all(1) for tensor in tensors.values()]
    return torch.stack(each).all(0)
