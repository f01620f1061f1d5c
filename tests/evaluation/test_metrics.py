"""Every metric against definitions written as loops over the examples, and against torchmetrics and scipy's ranks."""

import builtins
import math
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedloom.evaluation.metrics import (
    METRICS,
    Metric,
    MetricInfo,
    MetricMissing,
    UndeclaredDirection,
    as_metric,
    defined_values,
    is_correct,
    metric_info,
    metric_sign,
    per_group,
    percent,
    perplexity_from_loss,
    row_names,
    unigram_perplexity,
)

CLASSES = 4
lines = st.lists(st.integers(-3, 3).map(float), min_size=CLASSES, max_size=CLASSES)  # few numbers: ties are common
cases = st.lists(st.tuples(lines, st.integers(0, CLASSES - 1)), min_size=1, max_size=14)
numbers = st.floats(-1e3, 1e3, width=32)


def tensors(examples: list[tuple[list[float], int]]) -> tuple[Tensor, Tensor]:
    return torch.tensor([line for line, _ in examples]), torch.tensor([label for _, label in examples])


def value(choice: Any, logits: Tensor, labels: Tensor) -> float:
    (found,) = as_metric(choice).values(logits, labels).values()
    return found


def predicted(line: list[float]) -> int:
    return line.index(max(line))


def probabilities(line: list[float]) -> list[float]:
    exponentials = [math.exp(score) for score in line]
    return [one / math.fsum(exponentials) for one in exponentials]


def same(found: float, expected: float) -> bool:
    return (math.isnan(found) and math.isnan(expected)) or found == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_is_correct_equal_logits_predict_the_lowest_class() -> None:
    logits = torch.tensor([[1.0, 1.0, 0.0], [0.0, 2.0, 2.0], [3.0, 3.0, 3.0]])
    assert is_correct(logits, torch.tensor([0, 1, 0])).tolist() == [True, True, True]
    assert is_correct(logits, torch.tensor([1, 2, 2])).tolist() == [False, False, False]


@pytest.mark.parametrize("classes", [5, 100, 1000])
def test_is_correct_many_classes_predict_the_lowest_of_equals(classes: int) -> None:
    logits = torch.zeros(3, classes)
    logits[1, classes // 2 :] = 1.0
    logits[2, [classes - 1, 3]] = 7.0
    assert is_correct(logits, torch.tensor([0, classes // 2, 3])).tolist() == [True] * 3


def test_percent_of_nothing_is_nan() -> None:
    assert percent(1, 8) == 12.5
    assert math.isnan(percent(0, 0))


def test_per_group_empty_group_is_zero() -> None:
    found = per_group(torch.tensor([True, True, False, True]), torch.tensor([2, 0, 0, 2]), 4)
    assert found.tolist() == [1.0, 0.0, 2.0, 0.0]


def test_perplexity_from_loss_overflow_is_infinite() -> None:
    assert perplexity_from_loss(1.0) == pytest.approx(math.e)
    assert perplexity_from_loss(800.0) == perplexity_from_loss(math.inf) == math.inf


def test_unigram_perplexity_matches_a_hand_computation() -> None:
    seen, asked = torch.tensor([[0, 0, 0, 1]]), torch.tensor([0, 1, 2])
    expected = math.exp(-(math.log(3 / 5) + 2 * math.log(1 / 5)) / 3)
    assert unigram_perplexity(seen, asked, 3) == pytest.approx(expected)


def counts(examples: list[tuple[list[float], int]], label: int) -> tuple[int, int, int]:
    """True positives, false positives, false negatives."""
    pairs = [(predicted(line), answer) for line, answer in examples]
    return (
        sum(guess == answer == label for guess, answer in pairs),
        sum(guess == label != answer for guess, answer in pairs),
        sum(answer == label != guess for guess, answer in pairs),
    )


@given(cases)
def test_count_metrics_match_a_count_by_class(examples: list[tuple[list[float], int]]) -> None:
    logits, labels = tensors(examples)
    by_class = [counts(examples, label) for label in range(CLASSES)]
    recalls = {label: tp / (tp + fn) for label, (tp, _, fn) in enumerate(by_class) if tp + fn}
    scores = {label: 2 * tp / (2 * tp + fp + fn) for label, (tp, fp, fn) in enumerate(by_class) if tp + fp + fn}
    overlaps = [tp / (tp + fp + fn) for tp, fp, fn in by_class if tp + fp + fn]
    correct = sum(tp for tp, _, _ in by_class) / len(examples)
    weighted = math.fsum(scores[label] * (tp + fn) for label, (tp, _, fn) in enumerate(by_class) if label in scores)
    assert same(value("accuracy", logits, labels), 100 * correct)
    assert same(value("balanced_accuracy", logits, labels), 100 * math.fsum(recalls.values()) / len(recalls))
    assert same(value("f1", logits, labels), 100 * math.fsum(scores.values()) / len(scores))
    assert same(value({"kind": "f1", "average": "micro"}, logits, labels), 100 * correct)
    assert same(value({"kind": "f1", "average": "weighted"}, logits, labels), 100 * weighted / len(examples))
    assert same(value("mean_iou", logits, labels), 100 * math.fsum(overlaps) / len(overlaps))
    found = defined_values(as_metric("recall"), logits, labels)
    assert found == {f"recall[{label}]": pytest.approx(100 * one) for label, one in recalls.items()}


@given(cases)
def test_auroc_is_the_share_of_pairs_in_order(examples: list[tuple[list[float], int]]) -> None:
    areas = []
    for label in range(CLASSES):
        own = [probabilities(line)[label] for line, answer in examples if answer == label]
        others = [probabilities(line)[label] for line, answer in examples if answer != label]
        pairs = [
            0.5 if math.isclose(one, two, rel_tol=1e-12) else float(one > two) for one, two in product(own, others)
        ]
        areas += [math.fsum(pairs) / len(pairs)] if pairs else []
    expected = 100 * math.fsum(areas) / len(areas) if areas else math.nan
    found = value("auroc", *tensors(examples))
    assert (math.isnan(found) and math.isnan(expected)) or found == pytest.approx(expected, abs=1e-6)


@given(cases, st.integers(1, 20))
def test_calibration_error_is_the_gap_by_bin(examples: list[tuple[list[float], int]], bins: int) -> None:
    gaps: dict[int, list[float]] = {}
    for line, answer in examples:
        confidence = max(probabilities(line))
        number = next(at for at in range(bins) if confidence <= (at + 1) / bins or at == bins - 1)
        if any(math.isclose(confidence, edge / bins, rel_tol=1e-9) for edge in range(bins)):
            return  # rounding decides the bin
        gaps.setdefault(number, []).append((predicted(line) == answer) - confidence)
    expected = 100 * math.fsum(abs(math.fsum(gap)) for gap in gaps.values()) / len(examples)
    assert same(value({"kind": "calibration_error", "bins": bins}, *tensors(examples)), expected)


@given(cases)
def test_perplexity_is_the_exponential_of_the_loss(examples: list[tuple[list[float], int]]) -> None:
    losses = [-math.log(probabilities(line)[answer]) for line, answer in examples]
    mean = math.fsum(losses) / len(losses)
    assert same(value("loss", *tensors(examples)), mean)
    assert same(value("perplexity", *tensors(examples)), math.exp(mean))


@given(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=12))
def test_regression_metrics_match_their_definitions(pairs: list[tuple[float, float]]) -> None:
    outputs, labels = torch.tensor([[one] for one, _ in pairs]), torch.tensor([two for _, two in pairs])
    errors = [float(one) - float(two) for one, two in zip(outputs[:, 0].tolist(), labels.tolist(), strict=True)]
    assert same(value("mae", outputs, labels), math.fsum(map(abs, errors)) / len(errors))
    assert same(value("rmse", outputs, labels), math.sqrt(math.fsum(error**2 for error in errors) / len(errors)))
    mean = math.fsum(labels.tolist()) / len(pairs)
    spread = math.fsum((label - mean) ** 2 for label in labels.tolist())
    if len(set(labels.tolist())) == 1:
        assert math.isnan(value("r2", outputs, labels))
    elif spread > 1e-6:
        expected = 1 - math.fsum(error**2 for error in errors) / spread
        assert value("r2", outputs, labels) == pytest.approx(expected, rel=1e-6)


def test_regression_metrics_other_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \(3, 2\)"):
        value("mae", torch.zeros(3, 2), torch.zeros(3))


TWINS = {
    "balanced_accuracy": ("MulticlassRecall", {"average": "macro"}),
    "f1": ("MulticlassF1Score", {"average": "macro"}),
    "auroc": ("MulticlassAUROC", {"average": "macro"}),
    "calibration_error": ("MulticlassCalibrationError", {"n_bins": 15}),
    "mean_iou": ("MulticlassJaccardIndex", {"average": "macro"}),
    "mae": ("MeanAbsoluteError", {}),
    "rmse": ("MeanSquaredError", {"squared": False}),
    "r2": ("R2Score", {}),
}


@pytest.mark.parametrize("name", TWINS)
def test_metric_agrees_with_torchmetrics(name: str) -> None:
    pytest.importorskip("torchmetrics")
    kind, settings = TWINS[name]
    theirs, ours = as_metric({"kind": "torchmetrics", "metric": kind, **settings}), as_metric(name)
    generator = torch.Generator().manual_seed(1)
    logits, labels = torch.randn(200, 5, generator=generator), torch.randint(0, 5, (200,), generator=generator)
    if ours.task == "regression":
        logits, labels = logits[:, :1], logits[:, 1]
    scale = 100 if ours.unit == "%" else 1
    assert theirs.task == ours.task
    expected = theirs.values(logits, labels)[kind]
    assert value(ours, logits, labels) == pytest.approx(scale * expected, rel=1e-4)
    if theirs.higher_is_better is not None:
        assert theirs.higher_is_better == ours.higher_is_better


def test_torchmetrics_class_with_task_gets_it_and_the_number_of_classes() -> None:
    pytest.importorskip("torchmetrics")
    kappa = as_metric({"kind": "torchmetrics", "metric": "CohenKappa"})
    labels = torch.tensor([0, 1, 2, 2])
    assert kappa.values(torch.eye(3)[labels], labels) == {"CohenKappa": pytest.approx(1.0)}
    by_class = as_metric({"kind": "torchmetrics", "metric": "MulticlassRecall", "average": "none"})
    assert list(by_class.values(torch.eye(3)[labels], labels)) == [f"MulticlassRecall[{label}]" for label in range(3)]
    binary = as_metric({"kind": "torchmetrics", "metric": "BinaryAUROC"})
    assert binary.values(torch.eye(2), torch.tensor([0, 1])) == {"BinaryAUROC": pytest.approx(1.0)}


def test_torchmetrics_unknown_class_is_refused_with_a_hint() -> None:
    pytest.importorskip("torchmetrics")
    with pytest.raises(MetricMissing, match="'Kappa'") as caught:
        as_metric({"kind": "torchmetrics", "metric": "Kappa"})
    assert "CohenKappa" in caught.value.hint


def test_torchmetrics_missing_library_is_refused_with_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr("fedloom.evaluation.metrics.importlib.import_module", fail)
    with pytest.raises(MetricMissing, match="not installed") as caught:
        as_metric({"kind": "torchmetrics", "metric": "CohenKappa"})
    assert "fedloom[metrics]" in caught.value.hint


OWN = [name for name in METRICS.built_in if name != "torchmetrics"]


@pytest.mark.parametrize("name", OWN)
def test_metric_without_examples_has_no_value(name: str) -> None:
    metric = as_metric(name)
    shape = (0, 1) if metric.task == "regression" else (0, CLASSES)
    labels = torch.zeros(shape) if metric.task == "multi_label" else torch.zeros(0, dtype=torch.int64)
    found = metric.values(torch.zeros(shape), labels)
    assert found and all(map(math.isnan, found.values()))
    assert defined_values(metric, torch.zeros(shape), labels) == {}


def test_auroc_one_class_is_undefined_and_leaves_no_row() -> None:
    logits, labels = torch.randn(5, 3), torch.ones(5, dtype=torch.int64)
    assert math.isnan(value("auroc", logits, labels))
    assert defined_values(as_metric("auroc"), logits, labels) == {}


def test_auroc_is_exact_where_probabilities_round_to_one() -> None:
    logits = torch.tensor([[0.0, 60.0], [0.0, 80.0], [0.0, 100.0], [0.0, 120.0]])
    assert value("auroc", logits, torch.tensor([0, 0, 1, 1])) == 100.0


@pytest.mark.parametrize("name", [name for name in OWN if as_metric(name).task == "classification"])
def test_metric_of_a_diverged_model_keeps_its_row(name: str) -> None:
    """Else the last value that is left would be of an earlier round."""
    found = defined_values(as_metric(name), torch.full((4, 4), torch.nan), torch.arange(4))
    assert found
    if name in ("loss", "perplexity", "auroc", "calibration_error"):
        assert all(map(math.isnan, found.values()))


@pytest.mark.parametrize(("name", "better"), [("accuracy", 1), ("f1", 1), ("loss", -1), ("calibration_error", -1),
                                              ("recall[3]", 1), ("f1_micro", 1), ("rmse", -1), ("bytes_up", -1),
                                              ("accuracy_shuffled", 1), ("personalized", 1)])  # fmt: skip
def test_metric_sign_of_known_names(name: str, better: int) -> None:
    assert metric_sign(name) == better


def test_metric_sign_declared_by_the_run_counts() -> None:
    declared = {"gap": MetricInfo(False, "s"), "gain": MetricInfo(True), "odd": MetricInfo(None)}
    assert (metric_sign("gap", declared), metric_sign("gain[a]", declared)) == (-1, 1)
    assert metric_info("gap[x]", declared).unit == "s"
    with pytest.raises(UndeclaredDirection, match="higher values of odd") as caught:
        metric_sign("odd", declared)
    assert "higher_is_better" in caught.value.hint


def share_of_zero(logits: Tensor, labels: Tensor) -> float:
    return float((logits.argmax(-1) == 0).double().mean())


def test_as_metric_function_takes_its_name_and_attributes() -> None:
    plain = as_metric(share_of_zero)
    assert (plain.name, plain.higher_is_better, plain.unit, plain.task) == ("share_of_zero", None, "", "any")
    assert plain.values(torch.eye(4), torch.arange(4)) == {"share_of_zero": 0.25}

    def directed(logits: Tensor, labels: Tensor) -> float:
        return 1.0

    directed.higher_is_better = False  # type: ignore[attr-defined]
    assert as_metric(directed).higher_is_better is False
    metric = Metric("mine", share_of_zero, True)
    assert as_metric(metric) is metric


def test_as_metric_own_table_takes_functions_factories_and_metrics() -> None:
    def scaled(logits: Tensor, labels: Tensor, scale: float = 2.0) -> float:
        return scale * share_of_zero(logits, labels)

    def built(power: int = 1) -> Metric:
        return Metric("built", lambda logits, labels: share_of_zero(logits, labels) ** power, True)

    table = {"scaled": scaled, "built": built, "made": Metric("made", share_of_zero, False)}
    logits, labels = torch.eye(4), torch.arange(4)
    assert as_metric("scaled", table).values(logits, labels) == {"scaled": 0.5}
    assert as_metric({"kind": "scaled", "scale": 8.0}, table).values(logits, labels) == {"scaled": 2.0}
    assert as_metric({"kind": "built", "power": 2}, table).values(logits, labels) == {"built": 0.0625}
    assert as_metric("made", table) is table["made"]
    with pytest.raises(TypeError, match="bad returned float"):
        as_metric("bad", {"bad": lambda: 1.0})


@pytest.mark.parametrize(("choice", "error", "reason"), [
    ("acuracy", ValueError, "there is no metric 'acuracy'"),
    (lambda logits, labels: 1.0, ValueError, "needs a name"),
    (3, TypeError, "not 3"),
])  # fmt: skip
def test_as_metric_other_things_are_refused(choice: Any, error: type[Exception], reason: str) -> None:
    with pytest.raises(error, match=reason):
        as_metric(choice)


@pytest.mark.parametrize("name", OWN)
def test_metrics_are_documented_and_named_like_their_table(name: str) -> None:
    metric = as_metric(name)
    assert METRICS[name].__doc__ and metric.name == name
    assert metric.higher_is_better is not None


@pytest.mark.parametrize("name", ["", "a b", "recall[3]", "../up"])
def test_metric_name_that_is_no_file_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="cannot be named"):
        Metric(name, share_of_zero)


def test_row_names_of_a_metric_with_several_values() -> None:
    assert row_names(as_metric("recall"), 3) == ("recall[0]", "recall[1]", "recall[2]")
    assert row_names(as_metric("f1"), 3) == ("f1",)


def test_import_of_metrics_does_not_import_torchmetrics(monkeypatch: pytest.MonkeyPatch) -> None:
    real, asked = builtins.__import__, []
    monkeypatch.setattr(builtins, "__import__", lambda name, *rest: (asked.append(name), real(name, *rest))[1])
    assert value("f1", torch.eye(3), torch.arange(3)) == 100.0
    assert not any(name.startswith("torchmetrics") for name in asked)
