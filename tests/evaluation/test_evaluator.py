"""Every row against a loop over the test examples."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fedloom.client import Constant, Schedule, Sgd
from fedloom.data import Dataset, Examples, Partition, Preparation
from fedloom.engines import ClientStateStore, InProcess, build_client_data
from fedloom.evaluation import BatchNormStatistics, Evaluator, Row
from fedloom.evaluation.test_set import local_order
from fedloom.fleet import DeviceModel, Fleet, Request, make_nested_tiers, tier_slices
from fedloom.methods.heterofl import HeteroFL
from fedloom.methods.standalone import Standalone
from fedloom.models import Model, build_model

CLASSES = 4


def passing() -> nn.Module:
    """With the identity as its weights, what comes in is the logits."""
    return nn.Linear(CLASSES, CLASSES, bias=False)


def make_evaluator(
    logits: Tensor, answers: Tensor, own: Sequence[Sequence[int]], seen: Sequence[set[int]]
) -> tuple[Evaluator, Fleet]:
    examples = Examples(logits, answers)
    evaluator = Evaluator(
        Dataset("toy", examples, examples, CLASSES, Preparation()),
        local_tests=[torch.tensor(rows, dtype=torch.int64) for rows in own],
        seen_labels=torch.tensor([[label in labels for label in range(CLASSES)] for labels in seen]),
        statistics=BatchNormStatistics(),
        batch_size=3,
    )
    tiers = make_nested_tiers([("a", build_model("passing", passing, {}, (CLASSES,), CLASSES))])
    return evaluator, Fleet(tiers, (1.0,), len(own), seed=0)


def ask_of(evaluator: Evaluator, fleet: Fleet) -> Any:
    """An engine that puts the test to the server's models."""
    rows = tuple(np.arange(len(evaluator.dataset.train.y)) for _ in range(fleet.size))
    held = build_client_data(evaluator.dataset, Partition(rows, rows), fleet)
    engine = InProcess(held, ClientStateStore(lambda device: {}), Schedule(), Sgd(), Constant(), seed=0)
    return lambda task, boxes: engine.ask(Request(task, boxes, 1))


def first_best(scores: Sequence[float]) -> int:
    best = 0
    for number, score in enumerate(scores):
        if score > scores[best]:
            best = number
    return best


def values(rows: Sequence[Row]) -> Mapping[tuple[str, str, str], float]:
    return {(row.test, row.metric, row.device): row.value for row in rows}


# few different numbers, so that ties are common
scores = st.lists(st.integers(-2, 2).map(float), min_size=CLASSES, max_size=CLASSES)
label_sets = st.sets(st.integers(0, CLASSES - 1))


@given(
    cases=st.lists(st.tuples(scores, st.integers(0, CLASSES - 1)), min_size=1, max_size=10),
    devices=st.lists(st.tuples(label_sets, st.lists(st.integers(0, 9), max_size=6)), min_size=1, max_size=4),
    fill=st.sampled_from([None, 0.0, -math.inf]),
)
def test_rows_accuracies_match_a_plain_count(
    cases: list[tuple[list[float], int]], devices: list[tuple[set[int], list[int]]], fill: float | None
) -> None:
    """Local: the labels a device has not trained on are filled; all examples of all devices count alike."""
    logits, answers = torch.tensor([case[0] for case in cases]), torch.tensor([case[1] for case in cases])
    own = [[row % len(cases) for row in rows] for _, rows in devices]
    evaluator, fleet = make_evaluator(logits, answers, own, [seen for seen, _ in devices])
    rows = evaluator.rows(
        {"server": tier_slices({"weight": torch.eye(CLASSES)}, fill)}, fleet, ask_of(evaluator, fleet), 3, True
    )
    found = values(rows)
    right = sum(first_best(case[0]) == case[1] for case in cases)
    assert found["global", "accuracy", ""] == pytest.approx(100 * right / len(cases))
    all_right = all_asked = 0
    for number, ((seen, _), mine) in enumerate(zip(devices, own, strict=True)):
        hits = 0
        for row in mine:
            filled = [score if fill is None or label in seen else fill for label, score in enumerate(cases[row][0])]
            hits += first_best(filled) == cases[row][1]
        value = found.get(("local", "accuracy", fleet.name(number)))
        assert value == (pytest.approx(100 * hits / len(mine)) if mine else None)
        all_right, all_asked = all_right + hits, all_asked + len(mine)
    value = found.get(("local", "accuracy", ""))
    assert value == (pytest.approx(100 * all_right / all_asked) if all_asked else None)
    assert {(row.round, row.candidate, row.tier) for row in rows} == {(3, "server", "a")}


def test_rows_loss_is_mean_cross_entropy() -> None:
    logits, answers = torch.randn(7, CLASSES), torch.randint(0, CLASSES, (7,))
    evaluator, fleet = make_evaluator(logits, answers, [[0]], [{0}])
    rows = evaluator.rows(
        {"server": tier_slices({"weight": torch.eye(CLASSES)})}, fleet, ask_of(evaluator, fleet), 1, False
    )
    total = 0.0
    for line, answer in zip(logits.tolist(), answers.tolist(), strict=True):
        total += math.log(sum(math.exp(score) for score in line)) - line[answer]
    assert values(rows)["global", "loss", ""] == pytest.approx(total / 7, abs=1e-6)


@pytest.mark.parametrize("tests", [("global",), ("local",), ("global", "local")])
@pytest.mark.parametrize("per_device", [True, False])
def test_rows_contain_only_selected_tests(tests: tuple[str, ...], per_device: bool) -> None:
    evaluator, fleet = make_evaluator(torch.eye(CLASSES), torch.arange(CLASSES), [[0], [1, 2]], [{0}, {1}])
    evaluator = replace(evaluator, tests=tests)
    rows = evaluator.rows(
        {"server": tier_slices({"weight": torch.eye(CLASSES)})}, fleet, lambda t, i: [], 1, per_device
    )
    assert {row.test for row in rows} == set(tests)
    assert any(row.device for row in rows) is (per_device and "local" in tests)


def test_rows_batch_size_is_irrelevant(world: Callable[..., Any]) -> None:
    place, method = world(normalization="group"), HeteroFL()
    candidates = method.eval_targets(method.start(place.fleet, 0))
    engine = place.engine(method)
    found = [
        replace(place.evaluator(), batch_size=size).rows(
            candidates, place.fleet, lambda task, boxes: engine.ask(Request(task, boxes, 1)), 1, True
        )
        for size in (1, 4, 500)
    ]
    for rows in found[1:]:
        assert [row.value for row in rows] == pytest.approx([row.value for row in found[0]], abs=1e-5)


def plain_module(net: Model, weights: Mapping[str, Tensor]) -> nn.Module:
    module = net.module().eval()
    module.load_state_dict(dict(weights), strict=False)
    return module


def test_rows_every_tier_uses_its_slice_and_statistics(world: Callable[..., Any]) -> None:
    """One batch of all training data: statistics that do not depend on how it is shuffled."""
    place, method = world(widths=(1.0, 0.5), sizes=(8, 9), labels=[[0, 1], [2, 3]]), HeteroFL()
    server = place.play(method, place.engine(method))
    evaluator, engine = place.evaluator(BatchNormStatistics("pooled", 100)), place.engine(method)
    rows = evaluator.rows(
        method.eval_targets(server), place.fleet, lambda task, boxes: engine.ask(Request(task, boxes, 1)), 2, False
    )
    data, found = place.dataset, {(row.tier, row.test, row.metric): row.value for row in rows}
    for tier in place.fleet.tiers:
        module = plain_module(tier.model, tier.footprint.read(server["weights"]))
        norms = [part for part in module.modules() if isinstance(part, nn.BatchNorm2d)]
        for norm in norms:
            norm.momentum = 1.0
            norm.train()  # but not the scaler: statistics are of the net as it is evaluated
        with torch.no_grad():
            module(data.preparation(data.train.x))
            logits = module.eval()(data.preparation(data.test.x)).logits
        right = sum(first_best(line) == int(y) for line, y in zip(logits.tolist(), data.test.y, strict=True))
        assert found[tier.name, "global", "accuracy"] == pytest.approx(100 * right / len(data.test))
        loss = float(nn.functional.cross_entropy(logits, data.test.y))
        assert found[tier.name, "global", "loss"] == pytest.approx(loss, abs=1e-4)
        hits = 0
        for labels, mine in zip(([0, 1], [2, 3]), place.partition.test, strict=True):
            for row in mine:
                line = [score if label in labels else 0.0 for label, score in enumerate(logits[row].tolist())]
                hits += first_best(line) == int(data.test.y[row])
        assert found[tier.name, "local", "accuracy"] == pytest.approx(100 * hits / len(data.test))


@pytest.mark.parametrize("normalization", ["group", "static_batch"])
@pytest.mark.parametrize("block", [1, 16])
def test_rows_device_models_are_evaluated_on_devices(normalization: str, block: int, world: Callable[..., Any]) -> None:
    """Each with the statistics of its own data, on its own test examples and on all; blocks pad the shorter lists."""
    place = world(
        widths=(1.0, 0.5),
        sizes=(6, 6, 8, 8),
        test_sizes=(7, 2, 1, 5),
        labels=[[0, 1], [2], [1], [0, 3]],
        normalization=normalization,
    )
    method = Standalone()
    engine = place.engine(method, devices_per_block=block)
    candidates = method.eval_targets(place.play(method, engine))
    evaluator, data = place.evaluator(BatchNormStatistics(batch_size=100), batch_size=3), place.dataset
    rows = evaluator.rows(candidates, place.fleet, lambda task, boxes: engine.ask(Request(task, boxes, 2)), 2, True)
    found = {(row.test, row.device, row.tier): row.value for row in rows}
    totals: dict[tuple[str, str], list[int]] = {}
    for number, device in enumerate(place.fleet.devices(1)):
        module = plain_module(device.model, engine.client_states.read(device)["weights"])
        for part in module.modules():
            if isinstance(part, nn.BatchNorm2d):
                part.momentum = 1.0
                part.train()
        with torch.no_grad():
            module(data.preparation(data.train.x[torch.as_tensor(place.partition.train[number])]))
            logits = module.eval()(data.preparation(data.test.x)).logits.tolist()
        for test, mine in (("global", range(len(data.test))), ("local", place.partition.test[number])):
            right = sum(first_best(logits[row]) == int(data.test.y[row]) for row in mine)
            assert found[test, device.name, device.tier] == pytest.approx(100 * right / len(mine))
            counted = totals.setdefault((test, device.tier), [0, 0])
            counted[0], counted[1] = counted[0] + right, counted[1] + len(mine)
    for (test, tier), (right, asked) in totals.items():
        assert found[test, "", tier] == pytest.approx(100 * right / asked)
    assert {row.candidate for row in rows} == {"personal"}


def test_rows_padding_is_not_counted(world: Callable[..., Any]) -> None:
    """Every device answers 0, which is right for the first example of the shorter list."""
    place = world(sizes=(4, 4), test_sizes=(5, 2), labels=[[1, 0], [0, 1]], normalization="none")
    zeros = {name: torch.zeros(shape) for name, shape in place.fleet.global_model.shapes().items()}
    candidate = DeviceModel(lambda client, inbox: (client.model, inbox["zeros"]), lambda device: {"zeros": zeros})
    engine = place.engine(Standalone())
    rows = place.evaluator().rows(
        {"p": candidate}, place.fleet, lambda t, boxes: engine.ask(Request(t, boxes, 1)), 1, True
    )
    found = {row.device: row.value for row in rows if row.test == "local"}
    assert found == pytest.approx({"0": 100 * 2 / 5, "1": 100 * 1 / 2, "": 100 * 3 / 7})


@pytest.mark.parametrize("fill", [0.0, -math.inf])
def test_rows_device_model_unseen_logit_is_applied(fill: float, world: Callable[..., Any]) -> None:
    labels = [[0, 1], [2]]
    place, method = world(sizes=(6, 6), labels=labels, normalization="none"), Standalone()
    engine = place.engine(method)
    candidate = DeviceModel(lambda client, inbox: (client.model, client.state["weights"]), unseen_logit=fill)
    rows = place.evaluator().rows(
        {"p": candidate}, place.fleet, lambda t, boxes: engine.ask(Request(t, boxes, 1)), 1, True
    )
    found = {(row.test, row.device): row.value for row in rows}
    for number, device in enumerate(place.fleet.devices(1)):
        module = plain_module(device.model, engine.client_states.read(device)["weights"])
        with torch.no_grad():
            logits = module(place.dataset.preparation(place.dataset.test.x)).logits.tolist()
        hits = 0
        for row in place.partition.test[number]:
            line = [score if label in labels[number] else fill for label, score in enumerate(logits[row])]
            hits += first_best(line) == int(place.dataset.test.y[row])
        assert found["local", device.name] == pytest.approx(100 * hits / len(place.partition.test[number]))


def test_rows_device_model_can_use_an_inbox(world: Callable[..., Any]) -> None:
    """The inbox of a evaluation reaches the device."""
    place = world(sizes=(4, 4), normalization="none")
    weights = place.fleet.global_model.initial_weights(3)
    candidate = DeviceModel(lambda client, inbox: (client.model, inbox["shared"]), lambda device: {"shared": weights})
    engine = place.engine(Standalone())

    def ask(task: Any, boxes: Any) -> Any:
        return engine.ask(Request(task, boxes, 1))

    by_devices = place.evaluator().rows({"p": candidate}, place.fleet, ask, 1, False)
    by_server = place.evaluator().rows({"p": tier_slices(weights)}, place.fleet, ask, 1, False)
    for test in ("global", "local"):
        found = [
            next(row.value for row in rows if (row.test, row.metric) == (test, "accuracy"))
            for rows in (by_devices, by_server)
        ]
        assert found[0] == pytest.approx(found[1])


def test_rows_device_without_tests_has_no_local_row(world: Callable[..., Any]) -> None:
    place, method = world(sizes=(4, 4), test_sizes=(0, 6)), Standalone()
    engine = place.engine(method)
    rows = place.evaluator().rows(
        method.eval_targets({}), place.fleet, lambda task, boxes: engine.ask(Request(task, boxes, 1)), 1, True
    )
    found = {(row.test, row.device): row.value for row in rows}
    assert ("local", "0") not in found
    assert found["local", ""] == found["local", "1"]


def test_rows_missing_replies_leave_the_other_devices(world: Callable[..., Any], meddling: Callable[..., Any]) -> None:
    place, method = world(sizes=(4, 4, 4)), Standalone()
    engine = meddling(place.engine(method), lambda replies: [one for one in replies if one.device.name != "1"])
    rows = place.evaluator().rows(
        method.eval_targets({}), place.fleet, lambda task, boxes: engine.ask(Request(task, boxes, 1)), 1, True
    )
    assert {row.device for row in rows} == {"", "0", "2"}


def test_rows_diverged_model_is_still_evaluated(world: Callable[..., Any]) -> None:
    """Finite weights whose activations overflow: a bad result, but no reason for a run to die."""
    place, method = world(), HeteroFL()
    server = {"weights": {name: tensor * 1e30 for name, tensor in method.start(place.fleet, 0)["weights"].items()}}
    engine = place.engine(method)
    rows = place.evaluator().rows(
        method.eval_targets(server), place.fleet, lambda task, boxes: engine.ask(Request(task, boxes, 1)), 1, False
    )
    assert {(row.test, row.metric) for row in rows} >= {("global", "accuracy"), ("local", "accuracy")}


def test_rows_tier_without_devices_does_not_stop_the_others(world: Callable[..., Any]) -> None:
    """A tenth of four devices is none, so no device can collect the large model's statistics."""
    place, method = world(widths=(1.0, 0.5), shares=(0.1, 0.9), sizes=(4, 4, 4, 4)), HeteroFL()
    engine = place.engine(method)
    rows = place.evaluator(BatchNormStatistics("per_device", 4)).rows(
        method.eval_targets(method.start(place.fleet, 0)),
        place.fleet,
        lambda task, boxes: engine.ask(Request(task, boxes, 1)),
        1,
        False,
    )
    assert {(row.test, row.metric) for row in rows if row.tier == "b"} >= {("global", "accuracy")}


@pytest.mark.parametrize("method", [HeteroFL(), Standalone()], ids=["heterofl", "standalone"])
def test_rows_device_without_examples_does_not_stop_the_others(method: Any, world: Callable[..., Any]) -> None:
    place = world(sizes=(4, 0, 4), test_sizes=(2, 2, 2))
    engine = place.engine(method)
    rows = place.evaluator(BatchNormStatistics("per_device", 4)).rows(
        method.eval_targets(method.start(place.fleet, 0)),
        place.fleet,
        lambda task, boxes: engine.ask(Request(task, boxes, 1)),
        1,
        True,
    )
    assert {"0", "2"} <= {row.device for row in rows}


def asked_of(engine: Any, asked: list[int]) -> Any:
    """Ask, and count how many nets were put to the test."""

    def ask(task: Any, boxes: Any) -> Any:
        asked.append(len(boxes) if task.ref[0] == "test_set" else 0)
        return engine.ask(Request(task, boxes, 1))

    return ask


def test_rows_batch_dependent_model_sees_one_device_per_batch(world: Callable[..., Any]) -> None:
    """Local accuracy of a server's model: against a loop over devices and their batches, and against what the devices
    find themselves with the same weights."""
    place, method = world("mobilenet", sizes=(8, 8, 8), test_sizes=(7, 2, 5), labels=[[0, 1], [2], [3]]), Standalone()
    weights = place.fleet.global_model.initial_weights(2)
    assert place.fleet.global_model.is_batch_dependent()
    engine, evaluator, data = place.engine(method), place.evaluator(batch_size=4), place.dataset
    assert evaluator.seed == place.fleet.seed
    given = DeviceModel(lambda client, inbox: (client.model, inbox["shared"]), lambda device: {"shared": weights})
    rows = evaluator.rows({"server": tier_slices(weights), "own": given}, place.fleet, asked_of(engine, []), 1, True)
    block = {name: one.unsqueeze(0) for name, one in weights.items()}
    found = {(row.candidate, row.device): row.value for row in rows if (row.test, row.metric) == ("local", "accuracy")}
    for number, own in enumerate(place.partition.test):
        right = 0
        for batch in torch.as_tensor(own)[local_order(len(own), place.fleet.seed, str(number))].split(4):
            logits = place.fleet.global_model(block, data.preparation(data.test.x[batch]).unsqueeze(0)).logits[0]
            right += int((logits.argmax(1) == data.test.y[batch]).sum())
        for candidate in ("server", "own"):
            assert found[candidate, str(number)] == pytest.approx(100 * right / len(own))


def test_logits_nested_exits_share_one_forward_pass(world: Callable[..., Any]) -> None:
    method, asked = HeteroFL(), []
    place = world(widths=(1.0, 1.0, 0.5), sizes=(6, 6, 6), normalization="group")
    candidates = method.eval_targets(method.start(place.fleet, 0))
    rows = place.evaluator().rows(candidates, place.fleet, asked_of(place.engine(method), asked), 1, False)
    assert asked == [2]
    found = {(row.tier, row.test, row.metric): row.value for row in rows}
    for test, metric in (("global", "accuracy"), ("global", "loss"), ("local", "accuracy")):
        assert found["a", test, metric] == found["b", test, metric]
    assert found["a", "global", "loss"] != found["c", "global", "loss"]


def test_models_same_weights_reuse_evaluated_statistics(world: Callable[..., Any]) -> None:
    place, method, asked = world(widths=(1.0, 0.5), sizes=(6, 6)), HeteroFL(), []
    engine, evaluator, fleet = place.engine(method), place.evaluator(BatchNormStatistics("per_device", 4)), place.fleet

    def ask(task: Any, boxes: Any) -> Any:
        asked.extend([task.ref] if task.ref[0] == "statistics" else [])
        return engine.ask(Request(task, boxes, 1))

    candidate = method.eval_targets(method.start(fleet, 0))["server"]
    evaluator.rows({"server": candidate}, fleet, ask, 1, False)
    saved = evaluator.models("server", candidate, fleet, ask, 1)
    assert len(asked) == 1
    fresh = evaluator.statistics.fill({tier: candidate.weights(tier) for tier in fleet.tiers}, fleet, ask, 1)
    for tier in fleet.tiers:
        assert saved[tier].keys() == fresh[tier].keys()
        assert all(torch.equal(saved[tier][name], fresh[tier][name]) for name in fresh[tier])
    evaluator.models(
        "server", tier_slices(fleet.global_model.initial_weights(3)), fleet, ask, 2
    )  # other weights have other statistics
    assert len(asked) == 3


def test_rows_test_set_in_parts_counts_as_diverged_if_one_is_refused(world: Callable[..., Any]) -> None:
    place, method = world(test_sizes=(9, 9, 9), sizes=(4, 4, 4)), HeteroFL()
    engine, evaluator = place.engine(method), replace(place.evaluator(), batch_size=2)
    models = {place.fleet.largest: method.start(place.fleet, 0)["weights"]}
    filled = evaluator.statistics.fill(models, place.fleet, lambda task, boxes: engine.ask(Request(task, boxes, 1)), 1)
    asked: list[int] = []

    def ask(task: Any, boxes: Any, first: int) -> list[Any]:
        asked.append(len(boxes))
        return list(engine.ask(Request(task, boxes, 1)))[first:]

    whole, cut = (evaluator.logits(filled, place.fleet, partial(ask, first=first)) for first in (0, 1))
    assert asked == [4, 4] and bool(whole[place.fleet.largest].isfinite().all())
    assert bool(cut[place.fleet.largest].isnan().all())
    together = replace(evaluator, batch_size=10**6).logits(filled, place.fleet, partial(ask, first=0))
    assert asked[-1] == 1 and torch.allclose(together[place.fleet.largest], whole[place.fleet.largest], atol=1e-6)
