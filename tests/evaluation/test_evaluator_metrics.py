"""Other metrics than accuracy: the same value whether the server or the devices evaluate the same model."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from fedloom.evaluation import Evaluator, Row
from fedloom.evaluation.local import _join_predictions, _pad_predictions
from fedloom.evaluation.metrics import Metric, as_metric
from fedloom.fleet import DeviceModel, EvalTarget, Request, tier_slices
from fedloom.methods.standalone import Standalone

NAMES = ["accuracy", "loss", "f1", "auroc", "recall", "calibration_error", "perplexity", "mean_iou"]
METRICS = tuple(as_metric(name) for name in NAMES)
FILLS = [None, 0.0, -math.inf]


def rows_of(place: Any, target: EvalTarget, **changes: Any) -> list[Row]:
    engine = place.engine(Standalone())
    evaluator: Evaluator = replace(place.evaluator(), **{"metrics": METRICS, **changes})
    return evaluator.rows({"m": target}, place.fleet, lambda task, boxes: engine.ask(Request(task, boxes, 1)), 1, True)


def values(rows: list[Row], test: str) -> dict[tuple[str, str], float]:
    return {(row.device, row.metric): row.value for row in rows if row.test == test}


@pytest.fixture
def place(world: Callable[..., Any]) -> Any:
    return world(sizes=(6, 6, 6), test_sizes=(7, 2, 5), labels=[[0, 1], [2], [1, 2, 3]], normalization="none")


def targets(place: Any, fill: float | None, scale: float = 1.0) -> tuple[EvalTarget, EvalTarget]:
    """The same weights as the server's model and as every device's own."""
    weights = {name: scale * one for name, one in place.fleet.global_model.initial_weights(3).items()}
    on_device = DeviceModel(
        lambda client, inbox: (client.model, inbox["shared"]), lambda device: {"shared": weights}, fill
    )
    return tier_slices(weights, fill), on_device


@pytest.mark.parametrize("fill", FILLS)
def test_rows_of_devices_and_server_agree_on_every_metric(place: Any, fill: float | None) -> None:
    on_server, on_devices = targets(place, fill)
    server, devices = rows_of(place, on_server), rows_of(place, on_devices)
    expected = values(server, "local")
    assert {metric for device, metric in expected if not device} >= set(NAMES) - {"recall"}
    assert values(devices, "local") == {key: pytest.approx(value, rel=1e-5) for key, value in expected.items()}
    on_global = {metric: value for (device, metric), value in values(devices, "global").items() if not device}
    assert on_global == {metric: pytest.approx(v, rel=1e-5) for (_, metric), v in values(server, "global").items()}


@pytest.mark.parametrize("fill", [None, 0.0])
def test_rows_of_real_devices_have_their_values_and_weighted_means(place: Any, fill: float | None) -> None:
    on_server, on_devices = targets(place, fill)
    expected = values(rows_of(place, on_server), "local")
    for target in (on_devices, on_server):
        found = values(rows_of(place, target, tests_on_devices=True), "local")
        of_devices = {key: value for key, value in expected.items() if key[0]}
        assert {k: v for k, v in found.items() if k[0]} == {
            k: pytest.approx(v, rel=1e-5) for k, v in of_devices.items()
        }
        for metric in {metric for device, metric in found if not device}:
            each = [(7, "0"), (2, "1"), (5, "2")]
            known = [(size, found[device, metric]) for size, device in each if (device, metric) in found]
            mean = sum(size * value for size, value in known) / sum(size for size, _ in known)
            assert found["", metric] == pytest.approx(mean)


def test_rows_undefined_on_a_device_are_left_out(place: Any) -> None:
    one_class = replace(place.dataset, test=replace(place.dataset.test, y=torch.zeros_like(place.dataset.test.y)))
    found = rows_of(place, targets(place, None)[0], dataset=one_class)
    assert not any(row.metric == "auroc" for row in found)
    assert {row.metric for row in found if row.metric.startswith("recall")} == {"recall[0]"}


def test_rows_of_a_diverged_model_keep_nan_on_the_test_set(place: Any) -> None:
    on_server, _ = targets(place, None, scale=math.nan)
    found = {row.metric: row.value for row in rows_of(place, on_server) if row.test == "global"}
    assert all(math.isnan(found[name]) for name in ("loss", "auroc", "perplexity", "calibration_error"))
    assert "accuracy" in found


def test_rows_of_devices_are_only_computed_if_asked_for(place: Any) -> None:
    seen: list[int] = []

    def count(logits: torch.Tensor, labels: torch.Tensor) -> float:
        seen.append(len(labels))
        return 1.0

    engine, metric = place.engine(Standalone()), Metric("count", count)
    evaluator = replace(place.evaluator(), metrics=(metric,), tests=("local",))
    target = {"m": targets(place, None)[0]}
    evaluator.rows(target, place.fleet, lambda task, boxes: engine.ask(Request(task, boxes, 1)), 1, False)
    assert seen == [14]


def test_predictions_travel_with_all_their_bits() -> None:
    odd = torch.tensor([[[math.inf, -math.inf, 1.5], [math.nan, -0.0, 1e-45]], [[0.1, 0.2, 0.3], [0.0, 0.0, 0.0]]])
    labels = torch.tensor([[2, 1], [0, 0]])
    padded = _pad_predictions(odd, labels, 4)
    uploads = [{name: one[k] for name, one in padded.items()} | {"total": torch.tensor(2.0 - k)} for k in range(2)]
    logits, answers = _join_predictions(uploads)
    expected = torch.cat([odd[0], odd[1, :1]])
    assert torch.equal(logits.view(torch.int32), expected.view(torch.int32))
    assert answers.tolist() == [2, 1, 0]
