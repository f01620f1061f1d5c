"""A recipe's metrics: built, and refused by name where they cannot be computed for its data."""

from collections.abc import Iterator

from ..data import LearningTask
from ..evaluation.metrics import (
    Metric,
    MetricMissing,
    UndeclaredDirection,
    as_metric,
    default_metrics,
    metric_info,
    row_names,
)
from ..evaluation.sequence import SEQUENCE_METRICS
from ..recipe.errors import RecipeIssue
from ..recipe.load import LoadedRecipe
from ..recipe.registries import Registries
from ..registry import suggest
from .data import DataSpec

KEY = ("evaluation", "metrics")


def build_metrics(loaded: LoadedRecipe, registries: Registries) -> tuple[Metric, ...] | None:
    """None: the recipe names none, and the default ones are computed."""
    choices = loaded.recipe.evaluation.metrics
    if choices is None:
        return None
    metrics: list[Metric] = []
    for number, choice in enumerate(choices):
        key = (*KEY, number)
        try:
            metric = as_metric(choice, registries.metrics)
        except MetricMissing as error:
            raise loaded.error(RecipeIssue(key, "METRIC_MISSING", str(error), error.hint)) from error
        except Exception as error:
            message = f"it cannot be built: {type(error).__name__}: {error}"
            raise loaded.error(RecipeIssue(key, "RECIPE_VALUE", message)) from error
        if metric.name in [known.name for known in metrics]:
            message, hint = f"two metrics have rows named {metric.name!r}", "name each once"
            raise loaded.error(RecipeIssue(key, "RECIPE_VALUE", message, hint))
        metrics.append(metric)
    return tuple(metrics)


def check_metrics(loaded: LoadedRecipe, registries: Registries, data_spec: DataSpec) -> None:
    """Raise if a metric cannot be computed for the recipe's data, or if no verdict can be based on the compared one."""
    metrics = build_metrics(loaded, registries)
    task, outputs = data_spec.task, data_spec.labels.classes
    issues = [*_find_issues(metrics or (), registries, task, outputs)]
    if metrics is None and not task.is_sequence and not default_metrics(task):
        message = f"none of the metrics of the task {task.kind} fits it: {', '.join(task.metrics)}"
        issues.append(RecipeIssue(("task", "kind"), "METRIC_TASK", message, "name others in evaluation.metrics"))
    if issues:
        raise loaded.error(*issues)
    compared = loaded.recipe.compare.metric
    if compared is not None:
        check_compared_metric(loaded, compared, metrics, task, outputs)


def _find_issues(
    metrics: tuple[Metric, ...], registries: Registries, task: LearningTask, outputs: int
) -> Iterator[RecipeIssue]:
    for number, metric in enumerate(metrics):
        key, fitting = (*KEY, number), metric.for_task(task)
        if task.target == "class" and metric.task == "regression":
            message = f"{metric.name} compares numbers, and the labels of this data set are classes"
            yield RecipeIssue(key, "METRIC_TASK", message, "use accuracy, f1 or another metric of classes")
        elif task.is_sequence:
            if metric.name not in SEQUENCE_METRICS:
                message = f"{metric.name} is not computed for data with a label at every position"
                yield RecipeIssue(key, "METRIC_TASK", message, f"known there: {', '.join(SEQUENCE_METRICS)}")
        elif fitting is None:
            yield RecipeIssue(key, "METRIC_TASK", *_misfit(metric, registries, task))
        else:
            try:
                row_names(fitting, outputs)
            except Exception as error:
                message = f"{metric.name} fails on {outputs} classes: {type(error).__name__}: {error}"
                yield RecipeIssue(
                    key, "METRIC_FAILS", message, "it gets logits [examples, classes] and labels [examples]"
                )


def _misfit(metric: Metric, registries: Registries, task: LearningTask) -> tuple[str, str]:
    """Why a metric does not fit a task, and which do."""
    message = f"{metric.name} is not a metric for {task.kind}"
    if metric.task == "any":
        return message, 'say so if it is: Metric(..., task="segmentation"), whose function gets counts of pixels'
    known = [name for name in registries.metrics if name != "torchmetrics"]
    fitting = [name for name in known if as_metric(name, registries.metrics).for_task(task)]
    return message, f"known for it: {', '.join(fitting)}"


def check_compared_metric(
    loaded: LoadedRecipe, name: str, metrics: tuple[Metric, ...] | None, task: LearningTask, outputs: int
) -> None:
    """Raise unless the recipe evaluates the metric and it says which direction is better."""
    key = ("compare", "metric")
    if task.is_sequence:
        chosen = task.metrics if metrics is None else [metric.name for metric in metrics]
        rows = [row for metric in chosen for row in SEQUENCE_METRICS[metric]]
        declared = {row: metric_info(row) for row in rows}
    else:
        known = default_metrics(task) if metrics is None else metrics
        fitting = [one for metric in known if (one := metric.for_task(task))]
        rows = [row for metric in fitting for row in row_names(metric, outputs)]
        declared = {metric.name: metric.info for metric in fitting}
    if name not in rows:
        message = "the recipe does not evaluate a metric of that name"
        raise loaded.error(
            RecipeIssue(key, "RECIPE_NAME", message, f"{suggest(name, rows)}; evaluation.metrics chooses them", name)
        )
    if metric_info(name, declared).higher_is_better is None:
        error = UndeclaredDirection(name)
        raise loaded.error(RecipeIssue(key, "METRIC_DIRECTION", str(error), error.hint, name))
