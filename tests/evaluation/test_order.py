"""The order of test examples: drawn for models that normalize by the batch, and irrelevant for all others."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedloom.data import Partition
from fedloom.engines import build_client_data
from fedloom.evaluation import Row
from fedloom.evaluation.metrics import as_metric
from fedloom.evaluation.test_set import global_order, local_order
from fedloom.fleet import DeviceModel, EvalTarget, Request, tier_slices
from fedloom.methods.standalone import Standalone

SIZES = {"sizes": (8, 8, 8), "test_sizes": (9, 2, 6), "labels": [[0, 1], [2], [1, 2, 3]]}


def rows_of(place: Any, target: EvalTarget, **changes: Any) -> list[Row]:
    engine = place.engine(Standalone())
    evaluator = replace(place.evaluator(batch_size=4), **changes)
    return evaluator.rows({"m": target}, place.fleet, lambda task, boxes: engine.ask(Request(task, boxes, 1)), 1, True)


def weights_of(place: Any) -> dict[str, torch.Tensor]:
    return place.fleet.global_model.initial_weights(2)  # type: ignore[no-any-return]


def on_devices(place: Any) -> DeviceModel:
    """Every device has the server's weights as its own model."""
    weights = weights_of(place)
    return DeviceModel(lambda client, inbox: (client.model, inbox["shared"]), lambda device: {"shared": weights})


def values(rows: list[Row]) -> dict[tuple[str, str, str], float]:
    return {(row.test, row.device, row.metric): row.value for row in rows}


@given(examples=st.integers(0, 50), seed=st.integers(0, 2**32), device=st.text("0123456789", min_size=1, max_size=4))
def test_order_is_a_permutation_that_only_its_purpose_decides(examples: int, seed: int, device: str) -> None:
    for draw in (lambda: global_order(examples, seed), lambda: local_order(examples, seed, device)):
        assert sorted(draw().tolist()) == list(range(examples))
        assert torch.equal(draw(), draw())


def test_order_differs_between_seeds_devices_and_test_sets() -> None:
    drawn = [global_order(60, 0), global_order(60, 1), local_order(60, 0, "0"), local_order(60, 0, "1")]
    assert len({tuple(order.tolist()) for order in drawn}) == 4


@pytest.mark.parametrize("seed", [0, 3])
def test_rows_batch_dependent_model_sees_the_test_set_in_drawn_order(world: Callable[..., Any], seed: int) -> None:
    place = world("mobilenet", **SIZES)
    model, data, weights = place.fleet.global_model, place.dataset, weights_of(place)
    block, logits = {name: one.unsqueeze(0) for name, one in weights.items()}, torch.zeros(len(data.test.y), 4)
    for batch in global_order(len(data.test.y), seed).split(4):
        logits[batch] = model(block, data.preparation(data.test.x[batch]).unsqueeze(0)).logits[0]
    expected = 100 * float((logits.argmax(1) == data.test.y).double().mean())
    loss = float(torch.nn.functional.cross_entropy(logits, data.test.y))
    metrics = (as_metric("accuracy"), as_metric("loss"))
    found = values(rows_of(place, tier_slices(weights), seed=seed, metrics=metrics))
    assert found["global", "", "accuracy"] == pytest.approx(expected)
    assert found["global", "", "loss"] == pytest.approx(loss, rel=1e-5)
    of_devices = values(rows_of(place, on_devices(place), seed=seed, metrics=metrics))
    assert of_devices["global", "", "loss"] == pytest.approx(loss, rel=1e-5)


def test_device_tests_sorted_by_label_are_mixed_only_for_batch_dependent_models(world: Callable[..., Any]) -> None:
    settings: dict[str, Any] = {"sizes": (8,), "test_sizes": (12,), "labels": [[0, 1]]}
    mixing, other = world("mobilenet", **settings), world("convnet", **settings, normalization="group")
    labels, own = mixing.dataset.test.y, mixing.partition.test[0]
    by_label = own[np.argsort(labels[torch.as_tensor(own)].numpy(), kind="stable")]
    held = [
        build_client_data(place.dataset, Partition(place.partition.train, (by_label,)), place.fleet).tests(
            place.fleet.devices(1)[0]
        )
        for place in (mixing, other)
    ]
    assert [len(labels[batch].unique()) for batch in held[1].split(6)] == [1, 1]
    assert [len(labels[batch].unique()) for batch in held[0].split(6)] == [2, 2]
    assert torch.equal(held[0], torch.as_tensor(by_label)[local_order(12, mixing.fleet.seed, "0")])


@pytest.mark.parametrize("family", ["mobilenet", "convnet"])
def test_rows_on_devices_and_on_the_server_agree(world: Callable[..., Any], family: str) -> None:
    settings = {} if family == "mobilenet" else {"normalization": "group"}
    place = world(family, **SIZES, **settings)
    metrics = (as_metric("accuracy"), as_metric("loss"))
    server = values(rows_of(place, tier_slices(weights_of(place)), metrics=metrics))
    local = {key: pytest.approx(value, rel=1e-5) for key, value in server.items() if key[0] == "local" and key[1]}
    assert len(local) == 6
    for changes in ({}, {"tests_on_devices": True}):
        target = tier_slices(weights_of(place)) if changes else on_devices(place)
        found = values(rows_of(place, target, metrics=metrics, **changes))
        assert {key: found[key] for key in local} == local


def test_rows_other_models_do_not_depend_on_the_seed(world: Callable[..., Any]) -> None:
    place = world("convnet", **SIZES, normalization="group")
    target = tier_slices(weights_of(place))
    assert rows_of(place, target, seed=0) == rows_of(place, target, seed=1)
    mixing = world("mobilenet", **SIZES)
    metrics = (as_metric("loss"),)
    first, second = (
        values(rows_of(mixing, tier_slices(weights_of(mixing)), seed=seed, metrics=metrics)) for seed in (0, 1)
    )
    assert first["global", "", "loss"] != second["global", "", "loss"]


def test_rows_have_one_accuracy_per_test(world: Callable[..., Any]) -> None:
    place = world("mobilenet", **SIZES)
    rows = [row for row in rows_of(place, tier_slices(weights_of(place))) if not row.device]
    assert sorted((row.test, row.metric) for row in rows) == [
        ("global", "accuracy"), ("global", "loss"), ("local", "accuracy"),
    ]  # fmt: skip
