"""What devices judge themselves: models of their own, and the global model after they have tuned it to their data."""

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
    with_batchnorm_statistics,
    shaped,
)
from ..fleet import Ask, DeviceModel, Fleet, Reply, Tier
from ..models import Model
from ..seeds import EVALUATE, FINE_TUNE
from ..settings import Count, Positive
from ..tensors import Parcel, Tensors
from .metrics import Row, is_correct, percent
from .sequence import SUMS, position_metrics, sum_over_batches

COUNTS = shaped(correct=((), torch.float64), total=((), torch.float64))


Answers = Iterator[tuple[Batch, Tensor, Tensor]]
"""What a block of devices was asked, its logits [K, batch, ..., classes], and which of them are no padding."""


def batch_where_devices_judge(size: int, positions: int, model: Model) -> int:
    """Many devices do it at once, and memory must not grow with them, nor with the positions that one example has; but
    where the batch changes the answers it is as large as elsewhere."""
    return size if model.is_batch_dependent() else max(1, size // 8 // positions)


@dataclass(frozen=True)
class LocalEvaluation:
    """Has every device judge a model of its own."""

    candidate: DeviceModel
    whole_test: tuple[Tensor, Tensor] | None
    batch_size: Callable[[Model], int]
    perplexity_batch: int | None = None  # where every position is answered: so many rows make a batch

    @on_device(sends={"local": "sums", "global": "sums"}, stream=EVALUATE, batch_across_runs=False)
    def evaluate(self, client: Client, inbox: Parcel) -> ClientResult:
        model, carried = self.candidate.load(client, inbox)
        client = replace(client, model=model)
        weights = with_batchnorm_statistics(client, carried)
        with torch.no_grad():
            own = self._summed(
                client, own_answers(client, weights, self.batch_size(model), self.candidate.unseen_logit)
            )
            return ClientResult(
                upload={"local": own, "global": self._summed(client, self._whole_answers(client, weights))}
            )

    def sums(self, model: Model, inbox: Parcel, examples: int) -> Layout:
        return (SUMS if self.perplexity_batch else COUNTS)(model, inbox, examples)

    def _summed(self, client: Client, answers: Answers) -> dict[str, Tensor]:
        devices = len(client.seen_labels)
        if self.perplexity_batch:
            return sum_over_batches(answers, client.preparation, devices, self.perplexity_batch)
        return counted(answers, devices)

    def _whole_answers(self, client: Client, weights: Tensors) -> Answers:
        devices, size = len(client.seen_labels), self.batch_size(client.model)
        for examples in zip(*(part.split(size) for part in self.whole_test or ()), strict=True):
            x, y = (one.expand(devices, *one.shape) for one in (client.preparation(examples[0]), examples[1]))
            yield Batch(x, y), client.model(weights, x).logits, torch.ones(x.shape[:2], dtype=torch.bool)

    def compute_metrics(self, replies: Sequence[Reply], test: str) -> dict[str, float]:
        """Metric by metric, all answers of these devices counted alike."""
        if self.perplexity_batch:
            return position_metrics([reply.upload[test] for reply in replies])
        return {"accuracy": share_right(replies, test)}


@dataclass(frozen=True)
class FineTune:
    """Initial and personalized accuracy: each device judges a tier's model on its own test examples, tunes a part of it
    to its own training examples without momentum, and judges it again. FedSup, section 4."""

    part: Literal["head", "body", "all"] = "head"
    epochs: Count = 5
    batch_size: Count = 50
    learning_rate: Positive = 0.001

    @on_device(sends={"initial": COUNTS, "personalized": COUNTS}, stream=FINE_TUNE, batch_across_runs=False)
    def tune(self, client: Client, inbox: Parcel) -> ClientResult:
        learner = replace(client, optimizer=Sgd(self.learning_rate), label_smoothing=0.0)
        given = inbox.get("statistics", {})
        tuned = fit(learner, inbox["weights"], label_loss(client), only=self.tuned(client.model))
        with torch.no_grad():
            before, after = (own_test(client, {**w, **given}, self.batch_size) for w in (inbox["weights"], tuned))
        return ClientResult(upload={"initial": before, "personalized": after})

    def tuned(self, model: Model) -> list[str]:
        """The weights that move: `head` is the last layer, `body` all else that the last exit depends on."""
        behind, head = model.last_exit_weights(), set(model.head())
        return [name for name in behind if self.part == "all" or (name in head) == (self.part == "head")]

    def rows(
        self, name: str, models: Mapping[Tier, Tensors], fleet: Fleet, ask: Ask, round_number: int
    ) -> Iterator[Row]:
        """Per tier and device, and over a tier's devices their mean and population standard deviation; every device
        tries every tier's model, as the paper's tables have it. Devices that never trained are told apart."""
        task = replace(self.tune, schedule=Schedule(self.batch_size, self.epochs), ref=("fine_tune", "tune"))
        inboxes = {
            device.with_model(tier.model, fleet.global_model, tier.name): _parcel(tier.model, weights)
            for tier, weights in models.items()
            for device in fleet.devices(round_number)
        }
        replies = sorted(ask(task, inboxes), key=lambda reply: reply.device.name)
        for tier in models:
            of_tier = [reply for reply in replies if reply.device.tier == tier.name]
            for test, said in by_acquaintance(fleet, of_tier).items():
                for metric in ("initial", "personalized"):
                    yield from _tuned_rows(said, partial(Row, round_number, name, tier.name), test, metric)


def _tuned_rows(said: Sequence[Reply], row: Callable[..., Row], test: str, metric: str) -> Iterator[Row]:
    shares = {reply.device.name: share_right([reply], metric) for reply in said}
    judged = {device: share for device, share in shares.items() if not math.isnan(share)}
    for device, share in judged.items():
        yield row(device, test, metric, share)
    if judged:
        yield row("", test, metric, statistics.fmean(judged.values()))
        yield row("", test, f"{metric}_std", statistics.pstdev(judged.values()))


def by_acquaintance(fleet: Fleet, replies: Sequence[Reply]) -> dict[str, list[Reply]]:
    """Devices that may train, judged as "local", and those that never do, as "unseen"."""
    strangers = {fleet.name(index) for index in fleet.holdout_devices}
    known = {"local": [reply for reply in replies if reply.device.name not in strangers]}
    return {**known, **({"unseen": [r for r in replies if r.device.name in strangers]} if strangers else {})}


def _parcel(model: Model, weights: Tensors) -> Parcel:
    """Weights and normalization statistics apart: only the former are trained."""
    given = {name: weights[name] for name in model.statistics()}
    return {"weights": {name: weights[name] for name in model.shapes()}, **({"statistics": given} if given else {})}


def own_test(client: Client, weights: Tensors, size: int) -> dict[str, Tensor]:
    """Per device, right answers and questions on its own test examples: [K] each."""
    return counted(own_answers(client, weights, size), len(client.seen_labels))


def counted(answers: Answers, devices: int) -> dict[str, Tensor]:
    correct = total = torch.zeros(devices, dtype=torch.float64)
    for batch, logits, real in answers:
        correct, total = correct + (is_correct(logits, batch.y) & real).sum(1), total + real.sum(1)
    return {"correct": correct, "total": total}


def own_answers(client: Client, weights: Tensors, size: int, unseen_logit: float | None = None) -> Answers:
    """To the devices' own test examples."""
    for batch, real in client.test_batches(size):
        if client.model.is_batch_dependent() and not bool(real.all()):
            logits = _without_padding(client, weights, batch.x, real)
        else:
            logits = client.model(weights, batch.x).logits
        yield batch, mask_logits(logits, client.seen_labels, unseen_logit), real


def _without_padding(client: Client, weights: Tensors, x: Tensor, real: Tensor) -> Tensor:
    """Device by device, for models that would see the padding, whose own logits are zero."""
    made: dict[int, Tensor] = {}
    for k in range(len(real)):
        if bool(real[k].any()):
            own = {name: weight[k : k + 1] for name, weight in weights.items()}
            made[k] = client.model(own, x[k : k + 1, real[k]]).logits[0]
    one = next(iter(made.values()))  # the longest list reaches into every batch
    logits = one.new_zeros(*real.shape, *one.shape[1:])
    for k, answered in made.items():
        logits[k, real[k]] = answered
    return logits


def share_right(replies: Sequence[Reply], test: str) -> float:
    """All answers of these devices, counted alike."""
    counts = [reply.upload[test] for reply in replies if test in reply.upload]
    return percent(sum(float(c["correct"]) for c in counts), sum(float(c["total"]) for c in counts))
