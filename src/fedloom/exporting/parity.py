"""Check an exported file: does it agree with the run's model, how accurate is it, and how fast on this machine."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..data import Dataset, LearningTask
from ..evaluation.metrics import default_metrics, is_correct, log_loss, percent, predicted_values
from ..evaluation.pixels import sum_pixels
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
    """The largest difference of any logit between a file and the run's model.

    Parameters
    ----------
    difference : the largest difference.
    largest_logit : the largest logit of the run's model.
    examples : the number of examples that were compared.
    """

    difference: float
    largest_logit: float
    examples: int

    @property
    def bound(self) -> float:
        """The largest difference that is allowed: single precision has seven significant digits."""
        return TOLERANCE * max(1.0, self.largest_logit)

    @property
    def is_within_bound(self) -> bool:
        """True if the difference is at most the bound."""
        return self.difference <= self.bound  # False for NaN


def as_predictor(model: Model, weights: Tensors) -> Predictor:
    """A run's model with these weights, as a function from examples to logits, in the layout of the module's forward.

    Parameters
    ----------
    model : the model.
    weights : its weights, of one device.
    """
    block = {name: weight.unsqueeze(0) for name, weight in weights.items()}
    axis = model.class_axis
    return lambda x: model(block, x.unsqueeze(0)).logits[0].movedim(-1, axis)


@torch.inference_mode()
def check_parity(
    file: Predictor, examples: Tensor, model: Predictor, inputs: Tensor, one_at_a_time: bool = False
) -> Parity:
    """Compare a file with the run's model, in batches of 1, 3 and the rest.

    Parameters
    ----------
    file : the opened file.
    examples : what it takes.
    model : the run's model.
    inputs : what that takes for the same examples.
    one_at_a_time : whether the file takes only batches of one example.
    """
    count = min(COMPARED, len(examples))
    sizes = [1] * count if one_at_a_time else [size for size in (1, 3, count - 4) if size > 0]
    differences, largest = [], 0.0
    for batch, batch_inputs in zip(examples[: sum(sizes)].split(sizes), inputs[: sum(sizes)].split(sizes), strict=True):
        actual, expected = file(batch), model(batch_inputs)
        differences.append(float((actual.double() - expected.double()).abs().max()))
        largest = max(largest, float(expected.abs().max()))
    worst = max(differences, key=lambda value: (value != value, value))  # NaN is worst
    return Parity(worst, largest, sum(sizes))


@torch.inference_mode()
def evaluate_predictor(
    predictor: Predictor, dataset: Dataset, to_inputs: Callable[[Tensor], Tensor], batch_size: int
) -> dict[str, float]:
    """The metrics of a run on the whole test set.

    Parameters
    ----------
    predictor : a function from examples to logits.
    dataset : the data set.
    to_inputs : turns stored examples into what the predictor takes.
    batch_size : the batch size.
    """
    batches, task = dataset.test.x.split(batch_size), dataset.task
    if task.is_sequence:
        pairs = zip(batches, dataset.test.y.split(batch_size), strict=True)
        losses, hit_counts = zip(*(score_positions(predictor(to_inputs(x)), y) for x, y in pairs), strict=True)
        evaluator = SequenceEvaluator(dataset, GlobalEvaluation(batch_size), batch_size)
        return evaluator.compute_metrics(torch.cat(losses), torch.cat(hit_counts))
    if not task.has_class_labels:
        return evaluate_examples(predictor, to_inputs(dataset.test.x), dataset.test.y, batch_size, task)
    logits = torch.cat([predictor(to_inputs(x)) for x in batches])
    return {"accuracy": accuracy(logits, dataset.test.y), "loss": log_loss(logits, dataset.test.y)}


@torch.inference_mode()
def evaluate_examples(
    predictor: Predictor, x: Tensor, y: Tensor, batch_size: int, task: LearningTask
) -> dict[str, float]:
    """The metrics of some examples: accuracy in percent where they have class labels, else those of the task.

    Parameters
    ----------
    predictor : a function from examples to logits.
    x : examples as the predictor takes them.
    y : their targets.
    batch_size : the batch size.
    task : what was learned.
    """
    outputs = (predictor(batch).movedim(task.class_axis, -1) for batch in x.split(batch_size))
    if task.target == "class" and task.positions != "pixels":
        return {"accuracy": accuracy(torch.cat(list(outputs)), y)}
    if task.positions == "pixels":
        outputs = (sum_pixels(logits, part) for logits, part in zip(outputs, y.split(batch_size), strict=True))
    predictions = torch.cat(list(outputs))
    values = [predicted_values(metric, predictions, y) for metric in default_metrics(task)]
    return {name: value for one in values for name, value in one.items()}


def accuracy(logits: Tensor, labels: Tensor) -> float:
    return percent(float(is_correct(logits, labels).sum()), labels.numel())


@torch.inference_mode()
def measure_latency_ms(predictor: Predictor, example: Tensor) -> float:
    """The milliseconds that one example takes on this machine: the median of 100 runs after 10 warm-ups.

    Parameters
    ----------
    predictor : a function from examples to logits.
    example : a batch of one example.
    """
    times, run = [], partial(predictor, example)
    for _ in range(WARM_UPS + TIMED):
        start = time.perf_counter()
        run()
        times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times[WARM_UPS:])
