"""Judge every candidate at every tier: on the whole test set, and where the devices' own test examples are."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..data import Dataset
from ..fleet import Ask, Candidate, DeviceModel, Fleet, Reply, ServerModel, Tier
from ..models import Model
from ..tensors import Parcel, Tensors
from ..training import Client, Outcome, Schedule, mask_logits, on_device, shaped
from .metrics import hits, log_loss, per_group, percent
from .rows import Row
from .static_batchnorm import StaticBatchNorm, own_statistics


@dataclass(frozen=True)
class Judge:
    dataset: Dataset
    own_tests: Sequence[Tensor]  # device by device, rows of the test set
    seen_labels: Tensor  # [devices, classes]
    statistics: StaticBatchNorm
    batch_size: int = 500
    tests: tuple[str, ...] = ("global", "local")

    def rows(
        self, candidates: Mapping[str, Candidate], fleet: Fleet, ask: Ask, round_number: int, per_device: bool
    ) -> list[Row]:
        """Per tier, and per device where asked for; who holds no test examples has no row."""
        found: list[Row] = []
        for name, candidate in candidates.items():
            if isinstance(candidate, ServerModel):
                judged = self._server_rows(name, candidate, fleet, ask, round_number)
            else:
                judged = self._device_rows(name, candidate, fleet, ask, round_number)
            found += (
                row
                for row in judged
                if (per_device or not row.device) and (row.metric != "accuracy" or not math.isnan(row.value))
            )
        return found

    def _server_rows(
        self, name: str, candidate: ServerModel, fleet: Fleet, ask: Ask, round_number: int
    ) -> Iterator[Row]:
        models = {tier: candidate.weights(tier) for tier in fleet.served}
        for tier, weights in self.statistics.fill(models, fleet, ask, round_number).items():
            logits = self.logits(tier.model, weights)

            def row(test: str, metric: str, value: float, device: str = "", tier: Tier = tier) -> Row:
                return Row(round_number, name, tier.name, device, test, metric, value)

            labels = self.dataset.test.y
            if "global" in self.tests:
                yield row("global", "accuracy", percent(float(hits(logits, labels).sum()), len(labels)))
                yield row("global", "loss", log_loss(logits, labels))
            if "local" in self.tests:
                correct, total = self._own_counts(logits, candidate.unseen_logit)
                yield row("local", "accuracy", percent(float(correct.sum()), float(total.sum())))
                for index in range(fleet.size):
                    share = percent(float(correct[index]), float(total[index]))
                    yield row("local", "accuracy", share, fleet.name(index))

    @torch.inference_mode()
    def logits(self, model: Model, weights: Tensors) -> Tensor:
        """One model's logits for the whole test set, in large batches."""
        block = {name: weight.unsqueeze(0) for name, weight in weights.items()}
        parts = self.dataset.test.x.split(self.batch_size)
        made = [model(block, self.dataset.preparation(x).unsqueeze(0)).logits[0] for x in parts]
        return torch.cat(made)

    def _own_counts(self, logits: Tensor, unseen_logit: float | None) -> tuple[Tensor, Tensor]:
        """Per device, right answers and questions on its own test examples: [devices] each."""
        devices = len(self.own_tests)
        who = torch.repeat_interleave(torch.arange(devices), torch.tensor([len(own) for own in self.own_tests]))
        what = torch.cat(list(self.own_tests))
        judged = mask_logits(logits[what].unsqueeze(1), self.seen_labels[who], unseen_logit).squeeze(1)
        right = hits(judged, self.dataset.test.y[what])
        return per_group(right, who, devices), per_group(torch.ones_like(right), who, devices)

    def personal(self, candidate: DeviceModel) -> "Personal":
        whole = self.dataset.test.x, self.dataset.test.y
        return Personal(candidate, whole if "global" in self.tests else None, self.batch_size)

    def _device_rows(
        self, name: str, candidate: DeviceModel, fleet: Fleet, ask: Ask, round_number: int
    ) -> Iterator[Row]:
        address = ("personal", candidate.weights.__name__, json.dumps(candidate.unseen_logit))
        measure = self.personal(candidate).measure
        task = replace(measure, schedule=Schedule(self.statistics.batch_size), address=address)
        inboxes = {device: candidate.inbox(device) for device in fleet.devices(round_number)}
        replies = sorted(ask(task, inboxes), key=lambda reply: reply.device.name)
        for test in self.tests:
            for tier in fleet.served:
                of_tier = [reply for reply in replies if reply.device.tier == tier.name]
                if of_tier:
                    yield Row(round_number, name, tier.name, "", test, "accuracy", _together(of_tier, test))
            for reply in replies:
                device = reply.device
                yield Row(round_number, name, device.tier, device.name, test, "accuracy", _together([reply], test))


def _together(replies: Sequence[Reply], test: str) -> float:
    """All answers of these devices, counted alike."""
    counts = [reply.sent[test] for reply in replies if test in reply.sent]
    return percent(sum(float(c["correct"]) for c in counts), sum(float(c["total"]) for c in counts))


COUNTS = shaped(correct=((), torch.float64), total=((), torch.float64))


@dataclass(frozen=True)
class Personal:
    """Has every device judge a model of its own."""

    candidate: DeviceModel
    whole_test: tuple[Tensor, Tensor] | None
    batch_size: int

    @on_device(sends={"local": COUNTS, "global": COUNTS})
    def measure(self, client: Client, inbox: Parcel) -> Outcome:
        weights = own_statistics(client, self.candidate.weights(client, inbox))
        with torch.no_grad():
            return Outcome(send={"local": self._own(client, weights), "global": self._whole(client, weights)})

    def _size(self, client: Client) -> int:
        """So many examples at a time, all devices of the block together: memory must not grow with the block."""
        return max(1, self.batch_size // len(client.seen_labels))

    def _own(self, client: Client, weights: Tensors) -> dict[str, Tensor]:
        correct = total = torch.zeros(len(client.seen_labels), dtype=torch.float64)
        for batch, real in client.test_batches(self._size(client)):
            made = client.model(weights, batch.x).logits
            logits = mask_logits(made, client.seen_labels, self.candidate.unseen_logit)
            correct = correct + (hits(logits, batch.y) & real).sum(1)
            total = total + real.sum(1)
        return {"correct": correct, "total": total}

    def _whole(self, client: Client, weights: Tensors) -> dict[str, Tensor]:
        devices = len(client.seen_labels)
        correct = total = torch.zeros(devices, dtype=torch.float64)
        for x, y in zip(*(part.split(self._size(client)) for part in self.whole_test or ()), strict=True):
            prepared = client.preparation(x)
            logits = client.model(weights, prepared.expand(devices, *prepared.shape)).logits
            correct, total = correct + hits(logits, y).sum(1), total + len(y)
        return {"correct": correct, "total": total}
