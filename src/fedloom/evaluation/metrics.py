"""Metrics: what a number says about a model's predictions, which direction is better, and in which unit.

A metric is a value (`Metric`); `METRICS` maps the names that a recipe can use to functions that build one from its
settings. `Row` is what an evaluation writes, before any averaging.
"""

import importlib
import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from ..data import LearningTask
from ..data.tasks import TaskFamily
from ..registry import Registry
from ..settings import Count, FrozenDict
from . import multi_label, pixels, ranking
from .ranking import area_under_roc, mean_of_known


@dataclass(frozen=True)
class Row:
    """One measured value: a line of `rows.jsonl`.

    Parameters
    ----------
    round : int
        The round after which it was measured.
    candidate : str
        The name of the evaluated model, such as "server" or "personal"; "": a figure of the round as a whole.
    tier : str
        Whose model.
    device : str
        The device; "": not of a single one.
    test : str
        "global": the test set; "local": devices' own test examples; "unseen": those of holdout devices.
    metric : str
        What was measured.
    value : float
        The value.
    """

    round: int
    candidate: str
    tier: str
    device: str
    test: str
    metric: str
    value: float


Value = float | Mapping[str, float]
Compute = Callable[[Tensor, Tensor], Value]
"""(logits [examples, classes], labels [examples]) -> the value, or several by name, such as one per class."""

MetricTask = TaskFamily | Literal["any"]


@dataclass(frozen=True)
class Metric:
    """A number computed from a model's predictions on a test set.

    Parameters
    ----------
    name : str
        The name of its rows. If `compute` returns a mapping, every entry is a row: `recall[3]`.
    compute : callable
        `(logits [examples, classes], labels [examples]) -> float | Mapping[str, float]`. NaN where the value is
        undefined for these examples; such rows are left out. For labels and numbers both are [examples, outputs] (one
        number may lack its axis); for pixels it gets how many of a class (row) are predicted as which (column), and
        their mean loss.
    higher_is_better : bool, optional
        None: not declared. Then the metric is recorded and drawn, but no verdict can be based on it.
    unit : str
        Such as "%". Shares are in percent, as accuracy is.
    task : {"classification", "multi_label", "regression", "segmentation", "any"}
        The kind of targets that `compute` is for; "any" is all but segmentation.
    other_tasks : mapping
        How it is computed for other kinds, by kind.

    Examples
    --------
    >>> import torch
    >>> def share_of_class_0(logits, labels):
    ...     return float((logits.argmax(-1) == 0).double().mean())
    >>> metric = Metric("share_of_class_0", share_of_class_0)
    >>> metric.values(torch.eye(4), torch.arange(4))
    {'share_of_class_0': 0.25}
    """

    name: str
    compute: Compute
    higher_is_better: bool | None = None
    unit: str = ""
    task: MetricTask = "any"
    other_tasks: Mapping[str, Compute] = FrozenDict()

    def __post_init__(self) -> None:
        if not re.fullmatch(r"\w[\w.+-]*", self.name):  # rows, charts and files have it
            raise ValueError(f"a metric cannot be named {self.name!r}: use letters, digits and . _ + -")

    def values(self, logits: Tensor, labels: Tensor) -> dict[str, float]:
        """The value by the name of its row; several for a metric with several values.

        Parameters
        ----------
        logits : Tensor
            [examples, classes].
        labels : Tensor
            [examples].
        """
        result = self.compute(logits, labels)
        if isinstance(result, Mapping):
            return {f"{self.name}[{key}]": float(value) for key, value in result.items()}
        return {self.name: float(result)}

    def for_task(self, task: LearningTask) -> "Metric | None":
        """The metric as it is computed for a task; None if it cannot be.

        Parameters
        ----------
        task : LearningTask
            The task.
        """
        has_classes, predicts_pixels = task.has_class_labels or task.is_sequence, task.family == "segmentation"
        if self.task == task.family or (self.task == "any" and has_classes):
            return self
        if self.task == "any" and not predicts_pixels:
            return replace(self, task=task.family)
        if task.family not in self.other_tasks:
            return None
        return replace(self, compute=self.other_tasks[task.family], task=task.family, other_tasks=FrozenDict())

    @property
    def info(self) -> "MetricInfo":
        """Direction and unit."""
        return MetricInfo(self.higher_is_better, self.unit)


def defined_values(metric: Metric, logits: Tensor, labels: Tensor) -> dict[str, float]:
    """A metric's values without those that are undefined for these examples; NaN only for a model that diverged."""
    if not len(labels):
        return {}
    diverged = bool(logits.isnan().any() or logits.isposinf().any())
    return {name: one for name, one in metric.values(logits, labels).items() if diverged or not math.isnan(one)}


def predicted_values(metric: Metric, predictions: Tensor, targets: Tensor) -> dict[str, float]:
    """A metric's defined values for predictions of examples: their logits, or the sums over their pixels."""
    if metric.task != "segmentation":
        return defined_values(metric, predictions, targets)
    counts, loss = pixels.split_sums(predictions.sum(0))
    diverged = bool(predictions.isnan().any())
    return {name: value for name, value in metric.values(counts, loss).items() if diverged or not math.isnan(value)}


@dataclass(frozen=True)
class MetricInfo:
    """What a run's manifest records of a metric.

    Parameters
    ----------
    higher_is_better : bool, optional
        None: not declared.
    unit : str
        Such as "%".
    headline : bool
        Whether reports and verdicts are about it, unless another is chosen.
    """

    higher_is_better: bool | None
    unit: str = ""
    headline: bool = False


def is_correct(logits: Tensor, labels: Tensor) -> Tensor:
    """[..., classes], [...] -> booleans; the lowest of several classes with equal logits is predicted."""
    return logits.argmax(-1) == labels


def percent(correct: float, total: float) -> float:
    return 100.0 * correct / total if total else float("nan")


def log_loss(logits: Tensor, labels: Tensor) -> float:
    """Mean cross entropy."""
    return float(F.cross_entropy(logits.double(), labels))


def compute_accuracy(logits: Tensor, labels: Tensor) -> float:
    """Percent of the examples that are predicted correctly."""
    return percent(float(is_correct(logits, labels).sum()), len(labels))


def accuracy() -> Metric:
    """Percent of the examples, labels or pixels that are predicted correctly; NaN without examples."""
    others = FrozenDict(multi_label=multi_label.accuracy, segmentation=pixels.accuracy)
    return Metric("accuracy", compute_accuracy, True, "%", "classification", others)


def loss() -> Metric:
    """The mean of the task's usual loss, such as cross entropy or squared errors; NaN without examples."""
    others = FrozenDict(multi_label=multi_label.log_loss, regression=_squared_error, segmentation=pixels.mean_loss)
    return Metric("loss", log_loss, False, "", "classification", others)


def balanced_accuracy() -> Metric:
    """Mean recall in percent over the classes that the labels contain; NaN without examples."""
    others = FrozenDict(segmentation=pixels.balanced_accuracy)
    return Metric("balanced_accuracy", _balanced_accuracy, True, "%", "classification", others)


def f1(average: Literal["macro", "micro", "weighted"] = "macro") -> Metric:
    """F1 score in percent, over the classes that occur among labels or predictions; NaN without examples.

    Parameters
    ----------
    average : {"macro", "micro", "weighted"}
        The mean over classes; the same from counts over all classes, which is accuracy; or the mean weighted by the
        classes' examples. Rows are named `f1`, `f1_micro` and `f1_weighted`.
    """
    name = "f1" if average == "macro" else f"f1_{average}"
    others = FrozenDict(multi_label=partial(multi_label.f1, average), segmentation=partial(pixels.f1, average))
    return Metric(name, partial(_f1, average), True, "%", "classification", others)


def auroc() -> Metric:
    """Area under the ROC curve in percent: of each class against all others, mean over classes.

    Examples are ranked by the probability of the class; ties count half. Classes without examples, or without examples
    of other classes, are left out; NaN if the labels are of fewer than two classes.
    """
    return Metric("auroc", _auroc, True, "%", "classification", FrozenDict(multi_label=multi_label.auroc))


def average_precision() -> Metric:
    """Average precision in percent, the area under the precision-recall curve: of each class or label, the mean.

    Classes without examples are left out; NaN without examples.
    """
    others = FrozenDict(multi_label=multi_label.mean_average_precision)
    return Metric("average_precision", _average_precision, True, "%", "classification", others)


def exact_match() -> Metric:
    """Percent of the examples all of whose labels are predicted correctly; NaN without examples."""
    return Metric("exact_match", multi_label.exact_match, True, "%", "multi_label")


def recall() -> Metric:
    """Recall in percent by class, in rows `recall[0]`, `recall[1]` and so on; a class without examples has no row."""
    others = FrozenDict(multi_label=multi_label.recalls, segmentation=pixels.recalls)
    return Metric("recall", _recall, True, "%", "classification", others)


def calibration_error(bins: Count = 15) -> Metric:
    """Expected calibration error in percent (Guo et al., ICML 2017): |accuracy - confidence|, mean over examples.

    Parameters
    ----------
    bins : int
        Examples are grouped by confidence, the probability of the predicted class, into bins `(a, b]` of equal width.
        NaN without examples.
    """
    return Metric("calibration_error", partial(_calibration_error, bins), False, "%", "classification")


def perplexity() -> Metric:
    """The exponential of the mean cross entropy, infinite if that overflows; NaN without examples."""
    return Metric("perplexity", _perplexity, False, "", "classification")


def mean_iou() -> Metric:
    """Intersection over union in percent, mean over the classes that occur among labels or predictions.

    NaN without examples.
    """
    return Metric("mean_iou", _mean_iou, True, "%", "classification", FrozenDict(segmentation=pixels.mean_iou))


def mae() -> Metric:
    """Mean absolute error; NaN without examples."""
    return Metric("mae", lambda outputs, labels: float(_errors(outputs, labels).abs().mean()), False, "", "regression")


def rmse() -> Metric:
    """Root of the mean squared error over all examples and outputs; NaN without examples."""
    return Metric(
        "rmse", lambda outputs, labels: math.sqrt(_errors(outputs, labels).square().mean()), False, "", "regression"
    )


def r2() -> Metric:
    """Coefficient of determination, mean over outputs whose labels vary; NaN if no output's labels do."""
    return Metric("r2", _r2, True, "", "regression")


def count_confusions(logits: Tensor, labels: Tensor) -> Tensor:
    """How many examples of a class (row) are predicted as which class (column)."""
    classes = logits.shape[-1]
    return torch.bincount(labels * classes + logits.argmax(-1), minlength=classes**2).view(classes, classes).double()


def _recalls(logits: Tensor, labels: Tensor) -> Tensor:
    counts = count_confusions(logits, labels)
    return 100.0 * counts.diagonal() / counts.sum(1)


def _balanced_accuracy(logits: Tensor, labels: Tensor) -> float:
    return float(_recalls(logits, labels).nanmean())


def _recall(logits: Tensor, labels: Tensor) -> dict[str, float]:
    return {str(label): value for label, value in enumerate(_recalls(logits, labels).tolist())}


def _f1(average: str, logits: Tensor, labels: Tensor) -> float:
    counts = count_confusions(logits, labels)
    hits, sizes = counts.diagonal(), counts.sum(0) + counts.sum(1)
    if average == "micro":
        return percent(2 * float(hits.sum()), float(sizes.sum()))
    occurring = sizes > 0
    scores, weights = 2 * hits[occurring] / sizes[occurring], counts.sum(1)[occurring]
    if average == "macro":
        return 100 * float(scores.mean())
    return 100 * float((scores * weights).sum() / weights.sum())


def _mean_iou(logits: Tensor, labels: Tensor) -> float:
    counts = count_confusions(logits, labels)
    union = counts.sum(0) + counts.sum(1) - counts.diagonal()
    return 100 * float((counts.diagonal()[union > 0] / union[union > 0]).mean())


def _auroc(logits: Tensor, labels: Tensor) -> float:
    if bool(logits.isnan().any()):
        return math.nan
    return mean_of_known(
        [area_under_roc(_log_odds(logits, label), labels == label) for label in range(logits.shape[-1])]
    )


def _average_precision(logits: Tensor, labels: Tensor) -> float:
    if bool(logits.isnan().any()):
        return math.nan
    return mean_of_known(
        [ranking.average_precision(_log_odds(logits, label), labels == label) for label in range(logits.shape[-1])]
    )


def _log_odds(logits: Tensor, label: int) -> Tensor:
    """They rank examples as probabilities of the class do, but are not rounded to 0 or 1.

    In the end rounded to float32, the precision of logits, so that rounding errors of double do not break ties.
    """
    others = torch.cat([logits[:, :label], logits[:, label + 1 :]], -1).double().logsumexp(-1)
    return (logits[:, label].double() - others).float()


def _calibration_error(bins: int, logits: Tensor, labels: Tensor) -> float:
    if not len(labels):
        return math.nan
    confidence = logits.double().softmax(-1).amax(-1)
    if bool(confidence.isnan().any()):
        return math.nan
    bin_of = ((confidence * bins).ceil().long() - 1).clamp(0, bins - 1)
    gaps = per_group(is_correct(logits, labels).double() - confidence, bin_of, bins)
    return 100 * float(gaps.abs().sum()) / len(labels)


def _perplexity(logits: Tensor, labels: Tensor) -> float:
    return perplexity_from_loss(log_loss(logits, labels))


def _errors(outputs: Tensor, labels: Tensor) -> Tensor:
    """[examples, outputs]; a single output may lack its axis."""
    if outputs.numel() != labels.numel() or len(outputs) != len(labels):
        raise ValueError(f"outputs of shape {tuple(outputs.shape)} for labels of shape {tuple(labels.shape)}")
    return _columns(outputs) - _columns(labels)


def _columns(values: Tensor) -> Tensor:
    return values.double().reshape(len(values), math.prod(values.shape[1:]))


def _squared_error(outputs: Tensor, labels: Tensor) -> float:
    return float(_errors(outputs, labels).square().mean())


def _r2(outputs: Tensor, labels: Tensor) -> float:
    squares = _errors(outputs, labels).square().sum(0)
    targets = _columns(labels)
    spread = (targets - targets.mean(0)).square().sum(0)
    varying = (targets != targets[:1]).any(0)
    return float((1 - squares[varying] / spread[varying]).mean())


class MetricMissing(Exception):  # noqa: N818 - named for what is missing
    """A metric needs a library that is not installed, or one that does not have it."""

    def __init__(self, message: str, hint: str):
        super().__init__(message)
        self.hint = hint


def torchmetrics(metric: str, **settings: Any) -> Metric:
    """Any classification or regression metric of torchmetrics, by its class; its values are as that library gives them.

    Parameters
    ----------
    metric : str
        A class such as "MulticlassMatthewsCorrCoef" or "CohenKappa"; rows have this name.
    settings
        Arguments of the class. `task` and `num_classes` need not be given.
    """
    try:
        library = importlib.import_module("torchmetrics")
    except ImportError:
        raise MetricMissing("torchmetrics is not installed", "pip install 'fedloom[metrics]'") from None
    tasks: tuple[MetricTask, ...] = ("classification", "regression")
    found = {task: getattr(getattr(library, task), metric, None) for task in tasks}
    for task, kind in found.items():
        if inspect.isclass(kind):
            direction = getattr(_build_torchmetrics(kind, settings, 2), "higher_is_better", None)
            compute = partial(_compute_torchmetrics, kind, task == "classification", settings)
            return Metric(metric, compute, direction, "", task)
    raise MetricMissing(
        f"torchmetrics has no classification or regression metric {metric!r}",
        "give the name of a class, such as CohenKappa",
    )


def _build_torchmetrics(kind: type, settings: Mapping[str, Any], classes: int) -> Any:
    """An instance; `task` and `num_classes` are filled in where the class asks for them."""
    known = {"task": "multiclass", "num_classes": classes}
    function = kind.__new__ if "task" in inspect.signature(kind.__new__).parameters else kind.__init__  # type: ignore[misc]
    asked = {name: value for name, value in known.items() if name in inspect.signature(function).parameters}
    return kind(**{**asked, **settings})


def _compute_torchmetrics(
    kind: type, classification: bool, settings: Mapping[str, Any], outputs: Tensor, labels: Tensor
) -> Value:
    if not len(labels):
        return math.nan
    if not classification:
        predictions = outputs.reshape(labels.shape)
    else:  # probabilities: the library would take logits between 0 and 1 for such
        predictions = outputs.double().softmax(-1)
        predictions = predictions[:, 1] if kind.__name__.startswith("Binary") else predictions
    value = _build_torchmetrics(kind, settings, outputs.shape[-1])(predictions, labels)
    if value.dim():
        return {str(index): float(one) for index, one in enumerate(value)}
    return float(value)


MetricEntry = Callable[..., Any] | Metric
"""A function that builds a metric from its settings; a metric; or a function of `logits`, `labels` and settings."""

PASSED_TO_METRICS = ("logits", "labels")

METRICS: Registry[MetricEntry] = Registry(
    "metrics",
    {
        "accuracy": accuracy, "loss": loss, "balanced_accuracy": balanced_accuracy, "f1": f1, "auroc": auroc,
        "average_precision": average_precision, "exact_match": exact_match, "recall": recall,
        "calibration_error": calibration_error, "perplexity": perplexity, "mean_iou": mean_iou,
        "mae": mae, "rmse": rmse, "r2": r2, "torchmetrics": torchmetrics,
    },
    passed=PASSED_TO_METRICS,
)  # fmt: skip

DEFAULT_METRICS = (accuracy(), loss())

MetricChoice = str | Mapping[str, Any] | Metric | Compute
"""A name, a name with settings (`{"kind": "f1", "average": "micro"}`), a metric, or a function of logits and labels."""


def as_metric(choice: MetricChoice, table: Mapping[str, MetricEntry] = METRICS) -> Metric:
    """The metric that a name, a table of settings, a function or a metric stands for.

    Parameters
    ----------
    choice : str, mapping, callable or Metric
        A function `(logits, labels) -> float` becomes a metric with the function's name; its attributes
        `higher_is_better` and `unit` are used if it has them.
    table : mapping
        The known names.

    Returns
    -------
    Metric

    Examples
    --------
    >>> as_metric("f1").unit, as_metric({"kind": "calibration_error", "bins": 10}).higher_is_better
    ('%', False)
    """
    if isinstance(choice, Metric):
        return choice
    if isinstance(choice, str):
        choice = {"kind": choice}
    if isinstance(choice, Mapping):
        kind, settings = str(choice.get("kind")), {key: value for key, value in choice.items() if key != "kind"}
        if kind not in table:
            raise ValueError(f"there is no metric {kind!r}; known: {', '.join(sorted(table))}")
        return _build_metric(kind, table[kind], settings)
    if not callable(choice):
        raise TypeError(f"a metric is a name, a function of logits and labels, or a Metric, not {choice!r}")
    name = getattr(choice, "__name__", "")
    if not name.isidentifier():
        raise ValueError("a metric needs a name: use Metric(name, function), or a function that has one")
    return _metric_of_function(name, choice)


def _build_metric(name: str, entry: MetricEntry, settings: Mapping[str, Any]) -> Metric:
    if isinstance(entry, Metric):
        return entry
    if tuple(inspect.signature(entry).parameters)[:2] == PASSED_TO_METRICS:
        return _metric_of_function(name, entry, settings)
    metric = entry(**settings)
    if not isinstance(metric, Metric):
        raise TypeError(f"{name} returned {type(metric).__name__} instead of a Metric")
    return metric


def _metric_of_function(name: str, function: Compute, settings: Mapping[str, Any] = FrozenDict()) -> Metric:
    compute = partial(function, **settings) if settings else function
    return Metric(name, compute, getattr(function, "higher_is_better", None), getattr(function, "unit", ""))


def trial_examples(classes: int, task: MetricTask = "classification") -> tuple[Tensor, Tensor]:
    """Logits and labels with every class among labels and predictions, to try a metric on."""
    if task == "segmentation":
        return torch.eye(classes, dtype=torch.float64) + 1, torch.ones((), dtype=torch.float64)
    if task in ("regression", "multi_label"):
        draw = torch.Generator().manual_seed(0)
        return torch.randn(8, classes, generator=draw), torch.arange(8 * classes).view(8, classes) % 2 * 1.0
    labels = torch.arange(2 * classes) % classes
    return F.one_hot((labels + torch.arange(2 * classes) // classes) % classes, classes).float(), labels


@lru_cache(maxsize=1024)
def row_names(metric: Metric, classes: int) -> tuple[str, ...]:
    """The rows that a metric has for this number of classes."""
    return tuple(metric.values(*trial_examples(classes, metric.task)))


ACCURACIES = ("accuracy", "initial", "personalized")  # beginnings of row metrics that are accuracies
_BUILT_IN = {
    metric.name: metric.info
    for metric in (
        *(as_metric(name) for name in METRICS.built_in if name != "torchmetrics"), f1("micro"), f1("weighted")
    )
}  # fmt: skip
NOTHING_DECLARED: Mapping[str, MetricInfo] = {}


class UndeclaredDirection(ValueError):  # noqa: N818 - named for what is missing
    """A verdict was asked for on a metric that does not say whether higher is better."""

    def __init__(self, metric: str):
        super().__init__(f"whether higher values of {metric} are better is not declared")
        self.hint = "declare it: Metric(..., higher_is_better=True) or False; or choose another metric"


@lru_cache(maxsize=64)
def default_metrics(task: LearningTask) -> tuple[Metric, ...]:
    """The metrics of a task, the headline first, unless a recipe names others."""
    fitting = (as_metric(name).for_task(task) for name in task.metrics)
    return tuple(metric for metric in fitting if metric is not None)


def headline_metric(task: LearningTask) -> Metric:
    """The metric that reports and verdicts of a task are about."""
    return default_metrics(task)[0]


def metric_info(metric: str, declared: Mapping[str, MetricInfo] = NOTHING_DECLARED) -> MetricInfo:
    """Direction and unit of a row's metric: as the run declares them, else as built in; costs are better if lower."""
    name = metric.partition("[")[0]
    known = declared.get(metric) or declared.get(name) or _BUILT_IN.get(name)
    accuracies = metric.startswith(ACCURACIES)
    return known or MetricInfo(accuracies, "%" if accuracies else "")


def metric_sign(metric: str, declared: Mapping[str, MetricInfo] = NOTHING_DECLARED) -> int:
    """1 if higher values of the metric are better, else -1 (losses, costs)."""
    higher = metric_info(metric, declared).higher_is_better
    if higher is None:
        raise UndeclaredDirection(metric)
    return 1 if higher else -1


def perplexity_from_loss(mean_loss: float) -> float:
    """exp(mean_loss), infinite if that overflows."""
    return float(torch.tensor(mean_loss, dtype=torch.float64).exp())


def unigram_perplexity(train_tokens: Tensor, test_tokens: Tensor, classes: int) -> float:
    """Perplexity of a model that knows only token frequencies; a token that never occurs counts as occurring once."""
    counts = torch.bincount(train_tokens.flatten(), minlength=classes).clamp_min(1).double()
    return float((-(counts / counts.sum()).log()[test_tokens.flatten()]).mean().exp())


def per_group(values: Tensor, groups: Tensor, count: int) -> Tensor:
    """Sums of `values` by group number: [count]."""
    return torch.zeros(count, dtype=torch.float64).index_add_(0, groups, values.double())


CostGain = tuple[float, float]
"""(cost, gain)."""


def pareto_front(points: Iterable[CostGain]) -> list[CostGain]:
    """The points that no other dominates, by cost: none costs no more, gains no less, and differs in one of them."""
    front: list[CostGain] = []
    for point in sorted(points, key=lambda point: (point[0], -point[1])):
        if not front or point[1] > front[-1][1] or point == front[-1]:
            front.append(point)
    return front


def hypervolume(points: Iterable[CostGain], reference: CostGain) -> float:
    """The area dominated by the points, up to the largest cost and down to the smallest gain of `reference`."""
    max_cost, min_gain = reference
    corners = pareto_front(point for point in points if point[0] <= max_cost and point[1] >= min_gain)
    steps = pairwise([*corners, (max_cost, min_gain)])
    return sum((next_cost - cost) * (gain - min_gain) for (cost, gain), (next_cost, _) in steps)
