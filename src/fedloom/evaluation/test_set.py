"""The test set put to a model that the server holds: a task like any other, so that whoever has time does it.

Judging models that answer at every position: perplexity over all positions, and over those that were hidden.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from ..client import Client, ClientResult, Layout, Schedule, on_device
from ..data import Dataset
from ..fleet import Ask, Fleet, Tier
from ..models import Model
from ..seeds import PREDICT, SCORE
from ..tensors import Parcel, Tensors
from .metrics import Row
from .sequence import device_sums, hidden_positions, position_metrics, row_sums, score_positions


@lru_cache(maxsize=4096)
def exit_names(model: Model) -> tuple[str, ...]:
    """From shallow to deep."""
    weights = {**model.initial_weights(0), **{name: torch.ones(shape) for name, shape in model.statistics().items()}}
    block = {name: one.unsqueeze(0) for name, one in weights.items()}
    with torch.no_grad():
        return tuple(model(block, model.zero_inputs(1, 2)).exits)


def last_exit(model: Model) -> str:
    return exit_names(model)[-1]


def answers(model: Model, inbox: Parcel, examples: int) -> Layout:
    """One row of logits for each question, from every exit."""
    dtype = next(iter(inbox["weights"].values())).dtype
    return {name: ((len(inbox["order"]["rows"]), model.classes), dtype) for name in exit_names(model)}


def scores(model: Model, inbox: Parcel, examples: int) -> Layout:
    """For each question and position of the last exit, the loss and whether the answer is right."""
    shape = tuple(inbox["order"]["labels"].shape)
    return {"loss": (shape, torch.get_default_dtype()), "right": (shape, torch.bool)}


def batch_lengths(groups: Sequence[int], size: int) -> Tensor:
    """Of batches that hold at most `size` questions, and of one group each."""
    lengths = [min(size, group - start) for group in groups for start in range(0, group, size)]
    return torch.tensor(lengths, dtype=torch.int64)


@dataclass(frozen=True)
class GlobalEvaluation:
    """In large batches of the test set, in the order of the inbox. Room for all answers is taken first: small results
    kept between large ones that come and go would pin the heap, which then grows by a batch's activations each time."""

    batch_size: int

    @on_device(sends={"scores": scores}, stream=SCORE, batch_across_runs=False)
    @torch.inference_mode()
    def score(self, client: Client, inbox: Parcel) -> ClientResult:
        """Where every position of an example is a question of its own: logits of all of them would fill the memory."""
        order, labels = inbox["order"]["rows"][0], inbox["order"]["labels"]
        kinds = {"loss": torch.get_default_dtype(), "right": torch.bool}
        made = {name: torch.empty_like(labels, dtype=kind) for name, kind in kinds.items()}
        for number, rows in enumerate(order.split(self.batch_size)):
            x, y = client.preparation(client.tests.x[rows]).unsqueeze(0), client.tests.y[rows]
            here = slice(number * self.batch_size, number * self.batch_size + len(rows))
            made["loss"][0, here], made["right"][0, here] = score_positions(client.model(inbox["weights"], x).logits[0], y)
        return ClientResult(upload={"scores": made})

    @on_device(sends={"exits": answers}, stream=PREDICT, batch_across_runs=False)
    @torch.inference_mode()
    def predict(self, client: Client, inbox: Parcel) -> ClientResult:
        """Which questions make a batch is in the inbox too: some models look at the whole of it."""
        order, lengths = (inbox["order"][name][0] for name in ("rows", "lengths"))
        weights, room = inbox["weights"], (1, len(order), client.model.classes)
        like = next(iter(weights.values()))
        made = {name: like.new_empty(room) for name in exit_names(client.model)}
        start = 0
        for rows in order.split(lengths.tolist()):
            x = client.preparation(client.tests.x[rows]).unsqueeze(0)
            for name, logits in client.model(weights, x).exits.items():
                made[name][:, start : start + len(rows)] = logits
            start += len(rows)
        return ClientResult(upload={"exits": made})


@dataclass(frozen=True)
class SequenceEvaluator:
    """`batch_size` rows make a batch, of which perplexity is the exponential of the mean loss."""

    dataset: Dataset
    test_set: GlobalEvaluation
    batch_size: int

    def rows(
        self, name: str, models: Mapping[Tier, Tensors], fleet: Fleet, ask: Ask, round_number: int
    ) -> Iterator[Row]:
        for tier, said in self._scores(models, fleet, ask).items():
            for metric, value in self.compute_metrics(said["loss"], said["right"]).items():
                yield Row(round_number, name, tier.name, "", "global", metric, value)

    def _scores(self, models: Mapping[Tier, Tensors], fleet: Fleet, ask: Ask) -> dict[Tier, Tensors]:
        """A model that has diverged is not admitted, and so has no score."""
        labels = self.dataset.test.y
        order = {"rows": torch.arange(len(labels)), "labels": labels}
        task = replace(self.test_set.score, schedule=Schedule(self.batch_size), ref=("test_set", "score"))
        inboxes = {fleet.evaluation_device(tier): {"weights": weights, "order": order} for tier, weights in models.items()}
        said = {reply.device.tier: reply.upload["scores"] for reply in ask(task, inboxes)}
        silent = {"loss": torch.full(labels.shape, torch.nan), "right": torch.zeros(labels.shape, dtype=torch.bool)}
        return {tier: said.get(tier.name, silent) for tier in models}

    def compute_metrics(self, losses: Tensor, right: Tensor) -> dict[str, float]:
        hidden = self.hidden()
        rows = row_sums(losses[None], right[None], None if hidden is None else hidden[None])
        everything = torch.ones(1, len(losses), dtype=torch.bool)
        return position_metrics([device_sums(rows, everything, self.batch_size)])

    def hidden(self) -> Tensor | None:
        return hidden_positions(self.dataset.preparation, self.dataset.test.x)
