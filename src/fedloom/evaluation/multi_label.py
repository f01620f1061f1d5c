"""Metrics of examples that have any number of labels: logits [examples, labels], and 1 where an example has the label.

A label is predicted if its probability, the sigmoid of its logit, is above one half.
"""

import math

from torch import Tensor
from torch.nn import functional as F

from .ranking import area_under_roc, average_precision, mean_of_known


def log_loss(logits: Tensor, labels: Tensor) -> float:
    """Mean binary cross entropy over examples and labels."""
    return float(F.binary_cross_entropy_with_logits(logits.double(), labels.double()))


def accuracy(logits: Tensor, labels: Tensor) -> float:
    """Percent of all labels of all examples that are predicted correctly."""
    return 100 * float(((logits > 0) == (labels > 0.5)).double().mean())


def exact_match(logits: Tensor, labels: Tensor) -> float:
    """Percent of the examples all of whose labels are predicted correctly."""
    return 100 * float(((logits > 0) == (labels > 0.5)).all(1).double().mean())


def f1(average: str, logits: Tensor, labels: Tensor) -> float:
    """F1 score in percent, over the labels that occur among targets or predictions."""
    hits, sizes, held = _counts(logits, labels)
    if average == "micro":
        return 100 * float(2 * hits.sum() / sizes.sum()) if float(sizes.sum()) else math.nan
    occurring = sizes > 0
    scores, weights = 2 * hits[occurring] / sizes[occurring], held[occurring]
    if not len(scores):
        return math.nan
    return 100 * float(scores.mean() if average == "macro" else (scores * weights).sum() / weights.sum())


def recalls(logits: Tensor, labels: Tensor) -> dict[str, float]:
    """Recall in percent by label; NaN for labels that no example has."""
    hits, _, held = _counts(logits, labels)
    return {str(label): value for label, value in enumerate((100 * hits / held).tolist())}


def auroc(logits: Tensor, labels: Tensor) -> float:
    """Area under the ROC curve in percent, mean over labels that some examples have and others lack."""
    if bool(logits.isnan().any()):
        return math.nan
    pairs = zip(logits.unbind(1), (labels > 0.5).unbind(1), strict=True)
    return mean_of_known([area_under_roc(scores, positive) for scores, positive in pairs])


def mean_average_precision(logits: Tensor, labels: Tensor) -> float:
    """Average precision in percent, mean over the labels that some example has."""
    if bool(logits.isnan().any()):
        return math.nan
    pairs = zip(logits.unbind(1), (labels > 0.5).unbind(1), strict=True)
    return mean_of_known([average_precision(scores, positive) for scores, positive in pairs])


def _counts(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """By label: correct predictions, predictions and examples that have it together, and the latter alone."""
    predicted, held = (logits > 0).double(), (labels > 0.5).double()
    return (predicted * held).sum(0), predicted.sum(0) + held.sum(0), held.sum(0)
