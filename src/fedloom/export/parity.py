"""What an exported file is worth: does it make what the run's model makes, how good is it, how fast is it here."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..data import Dataset
from ..evaluation.metrics import is_correct, log_loss, percent
from ..evaluation.sequence import score_positions
from ..evaluation.test_set import GlobalEvaluation, SequenceEvaluator
from ..models import Model
from ..tensors import Tensors
from .formats import Predictor

TOLERANCE = 1e-5
COMPARED = 256  # examples
WARM_UPS, TIMED = 10, 100


@dataclass(frozen=True)
class Parity:
    """`difference` is the largest of any logit; it may be TOLERANCE, times the largest logit where that is above 1,
    for single precision has seven digits wherever the point is."""

    difference: float
    largest_logit: float
    examples: int

    @property
    def bound(self) -> float:
        return TOLERANCE * max(1.0, self.largest_logit)

    @property
    def is_within_bound(self) -> bool:
        return self.difference <= self.bound  # not where one of them is no number


def as_predictor(model: Model, weights: Tensors) -> Predictor:
    """A model as a run has it: a function of the weights of a block of devices, here of one."""
    block = {name: one.unsqueeze(0) for name, one in weights.items()}
    return lambda x: model(block, x.unsqueeze(0)).logits[0]


@torch.inference_mode()
def check_parity(
    answer: Predictor, examples: Tensor, right: Predictor, inputs: Tensor, one_at_a_time: bool = False
) -> Parity:
    """`examples` as the file takes them against `inputs` as the model does: one alone, three, and all others at once;
    or each alone."""
    count = min(COMPARED, len(examples))
    cuts = [1] * count if one_at_a_time else [size for size in (1, 3, count - 4) if size > 0]
    differences, largest = [], 0.0
    for given, wanted in zip(examples[: sum(cuts)].split(cuts), inputs[: sum(cuts)].split(cuts), strict=True):
        made, expected = answer(given), right(wanted)
        differences.append(float((made.double() - expected.double()).abs().max()))
        largest = max(largest, float(expected.abs().max()))
    worst = max(differences, key=lambda one: (one != one, one))  # what is no number is worst
    return Parity(worst, largest, sum(cuts))


@torch.inference_mode()
def evaluate_predictor(
    answer: Predictor, dataset: Dataset, given: Callable[[Tensor], Tensor], batch_size: int
) -> dict[str, float]:
    """On the whole test set, by the judge's own definitions; `given` makes of stored examples what the file takes."""
    batches = dataset.test.x.split(batch_size)
    if dataset.test.y.dim() > 1:
        said = [score_positions(answer(given(x)), y) for x, y in zip(batches, dataset.test.y.split(batch_size), strict=True)]
        evaluator = SequenceEvaluator(dataset, GlobalEvaluation(batch_size), batch_size)
        return evaluator.compute_metrics(torch.cat([loss for loss, _ in said]), torch.cat([right for _, right in said]))
    logits = torch.cat([answer(given(x)) for x in batches])
    return {"accuracy": share_right(logits, dataset.test.y), "loss": log_loss(logits, dataset.test.y)}


@torch.inference_mode()
def measure_accuracy(answer: Predictor, x: Tensor, y: Tensor, batch_size: int) -> float:
    """Of some examples, as the file takes them."""
    return share_right(torch.cat([answer(part) for part in x.split(batch_size)]), y)


def share_right(logits: Tensor, labels: Tensor) -> float:
    return percent(float(is_correct(logits, labels).sum()), labels.numel())


@torch.inference_mode()
def measure_latency_ms(answer: Predictor, example: Tensor) -> float:
    """Of one example on this machine: the median of 100 runs after 10."""
    spent, run = [], partial(answer, example)
    for _ in range(WARM_UPS + TIMED):
        began = time.perf_counter()
        run()
        spent.append(1000 * (time.perf_counter() - began))
    return statistics.median(spent[WARM_UPS:])
