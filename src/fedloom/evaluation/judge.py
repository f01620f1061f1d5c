"""Judge every candidate at every tier: on the whole test set, and where the devices' own test examples are."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from ..data import Dataset
from ..fleet import Ask, Candidate, Carried, Device, DeviceModel, Fleet, ServerModel, Tier
from ..seeds import generator
from ..tensors import Parcel, Tensors
from ..training import Client, Schedule, mask_logits
from .exam import Exam, exit_names, last_exit
from .metrics import hits, log_loss, per_group, percent
from .personal import FineTune, Personal, by_acquaintance
from .rows import Row
from .static_batchnorm import StaticBatchNorm
from .text import TextJudge

SERVER_MODEL = ("server model",)  # where a device finds what it judges that with


@dataclass(frozen=True)
class Judge:
    dataset: Dataset
    own_tests: Sequence[Tensor]  # device by device, rows of the test set
    seen_labels: Tensor  # [devices, classes]
    statistics: StaticBatchNorm
    batch_size: int = 500
    tests: tuple[str, ...] = ("global", "local")
    fine_tune: FineTune | None = None
    candidates: tuple[str, ...] = ()  # those that are judged; empty: all
    own_tests_away: bool = False  # only the devices know them, and so are asked

    def rows(
        self,
        candidates: Mapping[str, Candidate],
        fleet: Fleet,
        ask: Ask,
        round_number: int,
        per_device: bool,
        last: bool = False,
    ) -> list[Row]:
        """Per tier, and per device where asked for; who holds no test examples has no row. Fine-tuning comes last."""
        found: list[Row] = []
        for name, candidate in candidates.items():
            if self.candidates and name not in self.candidates:
                continue
            if isinstance(candidate, ServerModel):
                judged = self._server_rows(name, candidate, fleet, ask, round_number, last)
            else:
                judged = self._device_rows(name, candidate, fleet, ask, round_number)
            found += (
                row
                for row in judged
                if (per_device or not row.device) and (row.metric != "accuracy" or not math.isnan(row.value))
            )
        return found

    def _server_rows(
        self, name: str, candidate: ServerModel, fleet: Fleet, ask: Ask, round_number: int, last: bool
    ) -> Iterator[Row]:
        models = {tier: candidate.weights(tier) for tier in judged_tiers(candidate, fleet)}
        filled = self.statistics.fill(models, fleet, ask, round_number)
        labels = self.dataset.test.y
        if self.by_position:
            yield from self.text.rows(name, filled, fleet, ask, round_number)
            return
        for tier, logits in self.logits(filled, fleet, ask).items():

            def row(test: str, metric: str, value: float, device: str = "", tier: Tier = tier) -> Row:
                return Row(round_number, name, tier.name, device, test, metric, value)

            if "global" in self.tests:
                yield row("global", "accuracy", percent(float(hits(logits, labels).sum()), len(labels)))
                yield row("global", "loss", log_loss(logits, labels))
            if "local" in self.tests and not self.own_tests_away:
                correct, total = self._own_counts(logits, candidate.unseen_logit)
                for test, devices in _acquaintance(fleet).items():
                    share = percent(float(correct[devices].sum()), float(total[devices].sum()))
                    yield row(test, "accuracy", share)
                    for index in devices:
                        share = percent(float(correct[index]), float(total[index]))
                        yield row(test, "accuracy", share, fleet.name(index))
        yield from self._shuffled_rows(name, filled, fleet, ask, round_number)
        if "local" in self.tests and self.own_tests_away:
            given = DeviceModel(
                server_model, partial(_weights_for, filled), candidate.unseen_logit, candidate.tiers, SERVER_MODEL
            )
            yield from replace(self, tests=("local",))._device_rows(name, given, fleet, ask, round_number)
        if self.fine_tune and last:
            yield from self.fine_tune.rows(name, filled, fleet, ask, round_number)

    def _shuffled_rows(
        self, name: str, models: Mapping[Tier, Tensors], fleet: Fleet, ask: Ask, round_number: int
    ) -> Iterator[Row]:
        """The same test in another order, for models that look at the whole batch: how much that matters."""
        minding = {tier: weights for tier, weights in models.items() if tier.model.mixes_examples()}
        if not minding or "global" not in self.tests:
            return
        labels = self.dataset.test.y
        order = torch.from_numpy(generator(0, "shuffled test").permutation(len(labels)))
        for tier, logits in self.logits(minding, fleet, ask, order).items():
            correct = float(hits(logits, labels[order]).sum())
            yield Row(round_number, name, tier.name, "", "global", "accuracy_shuffled", percent(correct, len(labels)))

    def logits(
        self, models: Mapping[Tier, Tensors], fleet: Fleet, ask: Ask, order: Tensor | None = None
    ) -> dict[Tier, Tensor]:
        """Every tier's logits for the test set, in this order. One question for all, so that workers share the work; a
        tier that is an early exit of a larger one needs no pass of its own."""
        hosts = self._exit_hosts(models)
        rows = torch.arange(len(self.dataset.test.y)) if order is None else order
        task = replace(self.exam.answer, schedule=Schedule(self.batch_size), address=("exam", "answer"))
        inboxes = {
            fleet.examiner(tier): {"weights": weights, "order": {"rows": rows}}
            for tier, weights in models.items()
            if tier not in hosts
        }
        said = {reply.device.tier: reply.sent["exits"] for reply in ask(task, inboxes)}
        silent = torch.full((len(rows), self.dataset.classes), torch.nan)  # a model that has diverged is not admitted
        return {tier: said.get(hosts.get(tier, tier).name, {}).get(last_exit(tier.model), silent) for tier in models}

    @property
    def exam(self) -> Exam:
        return Exam(self.batch_size)

    @property
    def text(self) -> TextJudge:
        return TextJudge(self.dataset, self.exam, self.batch_size)

    @torch.inference_mode()
    def _exit_hosts(self, models: Mapping[Tier, Tensors]) -> dict[Tier, Tier]:
        """Tiers whose last exit is, weights and all, an earlier exit of another; tried on a few examples."""
        x = self.dataset.preparation(self.dataset.test.x[:8]).unsqueeze(0)
        blocks = {tier: {name: one.unsqueeze(0) for name, one in weights.items()} for tier, weights in models.items()}
        found: dict[Tier, Tier] = {}
        for guest, own in blocks.items():
            for host, weights in blocks.items():
                end = last_exit(guest.model)
                inside = all(name in weights and torch.equal(one, weights[name]) for name, one in own.items())
                if host is guest or host in found or not inside or end not in exit_names(host.model)[:-1]:
                    continue
                if torch.equal(host.model(weights, x).exits[end], guest.model(own, x).logits):
                    found[guest] = host
                    break
        return found

    def _own_counts(self, logits: Tensor, unseen_logit: float | None) -> tuple[Tensor, Tensor]:
        """Per device, right answers and questions on its own test examples: [devices] each."""
        devices = len(self.own_tests)
        who = torch.repeat_interleave(torch.arange(devices), torch.tensor([len(own) for own in self.own_tests]))
        what = torch.cat(list(self.own_tests))
        judged = mask_logits(logits[what].unsqueeze(1), self.seen_labels[who], unseen_logit).squeeze(1)
        right = hits(judged, self.dataset.test.y[what])
        return per_group(right, who, devices), per_group(torch.ones_like(right), who, devices)

    def personal(self, candidate: DeviceModel) -> Personal:
        whole = self.dataset.test.x, self.dataset.test.y
        rows = self.batch_size if self.by_position else None
        return Personal(candidate, whole if "global" in self.tests else None, self.device_batch, rows)

    @property
    def by_position(self) -> bool:
        """Whether every position of an example is a question of its own."""
        return self.dataset.test.y.dim() > 1

    @property
    def device_batch(self) -> int:
        """Examples at a time where devices judge: many devices do it at once, and memory must not grow with them, nor
        with the positions that one example has."""
        return max(1, self.batch_size // 8 // math.prod(self.dataset.test.y.shape[1:]))

    def _device_rows(
        self, name: str, candidate: DeviceModel, fleet: Fleet, ask: Ask, round_number: int
    ) -> Iterator[Row]:
        address = ("personal", json.dumps(candidate.unseen_logit), *candidate.found_at)
        personal = self.personal(candidate)
        task = replace(personal.measure, schedule=Schedule(self.statistics.batch_size), address=address)
        tiers = [tier.name for tier in judged_tiers(candidate, fleet)]
        asked = [device for device in fleet.devices(round_number) if device.tier in tiers]
        replies = sorted(ask(task, {one: candidate.inbox(one) for one in asked}), key=lambda reply: reply.device.name)
        for test in self.tests:
            groups = by_acquaintance(fleet, replies) if test == "local" else {"global": replies}
            for shown, said in groups.items():
                for tier in tiers:
                    of_tier = [reply for reply in said if reply.device.tier == tier]
                    for metric, value in personal.measured(of_tier, test).items() if of_tier else ():
                        yield Row(round_number, name, tier, "", shown, metric, value)
                for reply in said:
                    for metric, value in personal.measured([reply], test).items():
                        yield Row(round_number, name, reply.device.tier, reply.device.name, shown, metric, value)


def server_model(client: Client, inbox: Parcel) -> Carried:
    """What the server has, judged by a device."""
    return client.model, inbox["weights"]


def _weights_for(models: Mapping[Tier, Tensors], device: Device) -> Parcel:
    """Every device judges its own tier's."""
    return next({"weights": weights} for tier, weights in models.items() if tier.name == device.tier)


def judged_tiers(candidate: Candidate, fleet: Fleet) -> list[Tier]:
    """Those that take part and that the candidate is for."""
    return [tier for tier in fleet.served if not candidate.tiers or tier.name in candidate.tiers]


def _acquaintance(fleet: Fleet) -> dict[str, list[int]]:
    known = {"local": [index for index in range(fleet.size) if index not in fleet.unseen]}
    return {**known, **({"unseen": sorted(fleet.unseen)} if fleet.unseen else {})}
