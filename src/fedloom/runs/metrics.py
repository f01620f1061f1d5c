"""A recipe's metrics: built, and refused by name where they cannot be computed for its data."""

from collections.abc import Iterator

from ..evaluation.metrics import Metric, MetricMissing, UndeclaredDirection, as_metric, metric_info, row_names
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
    is_sequence = data_spec.labels.train.ndim > 1
    issues = [*_find_issues(metrics or (), is_sequence, data_spec.labels.classes)]
    if issues:
        raise loaded.error(*issues)
    compared = loaded.recipe.compare.metric
    if compared is not None:
        check_compared_metric(loaded, compared, metrics, is_sequence, data_spec.labels.classes)


def _find_issues(metrics: tuple[Metric, ...], is_sequence: bool, classes: int) -> Iterator[RecipeIssue]:
    for number, metric in enumerate(metrics):
        key = (*KEY, number)
        if metric.task == "regression":
            message = f"{metric.name} compares numbers, and the labels of this data set are classes"
            yield RecipeIssue(key, "METRIC_TASK", message, "use accuracy, f1 or another metric of classes")
        elif is_sequence and metric.name not in SEQUENCE_METRICS:
            message = f"{metric.name} is not computed for data with a label at every position"
            yield RecipeIssue(key, "METRIC_TASK", message, f"known there: {', '.join(SEQUENCE_METRICS)}")
        elif not is_sequence:
            try:
                row_names(metric, classes)
            except Exception as error:
                message = f"{metric.name} fails on {classes} classes: {type(error).__name__}: {error}"
                yield RecipeIssue(
                    key, "METRIC_FAILS", message, "it gets logits [examples, classes] and labels [examples]"
                )


def check_compared_metric(
    loaded: LoadedRecipe, name: str, metrics: tuple[Metric, ...] | None, is_sequence: bool, classes: int
) -> None:
    """Raise unless the recipe evaluates the metric and it says which direction is better."""
    key = ("compare", "metric")
    if is_sequence:
        chosen = ("perplexity", "accuracy") if metrics is None else [metric.name for metric in metrics]
        rows = [row for metric in chosen for row in SEQUENCE_METRICS[metric]]
        declared = {row: metric_info(row) for row in rows}
    else:
        known = [as_metric("accuracy"), as_metric("loss")] if metrics is None else metrics
        rows = [row for metric in known for row in row_names(metric, classes)]
        declared = {metric.name: metric.info for metric in known}
    if name not in rows:
        message = "the recipe does not evaluate a metric of that name"
        raise loaded.error(
            RecipeIssue(key, "RECIPE_NAME", message, f"{suggest(name, rows)}; evaluation.metrics chooses them", name)
        )
    if metric_info(name, declared).higher_is_better is None:
        error = UndeclaredDirection(name)
        raise loaded.error(RecipeIssue(key, "METRIC_DIRECTION", str(error), error.hint, name))
