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
    Client,
    ClientResult,
    Layout,
    Schedule,
    Sgd,
    fit,
    label_loss,
    mask_logits,
    on_device,
    shaped,
    with_batchnorm_statistics,
)
from ..fleet import Ask, DeviceModel, Fleet, Reply, Tier
from ..models import Model
from ..seeds import EVALUATE, FINE_TUNE
from ..settings import Count, Positive
from ..tensors import Parcel, Tensors
from .metrics import Row, is_correct, percent
from .sequence import SEQUENCE_SUMS, sequence_metrics, sum_over_batches

COUNTS = shaped(correct=((), torch.float64), total=((), torch.float64))  # an upload's layout

Predictions = Iterator[tuple[Batch, Tensor, Tensor]]
"""Batches, their logits [K, batch, ..., classes], and which examples [K, batch] are not padding."""


@dataclass(frozen=True)
class LocalEvaluation:
    """Every device tests its personal model on its own test examples and on `test_set` (None: not)."""

    target: DeviceModel
    test_set: tuple[Tensor, Tensor] | None
    batch_size: Callable[[Model], int]
    perplexity_batch: int | None = None  # sequences per batch of perplexity; None: classification

    @on_device(sends={"local": "sums", "global": "sums"}, stream=EVALUATE, batch_across_runs=False)
    def evaluate(self, client: Client, inbox: Parcel) -> ClientResult:
        model, weights = self.target.load(client, inbox)
        client = replace(client, model=model)
        weights = with_batchnorm_statistics(client, weights)
        with torch.no_grad():
            local = predict_local(client, weights, self.batch_size(model), self.target.unseen_logit)
            upload = {
                "local": self._sum(client, local),
                "global": self._sum(client, self._predict_global(client, weights)),
            }
            return ClientResult(upload=upload)

    def sums(self, model: Model, inbox: Parcel, examples: int) -> Layout:
        return (SEQUENCE_SUMS if self.perplexity_batch else COUNTS)(model, inbox, examples)

    def _sum(self, client: Client, predictions: Predictions) -> dict[str, Tensor]:
        devices = len(client.seen_labels)
        if self.perplexity_batch:
            return sum_over_batches(predictions, client.preparation, devices, self.perplexity_batch)
        return count_correct(predictions, devices)

    def _predict_global(self, client: Client, weights: Tensors) -> Predictions:
        devices, size = len(client.seen_labels), self.batch_size(client.model)
        for examples in zip(*(part.split(size) for part in self.test_set or ()), strict=True):
            x, y = (part.expand(devices, *part.shape) for part in (client.preparation(examples[0]), examples[1]))
            yield Batch(x, y), client.model(weights, x).logits, torch.ones(x.shape[:2], dtype=torch.bool)

    def compute_metrics(self, replies: Sequence[Reply], bundle: str) -> dict[str, float]:
        """Metrics over all predictions of these devices; every prediction counts equally."""
        if self.perplexity_batch:
            return sequence_metrics([reply.upload[bundle] for reply in replies])
        return {"accuracy": accuracy_of(replies, bundle)}


@dataclass(frozen=True)
class FineTune:
    """Initial and personalized accuracy of every tier's model on every device (FedSup, section 4).

    Each device tests the model on its own test examples, trains a part of it on its own training examples without
    momentum, and tests it again.
    """

    part: Literal["head", "body", "all"] = "head"
    epochs: Count = 5
    batch_size: Count = 50
    learning_rate: Positive = 0.001

    @on_device(sends={"initial": COUNTS, "personalized": COUNTS}, stream=FINE_TUNE, batch_across_runs=False)
    def tune(self, client: Client, inbox: Parcel) -> ClientResult:
        learner = replace(client, optimizer=Sgd(self.learning_rate), label_smoothing=0.0)
        statistics = inbox.get("statistics", {})
        tuned = fit(learner, inbox["weights"], label_loss(client), only=self.trainable(client.model))
        with torch.no_grad():
            before, after = (
                evaluate_local(client, {**w, **statistics}, self.batch_size) for w in (inbox["weights"], tuned)
            )
        return ClientResult(upload={"initial": before, "personalized": after})

    def trainable(self, model: Model) -> list[str]:
        """The weights that are trained: `head` is the last layer, `body` all others that the last exit depends on."""
        names, head = model.last_exit_weights(), set(model.head())
        return [name for name in names if self.part == "all" or (name in head) == (self.part == "head")]

    def rows(
        self, name: str, models: Mapping[Tier, Tensors], fleet: Fleet, ask: Ask, round_number: int
    ) -> Iterator[Row]:
        """Rows for every tier and device, and over a tier's devices the mean and population standard deviation.

        Every device evaluates every tier's model, as in the paper's tables. Holdout devices have rows of their own.
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
    accuracies = {reply.device.name: accuracy_of([reply], metric) for reply in replies}
    known = {device: accuracy for device, accuracy in accuracies.items() if not math.isnan(accuracy)}
    for device, accuracy in known.items():
        yield row(device, test, metric, accuracy)
    if known:
        yield row("", test, metric, statistics.fmean(known.values()))
        yield row("", test, f"{metric}_std", statistics.pstdev(known.values()))


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


def count_correct(predictions: Predictions, devices: int) -> dict[str, Tensor]:
    correct = total = torch.zeros(devices, dtype=torch.float64)
    for batch, logits, real in predictions:
        correct, total = correct + (is_correct(logits, batch.y) & real).sum(1), total + real.sum(1)
    return {"correct": correct, "total": total}


def predict_local(client: Client, weights: Tensors, size: int, unseen_logit: float | None = None) -> Predictions:
    """Predictions for the devices' own test examples."""
    for batch, real in client.test_batches(size):
        if client.model.is_batch_dependent() and not bool(real.all()):
            logits = _predict_without_padding(client, weights, batch.x, real)
        else:
            logits = client.model(weights, batch.x).logits
        yield batch, mask_logits(logits, client.seen_labels, unseen_logit), real


def _predict_without_padding(client: Client, weights: Tensors, x: Tensor, real: Tensor) -> Tensor:
    """Device by device, for models that padding would influence; the logits of padding are zero."""
    by_device: dict[int, Tensor] = {}
    for k in range(len(real)):
        if bool(real[k].any()):
            own = {name: weight[k : k + 1] for name, weight in weights.items()}
            by_device[k] = client.model(own, x[k : k + 1, real[k]]).logits[0]
    first = next(iter(by_device.values()))  # there is one: the longest list reaches into every batch
    logits = first.new_zeros(*real.shape, *first.shape[1:])
    for k, device_logits in by_device.items():
        logits[k, real[k]] = device_logits
    return logits


def accuracy_of(replies: Sequence[Reply], test: str) -> float:
    """In percent, over all predictions of these devices."""
    counts = [reply.upload[test] for reply in replies if test in reply.upload]
    return percent(sum(float(c["correct"]) for c in counts), sum(float(c["total"]) for c in counts))
