"""Evaluate every target at every tier: on the global test set, and on each device's own test examples."""

import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from ..client import Client, Schedule, mask_logits
from ..data import Dataset, LearningTask
from ..fleet import Ask, Device, DeviceModel, EvalTarget, Fleet, ModelWeights, ServerModel, Tier, in_parts
from ..models import Model, exit_names, last_exit
from ..tensors import Parcel, Tensors, fingerprint
from .batchnorm import BatchNormStatistics
from .local import FineTune, LocalEvaluation, device_batch_size, group_replies
from .metrics import (
    Metric,
    MetricInfo,
    Row,
    accuracy,
    compute_accuracy,
    default_metrics,
    headline_metric,
    is_correct,
    metric_info,
    per_group,
    percent,
    predicted_values,
)
from .sequence import DEFAULT_SEQUENCE_METRICS, SEQUENCE_METRICS
from .test_set import (
    GlobalEvaluation,
    SequenceEvaluator,
    batch_lengths,
    global_order,
    local_order,
    prediction_width,
)

SERVER_MODEL_REF = ("server model",)  # of `load_server_model`
TEST_PARTS = 4
"""Into so many parts of whole batches the test set is divided, so that several processes can share a large net's."""

FilledStatistics = tuple[str, Mapping[str, Tensors]]
"""(fingerprint of the weights, their batch-norm statistics by tier)."""


@dataclass(frozen=True)
class Evaluator:
    """Evaluates a method's models on the test set and on the devices' own test examples.

    Parameters
    ----------
    dataset : the data set.
    local_tests : for each device, rows of the test set.
    seen_labels : the labels that each device trains on, [devices, classes].
    statistics : how batch-norm statistics are collected.
    batch_size : examples per batch.
    tests : "global", "local", or both.
    fine_tune : how models are fine-tuned after the last round; None: not at all.
    metrics : what is computed; None: what is usual for the task, such as accuracy and, on the global test set, loss.
    candidates : names of the targets to evaluate; empty: all.
    tests_on_devices : whether only the devices have their local tests, so that they evaluate themselves.
    seed : of the run, from which the order of test examples is drawn for batch-dependent models.
    devices_compute : metrics of personal models: whether devices upload values instead of predictions.
    filled : statistics that are known already, by target.
    correct : which examples of the global test set the last evaluation's models get right, by target and tier.
    """

    dataset: Dataset
    local_tests: Sequence[Tensor]  # for each device, rows of the test set
    seen_labels: Tensor  # [devices, classes]
    statistics: BatchNormStatistics
    batch_size: int = 500
    tests: tuple[str, ...] = ("global", "local")
    fine_tune: FineTune | None = None
    metrics: tuple[Metric, ...] | None = None  # None: accuracy, and on the global test set also loss
    candidates: tuple[str, ...] = ()  # names of the targets to evaluate; empty: all
    tests_on_devices: bool = False  # only the devices have their local tests, so they evaluate themselves
    seed: int = 0  # of the run, from which the order of test examples is drawn for batch-dependent models
    devices_compute: bool = False  # metrics of personal models: devices upload values instead of predictions
    filled: dict[str, FilledStatistics] = field(default_factory=dict, compare=False)  # by target
    correct: dict[tuple[str, str], Tensor] = field(default_factory=dict, compare=False)  # by target and tier

    def rows(
        self,
        targets: Mapping[str, EvalTarget],
        fleet: Fleet,
        ask: Ask,
        round_number: int,
        per_device: bool,
        last: bool = False,
    ) -> list[Row]:
        """Rows for every tier and, if `per_device`, for every device with test examples.

        Parameters
        ----------
        targets : the method's models, by name.
        fleet : the fleet.
        ask : asks its devices.
        round_number : the round.
        per_device : whether single devices have rows.
        last : whether it is the last round, after which models are also fine-tuned.
        """
        rows: list[Row] = []
        for name, target in targets.items():
            if self.candidates and name not in self.candidates:
                continue
            if isinstance(target, ServerModel):
                evaluated = self._server_rows(name, target, fleet, ask, round_number, last, per_device)
            else:
                evaluated = self._device_rows(name, target, fleet, ask, round_number, per_device)
            rows += (row for row in evaluated if row.metric != "accuracy" or not math.isnan(row.value))
        return rows

    def models(self, name: str, target: ServerModel, fleet: Fleet, ask: Ask, round_number: int) -> dict[Tier, Tensors]:
        """A target's weights with their batch-norm statistics.

        Statistics are kept for the same weights, so that a saved model is the evaluated one, and devices that may have
        left by then are not asked again.

        Parameters
        ----------
        name : the name of the target.
        target : the target.
        fleet : the fleet.
        ask : asks its devices.
        round_number : the round.
        """
        weights = {tier: target.weights(tier) for tier in evaluated_tiers(target, fleet)}
        if not any(tier.model.statistics() for tier in weights):
            return weights
        mark = fingerprint({tier.name: tensors for tier, tensors in weights.items()})
        if self.filled.get(name, ("", {}))[0] != mark:
            filled = self.statistics.fill(weights, fleet, ask, round_number)
            statistics: dict[str, Tensors] = {
                tier.name: {key: filled[tier][key] for key in tier.model.statistics()} for tier in filled
            }
            self.filled[name] = (mark, statistics)
        return {tier: {**tensors, **self.filled[name][1][tier.name]} for tier, tensors in weights.items()}

    def logits(
        self,
        models: Mapping[Tier, Tensors],
        fleet: Fleet,
        ask: Ask,
        order: Tensor | None = None,
        groups: Sequence[int] | None = None,
    ) -> dict[Tier, Tensor]:
        """Every tier's logits on the test set, `[examples, classes]`; of pixels, the sums over each example.

        Batch-dependent models see the rows in an order of their own, device by device. One request for all tiers, so
        that workers share the work; a tier whose last exit is also an exit of another tier's model takes its logits
        from there.

        Parameters
        ----------
        models : the weights, by tier.
        fleet : the fleet.
        ask : asks its devices.
        order : rows of the test set; None: all.
        groups : how many of these rows are the test examples of each device; no batch spans two of them.
        """
        if not models:
            return {}
        hosts = self._find_hosts(models)
        rows = torch.arange(len(self.dataset.test.y)) if order is None else order
        lengths = batch_lengths(groups or [len(rows)], self.batch_size)
        shuffled = self._shuffle(len(rows), groups, fleet)
        dependent = batch_dependent({tier: one for tier, one in models.items() if tier not in hosts})
        task = replace(self.test_set.predict, schedule=Schedule(self.batch_size), ref=("test_set", "predict"))
        parts = [part for part in lengths.tensor_split(TEST_PARTS) if len(part)] or [lengths]
        inboxes = {
            device: {"weights": weights, "order": {"rows": own}, "batches": {"lengths": part}}
            for tier, weights in models.items()
            if tier not in hosts
            for device, own, part in zip(
                in_parts(fleet.evaluation_device(tier), len(parts)),
                (rows[shuffled] if tier in dependent else rows).split([int(part.sum()) for part in parts]),
                parts,
                strict=True,
            )
        }
        exits = {(reply.device.tier, reply.device.part[0]): reply.upload["exits"] for reply in ask(task, inboxes)}
        found: dict[Tier, Tensor] = {}
        for tier in models:
            host, end = hosts.get(tier, tier), last_exit(tier.model)
            known = [exits[key][end] for number in range(len(parts)) if (key := (host.name, number)) in exits]
            if len(known) < len(parts):  # a diverged model: its replies are refused, or some of them
                known = [torch.full((len(rows), prediction_width(tier.model)), torch.nan)]
            logits = torch.cat(known)
            found[tier] = torch.empty_like(logits).index_copy_(0, shuffled, logits) if host in dependent else logits
        return found

    def _shuffle(self, rows: int, groups: Sequence[int] | None, fleet: Fleet) -> Tensor:
        """A permutation of all rows, or within each group."""
        if groups is None:
            return global_order(rows, self.seed)
        starts = itertools.accumulate(groups, initial=0)
        orders = (
            start + local_order(size, self.seed, fleet.name(index))
            for index, (start, size) in enumerate(zip(starts, groups, strict=False))
        )
        return torch.cat(list(orders))

    @property
    def test_set(self) -> GlobalEvaluation:
        """The tasks that evaluate on the test set."""
        return GlobalEvaluation(self.batch_size)

    @property
    def sequence(self) -> SequenceEvaluator:
        """The evaluation of data with a label at every position."""
        return SequenceEvaluator(self.dataset, self.test_set, self.batch_size, self._sequence_metrics)

    @property
    def declared_metrics(self) -> dict[str, MetricInfo]:
        """Direction and unit of every metric that rows have, by name. `recall` stands for `recall[0]` and so on."""
        if self.is_sequence_task:
            rows = (row for metric in self._sequence_metrics for row in SEQUENCE_METRICS[metric])
            return {row: metric_info(row) for row in rows}
        if self.task.has_class_labels:
            return {metric.name: metric.info for metric in self._global_metrics}
        headline = headline_metric(self.task)
        declared = {
            metric.name: replace(metric.info, headline=metric.name == headline.name) for metric in self._global_metrics
        }
        tuned = dict.fromkeys(("initial", "personalized"), headline.info) if self.fine_tune else {}
        return {**declared, **tuned}

    @property
    def task(self) -> LearningTask:
        """What is learned."""
        return self.dataset.task

    @property
    def _global_metrics(self) -> tuple[Metric, ...]:
        return default_metrics(self.task) if self.metrics is None else self._fitting_metrics

    @property
    def _local_metrics(self) -> tuple[Metric, ...]:
        if self.metrics is None and self.task.has_class_labels:
            return (accuracy(),)
        return self._global_metrics

    @property
    def _fitting_metrics(self) -> tuple[Metric, ...]:
        fitting = (metric.for_task(self.task) for metric in self.metrics or ())
        return tuple(metric for metric in fitting if metric is not None)

    @property
    def _sequence_metrics(self) -> tuple[str, ...]:
        return DEFAULT_SEQUENCE_METRICS if self.metrics is None else tuple(metric.name for metric in self.metrics)

    def local_evaluation(self, target: DeviceModel) -> LocalEvaluation:
        """The tasks with which devices evaluate their own models.

        Parameters
        ----------
        target : how a device loads its model.
        """
        test_set = self.dataset.test.x, self.dataset.test.y
        rows = self.batch_size if self.is_sequence_task else None
        pooled = None if self.tests_on_devices or self.devices_compute else max(map(len, self.local_tests), default=0)
        return LocalEvaluation(
            target,
            test_set if "global" in self.tests else None,
            self.device_batch_size,
            rows,
            self._local_metrics,
            pooled,
            self._sequence_metrics if self.is_sequence_task else DEFAULT_SEQUENCE_METRICS,
            self.seed,
            self.task,
            tuple(self.dataset.test.y.shape[1:]),
        )

    @property
    def device_batch_size(self) -> Callable[[Model], int]:
        """Examples per batch when a device evaluates a model."""
        positions = math.prod(self.dataset.target_shape) if self.is_sequence_task else 1
        return partial(device_batch_size, self.batch_size, positions)

    @property
    def is_sequence_task(self) -> bool:
        """True if every token of an example has a label."""
        return self.task.is_sequence

    def _server_rows(
        self,
        name: str,
        target: ServerModel,
        fleet: Fleet,
        ask: Ask,
        round_number: int,
        last: bool,
        per_device: bool,
    ) -> Iterator[Row]:
        models = self.models(name, target, fleet, ask, round_number)
        labels = self.dataset.test.y
        if self.is_sequence_task:
            yield from self.sequence.rows(name, models, fleet, ask, round_number)
            return
        local_logits = self._local_logits(models, fleet, ask)
        needed = {tier: one for tier, one in models.items() if "global" in self.tests or tier not in local_logits}
        logits = self.logits(needed, fleet, ask)
        for tier in models:

            def row(test: str, metric: str, value: float, device: str = "", tier: Tier = tier) -> Row:
                return Row(round_number, name, tier.name, device, test, metric, value)

            if "global" in self.tests:
                if self.task.has_class_labels:
                    self.correct[name, tier.name] = is_correct(logits[tier], labels)
                for metric in self._global_metrics:
                    for key, value in predicted_values(metric, logits[tier], labels).items():
                        yield row("global", key, value)
            if "local" in self.tests and not self.tests_on_devices:
                own = local_logits[tier] if tier in local_logits else logits[tier][torch.cat(list(self.local_tests))]
                local = _LocalPredictions(self, own, target.unseen_logit)
                for test, devices in _group_devices(fleet).items():
                    for metric in self._local_metrics:
                        for key, value in local.values(metric, devices).items():
                            yield row(test, key, value)
                        for index in devices if per_device else ():
                            for key, value in local.values(metric, [index]).items():
                                yield row(test, key, value, fleet.name(index))
        if "local" in self.tests and self.tests_on_devices:
            inbox = partial(_tier_inbox, models)
            on_device = DeviceModel(load_server_model, inbox, target.unseen_logit, target.tiers, SERVER_MODEL_REF)
            local_only = replace(self, tests=("local",))
            yield from local_only._device_rows(name, on_device, fleet, ask, round_number, per_device)
        if self.fine_tune and last:
            tuned = self.fine_tune.rows(name, models, fleet, ask, round_number)
            yield from (row for row in tuned if per_device or not row.device)

    def _local_logits(self, models: Mapping[Tier, Tensors], fleet: Fleet, ask: Ask) -> dict[Tier, Tensor]:
        """Batch-dependent models predict each device's test examples in batches of that device alone."""
        dependent = batch_dependent(models)
        sizes = [len(rows) for rows in self.local_tests]
        if not dependent or not sum(sizes) or "local" not in self.tests or self.tests_on_devices:
            return {}
        return self.logits(dependent, fleet, ask, torch.cat(list(self.local_tests)), sizes)

    def _find_hosts(self, models: Mapping[Tier, Tensors]) -> dict[Tier, Tier]:
        """Tiers whose last exit is, weights included, an exit of another tier's model -> that tier."""
        hosts: list[Tier] = []
        host_of: dict[Tier, Tier] = {}
        for guest in sorted(models, key=lambda tier: -len(exit_names(tier.model))):
            host = next((tier for tier in hosts if self._contains_exit(tier, guest, models)), None)
            if host is None:
                hosts.append(guest)
            else:
                host_of[guest] = host
        return host_of

    @torch.inference_mode()
    def _contains_exit(self, host: Tier, guest: Tier, models: Mapping[Tier, Tensors]) -> bool:
        """True if the weights are equal and, on a few examples, the logits too."""
        host_weights, guest_weights, end = models[host], models[guest], last_exit(guest.model)
        if end not in exit_names(host.model):
            return False
        if not all(
            name in host_weights and torch.equal(tensor, host_weights[name]) for name, tensor in guest_weights.items()
        ):
            return False
        x = self.dataset.preparation(self.dataset.test.x[:8]).unsqueeze(0)
        host_block, guest_block = (
            {name: tensor.unsqueeze(0) for name, tensor in weights.items()} for weights in (host_weights, guest_weights)
        )
        return torch.equal(host.model(host_block, x).exits[end], guest.model(guest_block, x).logits)

    def _device_rows(
        self, name: str, target: DeviceModel, fleet: Fleet, ask: Ask, round_number: int, per_device: bool
    ) -> Iterator[Row]:
        ref = ("personal", json.dumps(target.unseen_logit), *target.load_ref)
        local = self.local_evaluation(target)
        task = replace(local.evaluate, schedule=Schedule(self.statistics.batch_size), ref=ref)
        tiers = [tier.name for tier in evaluated_tiers(target, fleet)]
        devices = [device for device in fleet.devices(round_number) if device.tier in tiers]
        inboxes = {device: target.inbox(device) for device in devices}
        replies = sorted(ask(task, inboxes), key=lambda reply: reply.device.name)
        for test in self.tests:
            groups = group_replies(fleet, replies) if test == "local" else {"global": replies}
            for shown, members in groups.items():
                for tier in tiers:
                    of_tier = [reply for reply in members if reply.device.tier == tier]
                    for metric, value in local.compute_metrics(of_tier, test).items() if of_tier else ():
                        yield Row(round_number, name, tier, "", shown, metric, value)
                for reply in members if per_device else ():
                    for metric, value in local.compute_metrics([reply], test).items():
                        yield Row(round_number, name, reply.device.tier, reply.device.name, shown, metric, value)


class _LocalPredictions:
    """A tier's predictions for the devices' own test examples, with unseen labels masked for each device.

    Where examples have other targets than one class label, no label is unseen, and nothing is masked.
    """

    def __init__(self, evaluator: Evaluator, logits: Tensor, unseen_logit: float | None):
        self.sizes, devices = [len(rows) for rows in evaluator.local_tests], len(evaluator.local_tests)
        owners = torch.repeat_interleave(torch.arange(devices), torch.tensor(self.sizes))
        self.labels = evaluator.dataset.test.y[torch.cat(list(evaluator.local_tests))]
        self.logits = logits
        if not evaluator.task.has_class_labels:
            return
        self.logits = mask_logits(logits.unsqueeze(1), evaluator.seen_labels[owners], unseen_logit).squeeze(1)
        correct = is_correct(self.logits, self.labels)
        self.correct = per_group(correct, owners, devices)
        self.total = per_group(torch.ones_like(correct), owners, devices)

    def values(self, metric: Metric, devices: Sequence[int]) -> dict[str, float]:
        """A metric over all examples of these devices."""
        if metric.compute is compute_accuracy:
            return {metric.name: percent(float(self.correct[devices].sum()), float(self.total[devices].sum()))}
        logits, labels = self.logits.split(self.sizes), self.labels.split(self.sizes)
        if not devices:
            return {}
        return predicted_values(
            metric, torch.cat([logits[index] for index in devices]), torch.cat([labels[index] for index in devices])
        )


def load_server_model(client: Client, inbox: Parcel) -> ModelWeights:
    """The server's model, for evaluation on a device."""
    return client.model, inbox["weights"]


def _tier_inbox(models: Mapping[Tier, Tensors], device: Device) -> Parcel:
    return next({"weights": weights} for tier, weights in models.items() if tier.name == device.tier)


def batch_dependent(models: Mapping[Tier, Tensors]) -> dict[Tier, Tensors]:
    return {tier: weights for tier, weights in models.items() if tier.model.is_batch_dependent()}


def evaluated_tiers(target: EvalTarget, fleet: Fleet) -> list[Tier]:
    """The active tiers that the target is for."""
    return [tier for tier in fleet.active_tiers if not target.tiers or tier.name in target.tiers]


def _group_devices(fleet: Fleet) -> dict[str, list[int]]:
    """Indices of devices that may train ("local") and of holdout devices ("unseen")."""
    local = {"local": [index for index in range(fleet.size) if index not in fleet.holdout_devices]}
    return {**local, **({"unseen": sorted(fleet.holdout_devices)} if fleet.holdout_devices else {})}
