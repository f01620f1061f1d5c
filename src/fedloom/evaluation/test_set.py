"""Evaluation of server models on the global test set: an ordinary task, so that workers share it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..client import Client, ClientResult, Layout, Schedule, on_device
from ..data import IGNORED, Dataset
from ..fleet import Ask, Fleet, Tier
from ..models import Model, exit_names
from ..seeds import PREDICT, SCORE, SHUFFLED_LOCAL_TEST, SHUFFLED_TEST, generator
from ..tensors import Parcel, Tensors
from .metrics import Row
from .pixels import sum_pixels
from .sequence import DEFAULT_SEQUENCE_METRICS, device_sums, find_masked, row_sums, score_positions, sequence_metrics


def prediction_width(model: Model) -> int:
    """How many numbers are kept of the prediction for an example: its logits, or the sums over its pixels."""
    return model.classes**2 + 1 if model.predicts_pixels else model.classes


def exits_layout(model: Model, inbox: Parcel, examples: int) -> Layout:
    """For every exit the logits of every example, or the sums over its pixels."""
    dtype = torch.float64 if model.predicts_pixels else next(iter(inbox["weights"].values())).dtype
    return {name: ((len(inbox["order"]["rows"]), prediction_width(model)), dtype) for name in exit_names(model)}


def scores_layout(model: Model, inbox: Parcel, examples: int) -> Layout:
    """For every example and position, the loss of the last exit and whether its prediction is correct."""
    shape = tuple(inbox["order"]["labels"].shape)
    return {"loss": (shape, torch.get_default_dtype()), "right": (shape, torch.bool)}


def global_order(examples: int, seed: int) -> Tensor:
    """The order in which models that normalize by the batch see the test set, drawn once from the run's seed.

    Their predictions depend on the rest of the batch, and sorted by label a batch would be of one class, which is not
    how they are trained or used. Other models see examples as they are stored.

    Parameters
    ----------
    examples : the number of test examples.
    seed : the seed of the run.
    """
    return torch.from_numpy(generator(seed, SHUFFLED_TEST).permutation(examples))


def local_order(examples: int, seed: int, device: str) -> Tensor:
    """The same for a device's own test examples.

    Parameters
    ----------
    examples : the number of its test examples.
    seed : the seed of the run.
    device : the name of the device.
    """
    return torch.from_numpy(generator(seed, SHUFFLED_LOCAL_TEST, device).permutation(examples))


def batch_lengths(groups: Sequence[int], size: int) -> Tensor:
    """Lengths of batches of at most `size` examples that do not span two groups."""
    lengths = [min(size, group - start) for group in groups for start in range(0, group, size)]
    return torch.tensor(lengths, dtype=torch.int64)


@dataclass(frozen=True)
class GlobalEvaluation:
    """Tasks that evaluate a model on rows of the test set, in the order of the inbox.

    The results are allocated first: small tensors allocated between the large activations of successive batches would
    fragment the heap, which would then grow with every batch.
    """

    batch_size: int

    @on_device(sends={"scores": scores_layout}, stream=SCORE, batch_across_runs=False)
    @torch.inference_mode()
    def score(self, client: Client, inbox: Parcel) -> ClientResult:
        """For sequences: losses instead of logits, which would not fit into memory."""
        order, labels = inbox["order"]["rows"][0], inbox["order"]["labels"]
        dtypes = {"loss": torch.get_default_dtype(), "right": torch.bool}
        scores = {name: torch.empty_like(labels, dtype=dtype) for name, dtype in dtypes.items()}
        for number, rows in enumerate(order.split(self.batch_size)):
            x, y = client.preparation(client.tests.x[rows]).unsqueeze(0), client.tests.y[rows]
            batch = slice(number * self.batch_size, number * self.batch_size + len(rows))
            logits = client.model(inbox["weights"], x).logits[0]
            scores["loss"][0, batch], scores["right"][0, batch] = score_positions(logits, y)
        return ClientResult(upload={"scores": scores})

    @on_device(sends={"exits": exits_layout}, stream=PREDICT, batch_across_runs=False, host_bundles=("batches",))
    @torch.inference_mode()
    def predict(self, client: Client, inbox: Parcel) -> ClientResult:
        """Logits of every exit. The inbox also defines the batches, since some models depend on them."""
        order, lengths = inbox["order"]["rows"][0], inbox["batches"]["lengths"][0]
        weights, shape = inbox["weights"], (1, len(order), prediction_width(client.model))
        sums_only = client.model.predicts_pixels
        first = next(iter(weights.values()))
        dtype = torch.float64 if sums_only else first.dtype
        exits = {name: first.new_empty(shape, dtype=dtype) for name in exit_names(client.model)}
        start = 0
        for rows in order.split(lengths.tolist()):
            x = client.preparation(client.tests.x[rows]).unsqueeze(0)
            for name, logits in client.model(weights, x).exits.items():
                kept = sum_pixels(logits, client.tests.y[rows].unsqueeze(0)) if sums_only else logits
                exits[name][:, start : start + len(rows)] = kept
            start += len(rows)
        return ClientResult(upload={"exits": exits})


@dataclass(frozen=True)
class SequenceEvaluator:
    """Perplexity and accuracy over all positions and over the masked ones.

    A batch of `batch_size` rows has the exponential of its mean loss as perplexity.
    """

    dataset: Dataset
    test_set: GlobalEvaluation
    batch_size: int
    metrics: tuple[str, ...] = DEFAULT_SEQUENCE_METRICS

    def rows(
        self, name: str, models: Mapping[Tier, Tensors], fleet: Fleet, ask: Ask, round_number: int
    ) -> Iterator[Row]:
        for tier, scores in self._scores(models, fleet, ask).items():
            for metric, value in self.compute_metrics(scores["loss"], scores["right"]).items():
                yield Row(round_number, name, tier.name, "", "global", metric, value)

    def _scores(self, models: Mapping[Tier, Tensors], fleet: Fleet, ask: Ask) -> dict[Tier, Tensors]:
        labels = self.dataset.test.y
        order = {"rows": torch.arange(len(labels)), "labels": labels}
        task = replace(self.test_set.score, schedule=Schedule(self.batch_size), ref=("test_set", "score"))
        inboxes = {
            fleet.evaluation_device(tier): {"weights": weights, "order": order} for tier, weights in models.items()
        }
        scores = {reply.device.tier: reply.upload["scores"] for reply in ask(task, inboxes)}
        missing = {  # a diverged model's reply is refused
            "loss": torch.full(labels.shape, torch.nan),
            "right": torch.zeros(labels.shape, dtype=torch.bool),
        }
        return {tier: scores.get(tier.name, missing) for tier in models}

    def compute_metrics(self, losses: Tensor, correct: Tensor) -> dict[str, float]:
        masked = self.masked()
        counted = self.dataset.test.y != IGNORED
        rows = row_sums(losses[None], correct[None], None if masked is None else masked[None], counted[None])
        real = torch.ones(1, len(losses), dtype=torch.bool)
        return sequence_metrics([device_sums(rows, real, self.batch_size)], self.metrics)

    def masked(self) -> Tensor | None:
        """Which positions of the test set are masked; None if none ever is."""
        return find_masked(self.dataset.preparation, self.dataset.test.x)
