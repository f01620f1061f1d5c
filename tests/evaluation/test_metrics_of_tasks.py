"""Metrics of labels, numbers and pixels: against loops over examples, torchmetrics, and each other."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedloom.data import IGNORED, TASKS
from fedloom.evaluation.metrics import Metric, as_metric, default_metrics, headline_metric, predicted_values, row_names
from fedloom.evaluation.pixels import sum_pixels

OTHER = ("multi_label", "regression", "segmentation")


def fitting(name: str, task: str) -> Metric:
    metric = as_metric(name).for_task(TASKS[task])
    assert metric is not None
    return metric


def of_labels(name: str, logits: torch.Tensor, labels: torch.Tensor, **settings: Any) -> float:
    metric = as_metric({"kind": name, **settings}).for_task(TASKS["multi_label"])
    assert metric is not None
    return metric.values(logits, labels)[metric.name]


LOGITS = torch.tensor([[1.0, -1.0, 2.0], [-1.0, -2.0, 1.0], [3.0, 1.0, -1.0], [-2.0, 2.0, -2.0]])
LABELS = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 1.0], [1.0, 1.0, 0.0], [0.0, 1.0, 0.0]])


def test_metrics_of_labels_on_a_worked_example() -> None:
    # wrong: label 2 of the first example, label 1 of the second
    assert of_labels("accuracy", LOGITS, LABELS) == pytest.approx(100 * 10 / 12)
    assert of_labels("exact_match", LOGITS, LABELS) == 50
    f1_by_label = [1.0, 2 * 2 / (2 + 3), 2 * 1 / (2 + 1)]
    assert of_labels("f1", LOGITS, LABELS) == pytest.approx(100 * sum(f1_by_label) / 3)
    assert of_labels("f1", LOGITS, LABELS, average="micro") == pytest.approx(100 * 2 * 5 / (6 + 6))
    assert of_labels("auroc", LOGITS, LABELS) == pytest.approx(100 * (1 + 2 / 3 + 2 / 3) / 3)
    assert of_labels("average_precision", LOGITS, LABELS) == pytest.approx(100 * (1 + (1 + 1 + 3 / 4) / 3 + 1 / 2) / 3)
    recalls = fitting("recall", "multi_label").values(LOGITS, LABELS)
    assert recalls["recall[1]"] == pytest.approx(100 * 2 / 3)


@pytest.mark.parametrize(
    ("name", "kind", "average"),
    [
        ("f1", "MultilabelF1Score", "macro"),
        ("auroc", "MultilabelAUROC", "macro"),
        ("average_precision", "MultilabelAveragePrecision", "macro"),
        ("accuracy", "MultilabelAccuracy", "micro"),
        ("exact_match", "MultilabelExactMatch", None),
    ],
)
def test_metric_of_labels_agrees_with_torchmetrics(name: str, kind: str, average: str | None) -> None:
    library = pytest.importorskip("torchmetrics")
    draw = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(40, 5, generator=draw), torch.randint(0, 2, (40, 5), generator=draw).float()
    settings = {} if average is None else {"average": average}
    theirs = getattr(library.classification, kind)(num_labels=5, **settings)(logits.sigmoid(), labels.long())
    assert of_labels(name, logits, labels) == pytest.approx(100 * float(theirs), abs=1e-3)


def test_metrics_of_labels_that_no_example_has_are_left_out() -> None:
    logits, labels = torch.tensor([[1.0, -1.0], [-1.0, -1.0]]), torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    assert of_labels("f1", logits, labels) == of_labels("auroc", logits, labels) == 100
    assert math.isnan(of_labels("auroc", logits[:, 1:], labels[:, 1:]))


@given(st.integers(0, 2**31), st.floats(0.0, 0.5))
def test_metrics_of_pixels_follow_from_sums_as_from_all_pixels(seed: int, share: float) -> None:
    draw = torch.Generator().manual_seed(seed)
    logits, labels = torch.randn(3, 4, 5, 4, generator=draw), torch.randint(0, 4, (3, 4, 5), generator=draw)
    labels[torch.rand(labels.shape, generator=draw) < share] = IGNORED
    labels[0, 0, 0] = 1
    counted = labels != IGNORED
    flat_logits, flat_labels = logits[counted], labels[counted]
    sums = sum_pixels(logits, labels)
    for name in ("accuracy", "loss", "mean_iou", "f1", "balanced_accuracy"):
        plain = as_metric(name).values(flat_logits, flat_labels)[name]
        from_sums = predicted_values(fitting(name, "segmentation"), sums, labels)[name]
        assert from_sums == pytest.approx(plain, rel=1e-5), name
    assert torch.equal(sums, torch.cat([sum_pixels(one[None], y[None]) for one, y in zip(logits, labels, strict=True)]))


def test_loss_of_numbers_is_the_squared_error() -> None:
    outputs, targets = torch.tensor([[1.0], [3.0]]), torch.tensor([0.0, 1.0])
    assert fitting("loss", "regression").values(outputs, targets) == {"loss": 2.5}


@pytest.mark.parametrize("task", OTHER)
def test_default_metrics_have_directions_and_begin_with_the_headline(task: str) -> None:
    metrics = default_metrics(TASKS[task])
    assert [metric.name for metric in metrics] == list(TASKS[task].metrics)
    assert all(metric.higher_is_better is not None for metric in metrics)
    assert headline_metric(TASKS[task]).name == TASKS[task].headline
    for metric in metrics:
        assert row_names(metric, 3) == (metric.name,)


def test_for_task_refuses_what_does_not_fit_and_keeps_own_functions() -> None:
    own = Metric("own", lambda logits, labels: 0.0)
    assert as_metric("accuracy").for_task(TASKS["regression"]) is None
    assert as_metric("rmse").for_task(TASKS["multi_label"]) is None
    assert own.for_task(TASKS["classification"]) is own
    assert own.for_task(TASKS["regression"]) is not None
    assert own.for_task(TASKS["segmentation"]) is None  # its function would need the logits of all pixels
