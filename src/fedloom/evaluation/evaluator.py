"""Judge every candidate at every tier: on the whole test set, and where the devices' own test examples are."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from ..client import Client, Schedule, mask_logits
from ..data import Dataset
from ..fleet import Ask, Device, DeviceModel, EvalTarget, Fleet, ModelWeights, ServerModel, Tier
from ..models import Model
from ..seeds import SHUFFLED_TEST, generator
from ..tensors import Parcel, Tensors, fingerprint
from .batchnorm import StaticBatchNorm
from .local import FineTune, LocalEvaluation, batch_where_devices_judge, by_acquaintance
from .metrics import Row, is_correct, log_loss, per_group, percent
from .test_set import GlobalEvaluation, SequenceEvaluator, batch_lengths, exit_names, last_exit

SERVER_MODEL_REF = ("server model",)  # where a device finds what it judges that with
Filled = tuple[str, Mapping[str, Tensors]]  # of which weights, and their statistics by tier


@dataclass(frozen=True)
class Evaluator:
    dataset: Dataset
    local_tests: Sequence[Tensor]  # device by device, rows of the test set
    seen_labels: Tensor  # [devices, classes]
    statistics: StaticBatchNorm
    batch_size: int = 500
    tests: tuple[str, ...] = ("global", "local")
    fine_tune: FineTune | None = None
    candidates: tuple[str, ...] = ()  # those that are judged; empty: all
    tests_on_devices: bool = False  # only the devices know them, and so are asked
    filled: dict[str, Filled] = field(default_factory=dict, compare=False)  # by candidate

    def rows(
        self,
        candidates: Mapping[str, EvalTarget],
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

    def models(
        self, name: str, candidate: ServerModel, fleet: Fleet, ask: Ask, round_number: int
    ) -> dict[Tier, Tensors]:
        """Weights with their statistics. What is judged and then saved is the same, and devices are asked for it once:
        by then they may have left."""
        weights = {tier: candidate.weights(tier) for tier in judged_tiers(candidate, fleet)}
        if not any(tier.model.statistics() for tier in weights):
            return weights
        mark = fingerprint({tier.name: one for tier, one in weights.items()})
        if self.filled.get(name, ("", {}))[0] != mark:
            whole = self.statistics.fill(weights, fleet, ask, round_number)
            own: dict[str, Tensors] = {
                tier.name: {key: whole[tier][key] for key in tier.model.statistics()} for tier in whole
            }
            self.filled[name] = (mark, own)
        return {tier: {**one, **self.filled[name][1][tier.name]} for tier, one in weights.items()}

    def _server_rows(
        self, name: str, candidate: ServerModel, fleet: Fleet, ask: Ask, round_number: int, last: bool
    ) -> Iterator[Row]:
        filled = self.models(name, candidate, fleet, ask, round_number)
        labels = self.dataset.test.y
        if self.by_position:
            yield from self.text.rows(name, filled, fleet, ask, round_number)
            return
        own = self._own_logits(filled, fleet, ask)
        whole = {tier: weights for tier, weights in filled.items() if "global" in self.tests or tier not in own}
        answers = self.logits(whole, fleet, ask)
        for tier in filled:

            def row(test: str, metric: str, value: float, device: str = "", tier: Tier = tier) -> Row:
                return Row(round_number, name, tier.name, device, test, metric, value)

            if "global" in self.tests:
                yield row("global", "accuracy", percent(float(is_correct(answers[tier], labels).sum()), len(labels)))
                yield row("global", "loss", log_loss(answers[tier], labels))
            if "local" in self.tests and not self.tests_on_devices:
                said = own[tier] if tier in own else answers[tier][torch.cat(list(self.local_tests))]
                correct, total = self._own_counts(said, candidate.unseen_logit)
                for test, devices in _acquaintance(fleet).items():
                    share = percent(float(correct[devices].sum()), float(total[devices].sum()))
                    yield row(test, "accuracy", share)
                    for index in devices:
                        share = percent(float(correct[index]), float(total[index]))
                        yield row(test, "accuracy", share, fleet.name(index))
        yield from self._shuffled_rows(name, filled, fleet, ask, round_number)
        if "local" in self.tests and self.tests_on_devices:
            given = DeviceModel(
                load_server_model, partial(_weights_for, filled), candidate.unseen_logit, candidate.tiers, SERVER_MODEL_REF
            )
            yield from replace(self, tests=("local",))._device_rows(name, given, fleet, ask, round_number)
        if self.fine_tune and last:
            yield from self.fine_tune.rows(name, filled, fleet, ask, round_number)

    def _shuffled_rows(
        self, name: str, models: Mapping[Tier, Tensors], fleet: Fleet, ask: Ask, round_number: int
    ) -> Iterator[Row]:
        """The same test in another order, for models that look at the whole batch: how much that matters."""
        minding = minding_the_batch(models)
        if not minding or "global" not in self.tests:
            return
        labels = self.dataset.test.y
        order = torch.from_numpy(generator(0, SHUFFLED_TEST).permutation(len(labels)))
        for tier, logits in self.logits(minding, fleet, ask, order).items():
            correct = float(is_correct(logits, labels[order]).sum())
            yield Row(round_number, name, tier.name, "", "global", "accuracy_shuffled", percent(correct, len(labels)))

    def _own_logits(self, models: Mapping[Tier, Tensors], fleet: Fleet, ask: Ask) -> dict[Tier, Tensor]:
        """For models that look at the whole batch: to every device's own test examples, which no other's are among."""
        minding = minding_the_batch(models)
        sizes = [len(own) for own in self.local_tests]
        if not minding or not sum(sizes) or "local" not in self.tests or self.tests_on_devices:
            return {}
        return self.logits(minding, fleet, ask, torch.cat(list(self.local_tests)), sizes)

    def logits(
        self,
        models: Mapping[Tier, Tensors],
        fleet: Fleet,
        ask: Ask,
        order: Tensor | None = None,
        groups: Sequence[int] | None = None,
    ) -> dict[Tier, Tensor]:
        """Every tier's logits for the test set, in this order; no batch has questions of two groups. One question for
        all, so that workers share the work; a tier whose answers are also another's needs no pass of its own."""
        if not models:
            return {}
        hosts = self._hosts(models)
        rows = torch.arange(len(self.dataset.test.y)) if order is None else order
        questions = {"rows": rows, "lengths": batch_lengths(groups or [len(rows)], self.batch_size)}
        task = replace(self.test_set.predict, schedule=Schedule(self.batch_size), ref=("test_set", "predict"))
        inboxes = {
            fleet.evaluation_device(tier): {"weights": weights, "order": questions}
            for tier, weights in models.items()
            if tier not in hosts
        }
        said = {reply.device.tier: reply.upload["exits"] for reply in ask(task, inboxes)}
        silent = torch.full((len(rows), self.dataset.classes), torch.nan)  # a model that has diverged is not admitted
        return {tier: said.get(hosts.get(tier, tier).name, {}).get(last_exit(tier.model), silent) for tier in models}

    @property
    def test_set(self) -> GlobalEvaluation:
        return GlobalEvaluation(self.batch_size)

    @property
    def text(self) -> SequenceEvaluator:
        return SequenceEvaluator(self.dataset, self.test_set, self.batch_size)

    def _hosts(self, models: Mapping[Tier, Tensors]) -> dict[Tier, Tier]:
        """Tiers whose last exit is, weights and all, an exit of another: of the same net, or of a deeper one."""
        hosts: list[Tier] = []
        found: dict[Tier, Tier] = {}
        for guest in sorted(models, key=lambda tier: -len(exit_names(tier.model))):
            host = next((one for one in hosts if self._answers_for(one, guest, models)), None)
            if host is None:
                hosts.append(guest)
            else:
                found[guest] = host
        return found

    @torch.inference_mode()
    def _answers_for(self, host: Tier, guest: Tier, models: Mapping[Tier, Tensors]) -> bool:
        """Tried on a few examples."""
        weights, own, end = models[host], models[guest], last_exit(guest.model)
        if end not in exit_names(host.model):
            return False
        if not all(name in weights and torch.equal(one, weights[name]) for name, one in own.items()):
            return False
        x = self.dataset.preparation(self.dataset.test.x[:8]).unsqueeze(0)
        block, own_block = ({name: one.unsqueeze(0) for name, one in w.items()} for w in (weights, own))
        return torch.equal(host.model(block, x).exits[end], guest.model(own_block, x).logits)

    def _own_counts(self, logits: Tensor, unseen_logit: float | None) -> tuple[Tensor, Tensor]:
        """Per device, right answers and questions on its own test examples: [devices] each."""
        devices = len(self.local_tests)
        who = torch.repeat_interleave(torch.arange(devices), torch.tensor([len(own) for own in self.local_tests]))
        what = torch.cat(list(self.local_tests))
        judged = mask_logits(logits.unsqueeze(1), self.seen_labels[who], unseen_logit).squeeze(1)
        right = is_correct(judged, self.dataset.test.y[what])
        return per_group(right, who, devices), per_group(torch.ones_like(right), who, devices)

    def local_evaluation(self, candidate: DeviceModel) -> LocalEvaluation:
        whole = self.dataset.test.x, self.dataset.test.y
        rows = self.batch_size if self.by_position else None
        return LocalEvaluation(candidate, whole if "global" in self.tests else None, self.device_batch_size, rows)

    @property
    def device_batch_size(self) -> Callable[[Model], int]:
        return partial(batch_where_devices_judge, self.batch_size, math.prod(self.dataset.test.y.shape[1:]))

    @property
    def by_position(self) -> bool:
        """Whether every position of an example is a question of its own."""
        return self.dataset.test.y.dim() > 1

    def _device_rows(
        self, name: str, candidate: DeviceModel, fleet: Fleet, ask: Ask, round_number: int
    ) -> Iterator[Row]:
        ref = ("personal", json.dumps(candidate.unseen_logit), *candidate.load_ref)
        local_evaluation = self.local_evaluation(candidate)
        task = replace(local_evaluation.evaluate, schedule=Schedule(self.statistics.batch_size), ref=ref)
        tiers = [tier.name for tier in judged_tiers(candidate, fleet)]
        asked = [device for device in fleet.devices(round_number) if device.tier in tiers]
        replies = sorted(ask(task, {one: candidate.inbox(one) for one in asked}), key=lambda reply: reply.device.name)
        for test in self.tests:
            groups = by_acquaintance(fleet, replies) if test == "local" else {"global": replies}
            for shown, said in groups.items():
                for tier in tiers:
                    of_tier = [reply for reply in said if reply.device.tier == tier]
                    for metric, value in local_evaluation.compute_metrics(of_tier, test).items() if of_tier else ():
                        yield Row(round_number, name, tier, "", shown, metric, value)
                for reply in said:
                    for metric, value in local_evaluation.compute_metrics([reply], test).items():
                        yield Row(round_number, name, reply.device.tier, reply.device.name, shown, metric, value)


def load_server_model(client: Client, inbox: Parcel) -> ModelWeights:
    """What the server has, judged by a device."""
    return client.model, inbox["weights"]


def _weights_for(models: Mapping[Tier, Tensors], device: Device) -> Parcel:
    """Every device judges its own tier's."""
    return next({"weights": weights} for tier, weights in models.items() if tier.name == device.tier)


def minding_the_batch(models: Mapping[Tier, Tensors]) -> dict[Tier, Tensors]:
    return {tier: weights for tier, weights in models.items() if tier.model.is_batch_dependent()}


def judged_tiers(candidate: EvalTarget, fleet: Fleet) -> list[Tier]:
    """Those that take part and that the candidate is for."""
    return [tier for tier in fleet.active_tiers if not candidate.tiers or tier.name in candidate.tiers]


def _acquaintance(fleet: Fleet) -> dict[str, list[int]]:
    known = {"local": [index for index in range(fleet.size) if index not in fleet.holdout_devices]}
    return {**known, **({"unseen": sorted(fleet.holdout_devices)} if fleet.holdout_devices else {})}
