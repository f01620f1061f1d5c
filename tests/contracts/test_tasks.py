"""Every method on every task: it trains to finite rows of the task's metrics, or it is refused with the reason."""

import math
from typing import Any

import pytest
import torch

from fedloom.data import TASKS
from fedloom.evaluation.metrics import default_metrics, predicted_values
from fedloom.evaluation.pixels import sum_pixels
from fedloom.methods import METHODS, Method
from fedloom.methods.fedavg import FedAvg
from fedloom.methods.heterofl import HeteroFL
from fedloom.methods.standalone import Standalone
from fedloom.models import MODELS, build_model
from fedloom.settings import FrozenDict
from fedloom.testing import TinyWorld, check_method

NEW = ("multi_label", "regression", "segmentation")
REFUSED = {
    ("fedgkt", "multi_label"), ("fedgkt", "regression"), ("fedgkt", "segmentation"),
    ("fedgkt", "masked_language_modeling"), ("fedgkt", "causal_language_modeling"),
    ("fedin", "segmentation"), ("fedin", "masked_language_modeling"), ("fedin", "causal_language_modeling"),
    *((name, task) for name in ("fd", "fedproto", "fedkd", "fedgh", "fedtgp") for task in (
        "multi_label", "regression", "segmentation", "masked_language_modeling", "causal_language_modeling",
    )),
    ("inclusivefl", "segmentation"),
}  # fmt: skip
MIXED = [{"tiers": ["a"], "method": "heterofl"}, {"tiers": ["b"], "method": "fedhenn", "align": True}]
OF_TIERS: dict[str, dict[str, Any]] = {"mixed": {"parts": MIXED}, "fiarse": {"sizes": FrozenDict(a=1.0, b=0.25)}}


def build(name: str) -> Method:
    settings = OF_TIERS.get(name) or dict(METHODS[name].info.example_settings)
    return METHODS[name].from_settings(settings, METHODS)


def assert_trains_or_is_refused(name: str, task: str) -> None:
    method = build(name)
    if (name, task) in REFUSED:
        with pytest.raises(ValueError, match=f"(?i){name}"):
            TinyWorld.for_method(method, task=task)
        return
    world = TinyWorld.for_method(method, task=task)
    engine = world.engine(method)
    rows = world.evaluate(method, world.play(method, engine, rounds=2), engine, 2)
    assert not world.refusals
    assert TASKS[task].headline in {row.metric for row in rows}
    assert all(math.isfinite(row.value) for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("name", METHODS)
def test_method_on_every_task_trains_or_is_refused_by_name(name: str, task: str) -> None:
    assert_trains_or_is_refused(name, task)


@pytest.mark.parametrize("task", NEW)
@pytest.mark.parametrize("name", ["heterofl", "fedsup", "fedrep", "fedgkt"])
def test_method_on_new_tasks_trains_or_is_refused_by_name(name: str, task: str) -> None:
    assert_trains_or_is_refused(name, task)


@pytest.mark.slow
@pytest.mark.parametrize("task", NEW)
def test_check_method_passes_on_every_task(task: str) -> None:
    assert "check_uploads" in check_method(HeteroFL, task=task).passed


@pytest.mark.parametrize("task", NEW)
def test_evaluation_by_server_and_devices_agrees_with_direct_predictions(task: str) -> None:
    """One model on all devices: pooled over devices, its local values are those of all their test examples."""
    method = FedAvg()
    world = TinyWorld.make("unet" if task == "segmentation" else "convnet", task=task, sizes=(8, 6, 5))
    engine = world.engine(method)
    server = world.play(method, engine, rounds=1)
    rows = {(row.test, row.device, row.metric): row.value for row in world.evaluate(method, server, engine)}
    model, test = world.fleet.global_model, world.dataset.test
    evaluator = world.evaluator()
    weights = evaluator.models("server", method.eval_targets(server)["server"], world.fleet, _ask(engine), 1)
    block = {name: tensor.unsqueeze(0) for name, tensor in next(iter(weights.values())).items()}
    with torch.no_grad():
        logits = model(block, world.dataset.preparation(test.x).unsqueeze(0)).logits[0]
    predictions = sum_pixels(logits, test.y) if task == "segmentation" else logits
    first = torch.from_numpy(world.partition.test[0])
    for metric in default_metrics(world.dataset.task):
        (expected,) = predicted_values(metric, predictions, test.y).values()
        assert rows["global", "", metric.name] == pytest.approx(expected, rel=1e-5)
        assert rows["local", "", metric.name] == pytest.approx(expected, rel=1e-5)  # devices hold all test examples
        for own in predicted_values(metric, predictions[first], test.y[first]).values():
            assert rows["local", world.fleet.name(0), metric.name] == pytest.approx(own, rel=1e-5)


def _ask(engine: Any) -> Any:
    from fedloom.fleet import make_ask

    return make_ask(engine, 1)


@pytest.mark.parametrize("task", NEW)
def test_evaluation_of_personal_models_is_the_same_where_devices_compute(task: str) -> None:
    """Values that devices compute themselves are those that the server computes from what they upload."""
    method = Standalone()
    world = TinyWorld.make("unet" if task == "segmentation" else "convnet", task=task, sizes=(8, 6, 5))
    engine = world.engine(method)
    server = world.play(method, engine, rounds=1)
    targets = method.eval_targets(server)
    pooled, computed = (
        world.evaluator(devices_compute=compute).rows(targets, world.fleet, _ask(engine), 1, True)
        for compute in (False, True)
    )
    by_device = [
        {(row.device, row.test, row.metric): row.value for row in rows if row.device} for rows in (pooled, computed)
    ]
    assert by_device[0].keys() == by_device[1].keys()
    assert any(key[2] == TASKS[task].headline for key in by_device[0])
    for key, value in by_device[0].items():
        assert by_device[1][key] == pytest.approx(value, rel=1e-6), key
    assert not world.refusals


@pytest.mark.parametrize("task", NEW)
def test_fine_tuning_reports_the_headline_before_and_after(task: str) -> None:
    from fedloom.evaluation import FineTune

    method = FedAvg()
    world = TinyWorld.make("unet" if task == "segmentation" else "convnet", task=task)
    engine = world.engine(method)
    server = world.play(method, engine, rounds=1)
    evaluator = world.evaluator(fine_tune=FineTune("all", 2, 4, 0.05, TASKS[task]))
    rows = evaluator.rows(method.eval_targets(server), world.fleet, _ask(engine), 1, True, last=True)
    tuned = {(row.device, row.metric): row.value for row in rows if row.metric in ("initial", "personalized")}
    local = {row.device: row.value for row in rows if row.test == "local" and row.metric == TASKS[task].headline}
    for device in (world.fleet.name(index) for index in range(world.fleet.size)):
        if device in local:
            assert tuned[device, "initial"] == pytest.approx(local[device], rel=1e-5)
            assert (device, "personalized") in tuned
    assert evaluator.declared_metrics["initial"].higher_is_better is (task != "regression")
    assert not world.refusals


def test_check_output_size_says_what_forward_must_return() -> None:
    mlp = build_model("mlp", MODELS["mlp"], {"hidden": (4,)}, (1, 6, 6), 3, None, (6, 6), 1)
    with pytest.raises(ValueError, match=r"must return \[batch, 3, 6, 6\] for these targets, and returns \[batch, 3\]"):
        mlp.check_output_size()
    build_model("unet", MODELS["unet"], {"hidden": (4, 6)}, (1, 6, 6), 3, None, (6, 6), 1).check_output_size()


def test_heterofl_masks_and_rows_are_refused_only_where_asked_for_without_labels() -> None:
    method = HeteroFL()
    assert method.check_task(TASKS["regression"]) is None
    problem = method.check_task(TASKS["regression"], ["only_seen_rows"])
    assert problem is not None and "method.only_seen_rows" in problem and "leave it out" in problem
    assert method.check_task(TASKS["masked_language_modeling"], ["only_seen_rows"]) is None
    assert HeteroFL(only_seen_rows=False).check_task(TASKS["regression"], ["only_seen_rows"]) is None
