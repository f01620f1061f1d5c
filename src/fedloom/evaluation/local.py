"""Evaluation on devices: of personal models, and of the global model before and after local fine-tuning."""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from ..client import (
    Batch,
    Bounded,
    Client,
    ClientResult,
    Layout,
    Schedule,
    Sgd,
    default_loss,
    evaluate_without_padding,
    fit,
    label_loss,
    mask_logits,
    on_device,
    shaped,
    with_batchnorm_statistics,
)
from ..data import CLASSIFICATION, LearningTask
from ..fleet import Ask, DeviceModel, Fleet, Reply, Tier
from ..models import Model
from ..placement import leave, resident
from ..seeds import EVALUATE, FINE_TUNE
from ..settings import Count, Positive
from ..tensors import Parcel, Tensors
from . import pixels
from .metrics import (
    Metric,
    Row,
    accuracy,
    compute_accuracy,
    defined_values,
    headline_metric,
    is_correct,
    percent,
    predicted_values,
    row_names,
)
from .pixels import sum_pixels
from .sequence import DEFAULT_SEQUENCE_METRICS, LARGEST_LOSS, SEQUENCE_SUMS, sequence_metrics, sum_over_batches
from .test_set import global_order, prediction_width

COUNTS = shaped(correct=((), torch.float64), total=((), torch.float64))  # layouts of uploads
VALUE = shaped(value=((), torch.float64), known=((), torch.bool))

Predictions = Iterator[tuple[Batch, Tensor, Tensor]]
"""Batches, their logits [K, batch, ..., classes], and which examples [K, batch] are not padding."""


@dataclass(frozen=True)
class LocalEvaluation:
    """Every device tests its personal model on its own test examples and on `test_set` (None: not).

    Devices upload counts, from which accuracy follows. If other metrics are asked for, they upload more:

    - For their own test examples, in simulation, their predictions and labels. So a tier's value is that of all its
      devices' predictions together, and each device's value that of its own.
    - For the test set, and for their own test examples if devices are real (`pooled_examples` is None), the values that
      they compute themselves. A tier's value is then the mean over devices, weighted by test examples, without devices
      for which the metric is undefined.
    - For models of pixels, in any case sums over them, from which every metric follows.
    """

    target: DeviceModel
    test_set: tuple[Tensor, Tensor] | None
    batch_size: Callable[[Model], int]
    perplexity_batch: int | None = None  # sequences per batch of perplexity; None: classification
    metrics: tuple[Metric, ...] = (accuracy(),)
    pooled_examples: int | None = None  # test examples of the device that has most
    sequence_metrics: tuple[str, ...] = DEFAULT_SEQUENCE_METRICS
    seed: int = 0  # of the run, for the order of the test set
    task: LearningTask = CLASSIFICATION
    target_shape: tuple[int, ...] = ()  # of the targets of one example

    @on_device(sends={"local": "local_layout", "global": "global_layout"}, stream=EVALUATE, batch_across_runs=False)
    def evaluate(self, client: Client, inbox: Parcel) -> ClientResult:
        model, weights = self.target.load(client, inbox)
        client = replace(client, model=model)
        weights = with_batchnorm_statistics(client, weights)
        with torch.no_grad():
            local = predict_local(client, weights, self.batch_size(model), self.target.unseen_logit)
            upload = {
                "local": self._measure(client, local, self.pooled_examples),
                "global": self._measure(client, self._predict_global(client, weights)),
            }
            return ClientResult(upload=upload)

    def local_layout(self, model: Model, inbox: Parcel, examples: int) -> Layout:
        layout = dict(self.global_layout(model, inbox, examples))
        if self._others and self.pooled_examples is not None and not self._sums_pixels:
            bits = BITS[torch.get_default_dtype()]
            for name in ("values", "known"):
                del layout[name]
            layout["logits"] = ((self.pooled_examples, model.classes), bits)
            layout["labels"] = (
                Bounded((self.pooled_examples,), torch.int64, model.classes)
                if self.task.has_class_labels
                else ((self.pooled_examples, *self.target_shape), self.task.dtype)
            )
        return layout

    def global_layout(self, model: Model, inbox: Parcel, examples: int) -> Layout:
        layout = dict((SEQUENCE_SUMS if self.perplexity_batch else COUNTS)(model, inbox, examples))
        if self._sums_pixels:
            layout["sums"] = ((model.classes**2 + 1,), torch.float64)
        elif self._others:
            rows = len(self._row_names(model.classes))
            layout |= {"values": ((rows,), torch.float64), "known": ((rows,), torch.bool)}
        return layout

    @property
    def _sums_pixels(self) -> bool:
        return self.task.positions == "pixels"

    @property
    def _others(self) -> list[Metric]:
        """The metrics that need more than the counts."""
        return [] if self.perplexity_batch else [one for one in self.metrics if one.compute is not compute_accuracy]

    def _row_names(self, classes: int) -> list[str]:
        return [name for metric in self._others for name in row_names(metric, classes)]

    def _measure(self, client: Client, predictions: Predictions, pooled: int | None = None) -> dict[str, Tensor]:
        devices, classes = len(client.seen_labels), client.model.classes
        if self.perplexity_batch:
            return sum_over_batches(predictions, client.preparation, devices, self.perplexity_batch)
        if self._sums_pixels:
            sums, total = pixels.sum_over_batches(predictions, devices, classes)
            sums = sums.nan_to_num(nan=LARGEST_LOSS).clamp(-LARGEST_LOSS, LARGEST_LOSS)
            return {"correct": torch.zeros_like(total), "total": total, "sums": sums}
        count = count_correct if self.task.has_class_labels else count_examples
        if not self._others:
            return count(predictions, devices)
        batches = leave(list(predictions))  # metrics are any functions, and read values
        counts = count(iter(batches), devices)
        no_targets = torch.zeros(devices, 0, *self.target_shape, dtype=self.task.dtype)
        empty = torch.zeros(devices, 0, classes), no_targets
        logits, labels = (
            torch.cat(parts, 1)
            for parts in ([empty[0], *(one for _, one, _ in batches)], [empty[1], *(b.y for b, _, _ in batches)])
        )
        if pooled is not None:
            return {**counts, **_pad_predictions(logits, labels, pooled)}
        own = [int(total) for total in counts["total"]]  # padding comes last
        values = [self._values(one[:total], y[:total]) for one, y, total in zip(logits, labels, own, strict=True)]
        table = torch.tensor(values, dtype=torch.float64).view(devices, -1)
        known = ~table.isnan()
        table = table.nan_to_num(nan=0.0).clamp(-LARGEST_LOSS, LARGEST_LOSS)
        return {**counts, "values": table, "known": known}

    def _values(self, logits: Tensor, labels: Tensor) -> list[float]:
        """The values of all rows, NaN where undefined."""
        values = {name: value for one in self._others for name, value in defined_values(one, logits, labels).items()}
        names = self._row_names(logits.shape[-1])
        if not values.keys() <= set(names):
            raise ValueError(f"a metric has other rows than it had before: {sorted(values.keys() - set(names))}")
        return [values.get(name, math.nan) for name in names]

    def _predict_global(self, client: Client, weights: Tensors) -> Predictions:
        devices, size = len(client.seen_labels), self.batch_size(client.model)
        place = client.seen_labels.device
        test_set = tuple(resident(part, place) for part in self.test_set or ())
        if test_set and client.model.is_batch_dependent() and not self.perplexity_batch:
            order = global_order(len(test_set[1]), self.seed).to(place)
            test_set = test_set[0][order], test_set[1][order]
        for examples in zip(*(part.split(size) for part in test_set), strict=True):
            x, y = (part.expand(devices, *part.shape) for part in (client.preparation(examples[0]), examples[1]))
            yield Batch(x, y), client.model(weights, x).logits, torch.ones(x.shape[:2], dtype=torch.bool, device=place)

    def compute_metrics(self, replies: Sequence[Reply], bundle: str) -> dict[str, float]:
        """Metrics over these devices; every prediction counts equally."""
        if self.perplexity_batch:
            return sequence_metrics([reply.upload[bundle] for reply in replies], self.sequence_metrics)
        uploads = [reply.upload[bundle] for reply in replies if bundle in reply.upload]
        others: dict[str, float] = {}
        if self._sums_pixels:
            sums = [upload["sums"] for upload in uploads if float(upload["total"])]
            names = [predicted_values(one, torch.stack(sums), torch.ones(1)) for one in self.metrics if sums]
            return {name: value for values in names for name, value in values.items()}
        if self._others and uploads and "logits" in uploads[0]:
            logits, labels = _join_predictions(uploads)
            others = {name: v for one in self._others for name, v in defined_values(one, logits, labels).items()}
        elif self._others and uploads:
            others = self._mean_values(replies[0].device.model.classes, uploads)
        found: dict[str, float] = {}
        for metric in self.metrics:
            if metric.compute is compute_accuracy:
                found[metric.name] = accuracy_of(replies, bundle)
            else:
                prefix = f"{metric.name}["
                found |= {name: v for name, v in others.items() if name == metric.name or name.startswith(prefix)}
        return found

    def _mean_values(self, classes: int, uploads: Sequence[Tensors]) -> dict[str, float]:
        table, known = (torch.stack([upload[name] for upload in uploads]) for name in ("values", "known"))
        weights = torch.stack([upload["total"] for upload in uploads])[:, None] * known
        means = ((weights * table).sum(0) / weights.sum(0)).tolist()
        return {name: mean for name, mean in zip(self._row_names(classes), means, strict=True) if not math.isnan(mean)}


BITS = {torch.float32: torch.int32, torch.float64: torch.int64}


def _pad_predictions(logits: Tensor, labels: Tensor, room: int) -> dict[str, Tensor]:
    """Predictions of all devices in tensors of one size.

    Logits travel as their bits: engines refuse values that are not finite, and those of masked labels are not.
    """
    devices, count, classes = logits.shape
    bits, answers = logits.new_zeros(devices, room, classes), labels.new_zeros(devices, room, *labels.shape[2:])
    bits[:, :count], answers[:, :count] = logits, labels
    return {"logits": bits.view(BITS[bits.dtype]), "labels": answers}


def _join_predictions(uploads: Sequence[Tensors]) -> tuple[Tensor, Tensor]:
    """The predictions of several devices: logits [examples, classes] and labels."""
    floats = {bits: dtype for dtype, bits in BITS.items()}
    counts = [int(upload["total"]) for upload in uploads]
    logits = [
        one["logits"][:count].view(floats[one["logits"].dtype]) for one, count in zip(uploads, counts, strict=True)
    ]
    return torch.cat(logits), torch.cat([one["labels"][:count] for one, count in zip(uploads, counts, strict=True)])


@dataclass(frozen=True)
class FineTune:
    """Initial and personalized accuracy of every tier's model on every device (FedSup, section 4).

    For other tasks than classification, their headline metric instead of accuracy.

    Each device tests the model on its own test examples, trains a part of it on its own training examples without
    momentum, and tests it again.

    Parameters
    ----------
    part : what is trained: the last layer ("head"), all others ("body"), or "all".
    epochs : passes over the device's training examples.
    batch_size : examples per step.
    lr : the learning rate.
    task : what is learned, which a recipe says elsewhere.
    """

    part: Literal["head", "body", "all"] = "head"
    epochs: Count = 5
    batch_size: Count = 50
    lr: Positive = 0.001
    task: LearningTask = CLASSIFICATION

    @on_device(
        sends={"initial": "value_layout", "personalized": "value_layout"}, stream=FINE_TUNE, batch_across_runs=False
    )
    def tune(self, client: Client, inbox: Parcel) -> ClientResult:
        """Evaluate, train, and evaluate again.

        Parameters
        ----------
        client : the devices.
        inbox : the received parcel, with the bundle "weights".
        """
        learner = replace(client, optimizer=Sgd(self.lr), loss=default_loss(self.task))
        statistics = inbox.get("statistics", {})
        tuned = fit(learner, inbox["weights"], label_loss(client), only=self.trainable(client.model))
        with torch.no_grad():
            before, after = (self._evaluate(client, {**w, **statistics}) for w in (inbox["weights"], tuned))
        return ClientResult(upload={"initial": before, "personalized": after})

    def value_layout(self, model: Model, inbox: Parcel, examples: int) -> Layout:
        """What a device uploads: counts of correct predictions, or the value of the headline metric.

        Parameters
        ----------
        model : the device's model.
        inbox : what it received.
        examples : the number of its examples.
        """
        return (COUNTS if self.task.has_class_labels else VALUE)(model, inbox, examples)

    def _evaluate(self, client: Client, weights: Tensors) -> dict[str, Tensor]:
        if self.task.has_class_labels:
            return evaluate_local(client, weights, self.batch_size)
        values = [_headline_value(self.task, *own) for own in _own_predictions(client, weights, self.batch_size)]
        table = torch.tensor(values, dtype=torch.float64)
        return {"value": table.nan_to_num(nan=0.0).clamp(-LARGEST_LOSS, LARGEST_LOSS), "known": ~table.isnan()}

    def trainable(self, model: Model) -> list[str]:
        """The weights that are trained: `head` is the last layer, `body` all others that the last exit depends on.

        Parameters
        ----------
        model : the model.
        """
        names, head = model.last_exit_weights(), set(model.head())
        return [name for name in names if self.part == "all" or (name in head) == (self.part == "head")]

    def rows(
        self, name: str, models: Mapping[Tier, Tensors], fleet: Fleet, ask: Ask, round_number: int
    ) -> Iterator[Row]:
        """Rows for every tier and device, and over a tier's devices the mean and population standard deviation.

        Every device evaluates every tier's model, as in the paper's tables. Holdout devices have rows of their own.

        Parameters
        ----------
        name : the name of the evaluated target, for rows.
        models : the weights, by tier.
        fleet : the fleet.
        ask : asks its devices.
        round_number : the round.
        """
        task = replace(self.tune, schedule=Schedule(self.batch_size, self.epochs), ref=("fine_tune", "tune"))
        inboxes = {
            device.with_model(tier.model, fleet.global_model, tier.name): _make_inbox(tier.model, weights)
            for tier, weights in models.items()
            for device in fleet.devices(round_number)
        }
        replies = sorted(ask(task, inboxes), key=lambda reply: reply.device.name)
        for tier in models:
            of_tier = [reply for reply in replies if reply.device.tier == tier.name]
            for test, members in group_replies(fleet, of_tier).items():
                for metric in ("initial", "personalized"):
                    yield from _fine_tune_rows(members, partial(Row, round_number, name, tier.name), test, metric)


def _fine_tune_rows(replies: Sequence[Reply], row: Callable[..., Row], test: str, metric: str) -> Iterator[Row]:
    accuracies = {reply.device.name: _tuned_value(reply, metric) for reply in replies}
    known = {device: value for device, value in accuracies.items() if not math.isnan(value)}
    for device, value in known.items():
        yield row(device, test, metric, value)
    if known:
        yield row("", test, metric, statistics.fmean(known.values()))
        yield row("", test, f"{metric}_std", statistics.pstdev(known.values()))


def _tuned_value(reply: Reply, bundle: str) -> float:
    upload = reply.upload.get(bundle, {})
    if "value" not in upload:
        return accuracy_of([reply], bundle)
    return float(upload["value"]) if bool(upload["known"]) else math.nan


def _headline_value(task: LearningTask, predictions: Tensor, targets: Tensor) -> float:
    """NaN where it is undefined, and for a model that diverged."""
    metric = headline_metric(task)
    return predicted_values(metric, predictions, targets).get(metric.name, math.nan) if len(targets) else math.nan


def _own_predictions(client: Client, weights: Tensors, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The predictions of each device for its own test examples, and their targets."""
    sums_only = client.model.predicts_pixels
    batches = [
        (sum_pixels(logits, batch.y) if sums_only else logits, batch.y, real)
        for batch, logits, real in predict_local(client, weights, size)
    ]
    no_targets = torch.zeros(0, *client.tests.y.shape[1:], dtype=client.tests.y.dtype)
    batches = leave(batches)  # metrics are any functions, and read values
    for k in range(len(client.seen_labels)):
        parts = [(kept[k, real[k]], y[k, real[k]]) for kept, y, real in batches]
        empty = torch.zeros(0, prediction_width(client.model)), no_targets
        predictions, targets = zip(*(parts or [empty]), strict=True)
        yield torch.cat(predictions), torch.cat(targets)


def _make_inbox(model: Model, weights: Tensors) -> Parcel:
    """Weights and batch-norm statistics in separate bundles: only the weights are trained."""
    fixed = {name: weights[name] for name in model.statistics()}
    return {"weights": {name: weights[name] for name in model.shapes()}, **({"statistics": fixed} if fixed else {})}


def group_replies(fleet: Fleet, replies: Sequence[Reply]) -> dict[str, list[Reply]]:
    """Replies of devices that may train ("local") and of holdout devices ("unseen")."""
    holdout = {fleet.name(index) for index in fleet.holdout_devices}
    local = {"local": [reply for reply in replies if reply.device.name not in holdout]}
    return {**local, **({"unseen": [r for r in replies if r.device.name in holdout]} if holdout else {})}


def device_batch_size(size: int, positions: int, model: Model) -> int:
    """A batch size for evaluation on many devices at once, which bounds the memory of a block.

    Batch-dependent models keep the full size, since it changes their predictions.
    """
    return size if model.is_batch_dependent() else max(1, size // 8 // positions)


def evaluate_local(client: Client, weights: Tensors, size: int) -> dict[str, Tensor]:
    """Correct predictions and examples of each device's own test: [K] each."""
    return count_correct(predict_local(client, weights, size), len(client.seen_labels))


def count_examples(predictions: Predictions, devices: int) -> dict[str, Tensor]:
    """The number of examples of each device, for tasks in which predictions are not simply correct or not."""
    total = torch.zeros(devices, dtype=torch.float64)
    for _, _, real in predictions:
        total = total.to(real.device) + real.sum(1)
    return {"correct": torch.zeros_like(total), "total": total}


def count_correct(predictions: Predictions, devices: int) -> dict[str, Tensor]:
    correct = total = torch.zeros(devices, dtype=torch.float64)
    for batch, logits, real in predictions:
        correct, total = correct.to(real.device), total.to(real.device)
        correct, total = correct + (is_correct(logits, batch.y) & real).sum(1), total + real.sum(1)
    return {"correct": correct, "total": total}


def predict_local(client: Client, weights: Tensors, size: int, unseen_logit: float | None = None) -> Predictions:
    """Predictions for the devices' own test examples."""
    for batch, real in client.test_batches(size):
        logits = evaluate_without_padding(client.model, weights, batch)
        yield batch, mask_logits(logits, client.seen_labels, unseen_logit), real


def accuracy_of(replies: Sequence[Reply], test: str) -> float:
    """In percent, over all predictions of these devices."""
    counts = [reply.upload[test] for reply in replies if test in reply.upload]
    return percent(sum(float(c["correct"]) for c in counts), sum(float(c["total"]) for c in counts))
