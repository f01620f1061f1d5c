"""What a task sees on a device. Tensors have a leading device axis, so a task runs for one device or for a block."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..data import CLASSIFICATION, IGNORED, Examples, LearningTask, Preparation
from ..models import Model, Outputs, StepSeeds
from ..tensors import Parcel, Tensors, combine, finite_devices, per_device
from .optimizers import JoinedOptimizer, Optimizer
from .plan import Step

LossFunction = Callable[[Tensor, Tensor], Tensor]
"""(outputs [examples, outputs], targets) -> one number per example."""


@dataclass(frozen=True)
class Batch:
    """A batch of each device of a block.

    Parameters
    ----------
    x : prepared inputs, [K, batch, ...].
    y : labels, [K, batch], or [K, batch, length] if every token has one; or other targets of the task.
    step_seeds : the seeds of the training step; None: evaluation mode.
    loss : of logits and labels; None: cross entropy.
    positions : the index of each example in its device's own list, [K, batch].
    number : the number of the step, from 0.
    active : [K], 1 for devices that take the step, else 0; None: all take it.
    loss_scale : what `gradient` multiplies each device's loss by, and divides its gradient by, [K]: in float16 small
        gradients would be rounded to zero; None: nothing.
    lengths : how many examples of each device are not padding, which comes last; (): none is.
    """

    x: Tensor
    y: Tensor
    step_seeds: StepSeeds | None = None
    loss: LossFunction | None = None
    positions: Tensor | None = None
    number: int = 0
    active: Tensor | None = None
    loss_scale: Tensor | None = None
    lengths: tuple[int, ...] = ()

    @property
    def example_positions(self) -> Tensor:
        """[K, batch]: the index of each example in its device's own list."""
        assert self.positions is not None
        return self.positions

    @property
    def takes_step(self) -> Tensor:
        """[K]: 1 for devices that take the step, else 0. A task that sums over its batches counts only these."""
        return self.x.new_ones(len(self.x)) if self.active is None else self.active

    def cyclic_rows(self, count: int, of: int) -> Tensor:
        """Row numbers for this step; successive steps cycle through all of them.

        Parameters
        ----------
        count : how many rows.
        of : the number of rows to choose from.
        """
        return (self.number * count + torch.arange(count, device=self.x.device)) % of


AuxiliaryLoss = Callable[[Tensors, Batch], Tensor]
"""(weights, batch) -> a loss, [K], that is added to a task's own."""


@dataclass(frozen=True)
class PaddedIndices:
    """Row numbers of a block's examples; the shorter lists are padded.

    Parameters
    ----------
    rows : row numbers, [K, longest].
    real : booleans, [K, longest]: False for padding, which comes last.
    lengths : how many rows of each device are not padding, known without reading a tensor.
    """

    rows: Tensor
    real: Tensor
    lengths: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.lengths:
            object.__setattr__(self, "lengths", tuple(self.real.sum(1).tolist()))


@dataclass(frozen=True)
class Client:
    """A block of devices, as a task sees it.

    Parameters
    ----------
    model : the devices' model.
    optimizer : the optimizer of this round; `learning_rates` has its learning rate.
    examples : the training examples of all devices: use `batch` and `train_batches`, which read only a device's own.
    tests : the test examples of all devices: use `test_batches`.
    test_indices : the test examples of each device.
    preparation : how stored examples become the model's input.
    plan : the training steps, which `fit` goes through; `step.active`, [K], is 0 for devices that do not take the step.
    seen_labels : the labels that each device has, booleans [K, classes]; all where a task has no such labels.
    state : what the devices keep from round to round.
    loss : of logits and labels; None: cross entropy.
    tier_models : the model of every tier that takes part, by name.
    train_indices : all training examples of each device, in their device's order.
    auxiliary_loss : a loss that `fit` adds to the task's own.
    task : what is learned.
    """

    model: Model
    optimizer: Optimizer
    examples: Examples
    tests: Examples
    test_indices: PaddedIndices
    preparation: Preparation
    plan: tuple[Step, ...]
    seen_labels: Tensor
    state: Parcel
    loss: LossFunction | None = None
    tier_models: Mapping[str, Model] = field(default_factory=dict)
    train_indices: PaddedIndices | None = None
    auxiliary_loss: AuxiliaryLoss | None = None
    task: LearningTask = CLASSIFICATION

    def batch(self, step: Step) -> Batch:
        """The batch of a training step, with its augmentation.

        Parameters
        ----------
        step : a step of the plan.
        """
        x = self.preparation(self.examples.x[step.rows], step.augmentation or None)
        y = self.examples.y[step.rows]
        return Batch(x, y, step.step_seeds, self.loss, step.positions, step.number, step.active)

    @property
    def learning_rates(self) -> Tensor:
        """The learning rate of each device in this round, [K]; those of experiments that share a block may differ."""
        if isinstance(self.optimizer, JoinedOptimizer):
            return self.optimizer.learning_rates
        dtype = torch.get_default_dtype()
        return self.seen_labels.new_full((len(self.seen_labels),), self.optimizer.lr, dtype=dtype)

    @property
    def num_examples(self) -> int:
        """Training examples per device; the minimum if the block's devices differ."""
        return 0 if self.train_indices is None else min(self.train_indices.lengths)

    def label_counts(self) -> Tensor:
        """How many training examples, or tokens, of each device have each label, [K, classes]; whole numbers."""
        assert self.train_indices is not None
        labels, real = self.examples.y[self.train_indices.rows], self.train_indices.real
        real = real.view(*real.shape, *[1] * (labels.dim() - 2)).expand_as(labels) & (labels != IGNORED)
        counts = self.seen_labels.new_zeros(self.seen_labels.shape, dtype=torch.get_default_dtype())
        return counts.scatter_add_(1, labels.masked_fill(~real, 0).flatten(1), real.flatten(1).to(counts))

    def train_batches(self, size: int) -> Iterator[tuple[Batch, Tensor]]:
        """The training examples in order, without augmentation, and which of them are not padding, [K, batch].

        How long the padding is depends on the other devices of the block: declare the task with
        `@on_device(..., batch_across_runs=False)`.

        Parameters
        ----------
        size : the batch size.
        """
        assert self.train_indices is not None
        yield from self._batches(self.examples, self.train_indices, size)

    def test_batches(self, size: int) -> Iterator[tuple[Batch, Tensor]]:
        """The devices' own test examples in order, and which of them are not padding, [K, batch].

        Parameters
        ----------
        size : the batch size.
        """
        yield from self._batches(self.tests, self.test_indices, size)

    def _batches(self, store: Examples, indices: PaddedIndices, size: int) -> Iterator[tuple[Batch, Tensor]]:
        for start in range(0, indices.rows.shape[1], size):
            rows, real = indices.rows[:, start : start + size], indices.real[:, start : start + size]
            lengths = tuple(min(max(length - start, 0), rows.shape[1]) for length in indices.lengths)
            yield Batch(self.preparation(store.x[rows]), store.y[rows], lengths=lengths), real


@dataclass(frozen=True)
class ClientResult:
    """What a task returns.

    Parameters
    ----------
    upload : what is sent to the server: the bundles that the task declares with `sends`.
    state : the device's new state; None: unchanged.

    Examples
    --------
    >>> ClientResult(upload={"weights": shared}, state={"weights": private})
    """

    upload: Parcel
    state: Parcel | None = None


@torch.no_grad()
def sum_batch_statistics(client: Client, weights: Tensors, max_batches: int | None) -> tuple[dict[str, Tensor], Tensor]:
    """Sums of the means and variances of the plan's batches, for static batch norm.

    Parameters
    ----------
    client : the devices.
    weights : their weights, [K, ...].
    max_batches : the largest number of batches; None: the whole plan.

    Returns
    -------
    The sums, by name of the statistic, and the number of batches of each device, [K].
    """
    devices = len(client.seen_labels)
    place = client.seen_labels.device
    total = {name: torch.zeros(devices, *shape, device=place) for name, shape in client.model.statistics().items()}
    batches = torch.zeros(devices, dtype=torch.int32, device=place)
    for step in client.plan:
        if max_batches is not None and step.number >= max_batches:
            continue
        statistics = client.model.batch_statistics(weights, client.batch(step).x, step.step_seeds)
        counts = step.active.bool() & finite_devices(statistics)  # a single value has no variance
        for name, sums in total.items():
            sums += torch.where(per_device(counts, sums), statistics[name], 0)
        batches += counts
    return total, batches


def with_batchnorm_statistics(client: Client, weights: Tensors) -> dict[str, Tensor]:
    """The weights with the statistics of the device's own data, unless they contain statistics already.

    With them a model with batch norm runs in evaluation mode on a device; for other models nothing is added.

    Parameters
    ----------
    client : the devices.
    weights : their weights, [K, ...].

    Examples
    --------
    >>> evaluated = with_batchnorm_statistics(client, weights)
    >>> for batch, real in client.train_batches(100):
    ...     features = client.model(evaluated, batch.x).taps["features"]
    """
    if client.model.statistics().keys() <= weights.keys():
        return dict(weights)
    total, batches = sum_batch_statistics(client, weights, None)
    return {**weights, **combine(lambda sums: sums / per_device(batches.to(sums), sums), total)}


def evaluate_without_padding(
    model: Model, weights: Tensors, batch: Batch, read: Callable[[Outputs], Tensor] = lambda outputs: outputs.logits
) -> Tensor:
    """What a model computes in evaluation mode for batches of which some examples are padding.

    Where padding would influence the other examples of its batch, devices run one by one without it; what is read of
    padding is then zero.

    Parameters
    ----------
    model : the model.
    weights : the weights of each device, [K, ...].
    batch : a batch of `Client.train_batches` or `Client.test_batches`.
    read : what of the outputs is returned, [K, batch, ...]; by default the logits.
    """
    x = batch.x
    if not batch.lengths or min(batch.lengths) == x.shape[1] or not model.is_batch_dependent():
        return read(model(weights, x))
    by_device: dict[int, Tensor] = {}
    for k, length in enumerate(batch.lengths):
        if length:
            own = {name: weight[k : k + 1] for name, weight in weights.items()}
            by_device[k] = read(model(own, x[k : k + 1, :length]))[0]
    first = next(iter(by_device.values()))  # there is one: the longest list reaches into every batch
    found = first.new_zeros(*x.shape[:2], *first.shape[1:])
    for k, values in by_device.items():
        found[k, : len(values)] = values
    return found
