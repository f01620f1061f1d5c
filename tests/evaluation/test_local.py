"""Evaluation on devices, and fine-tuning of the global model on a device's own data."""

import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from fedloom.client import Sgd
from fedloom.evaluation import Evaluator, FineTune, Row
from fedloom.fleet import Request, ServerModel
from fedloom.methods import METHODS
from fedloom.tensors import combine

FAMILIES = ["convnet", "preactresnet", "mobilenet"]


def tuned_rows(place: Any, tune: FineTune, block: int = 16) -> tuple[list[Row], dict[str, torch.Tensor]]:
    engine = place.engine(METHODS["fedavg"](), block)
    evaluator: Evaluator = place.evaluator(fine_tune=tune)
    weights = place.fleet.global_model.initial_weights(2)  # with which no family gives all examples the same answer
    candidate = ServerModel(lambda tier: tier.footprint.read(weights))

    def ask(task: Any, inboxes: Any) -> Any:
        return engine.ask(Request(task, inboxes, 1))

    return evaluator.rows({"server": candidate}, place.fleet, ask, 1, per_device=True, last=True), weights


def values(rows: list[Row], metric: str, tier: str) -> dict[str, float]:
    return {row.device: row.value for row in rows if (row.metric, row.tier) == (metric, tier)}


@pytest.mark.parametrize("family", FAMILIES)
def test_fine_tune_rows_cover_every_device_and_tier(family: str, world: Callable[..., Any]) -> None:
    place = world(family, widths=(1.0, 0.5), sizes=(12, 8, 9))
    rows, _ = tuned_rows(place, FineTune("all", epochs=20, batch_size=4, lr=0.3))
    gains = []
    for tier in ("a", "b"):
        before, after = values(rows, "initial", tier), values(rows, "personalized", tier)
        assert set(before) == set(after) == {"", "0", "1", "2"}
        each = [share for device, share in after.items() if device]
        assert after[""] == pytest.approx(statistics.fmean(each))
        assert values(rows, "personalized_std", tier)[""] == pytest.approx(statistics.pstdev(each))
        gains.append(after[""] - before[""])
    assert max(gains) > 0


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("part", ["head", "body", "all"])
def test_fine_tune_only_selected_part_is_trained(
    part: Any, family: str, world: Callable[..., Any], client_for: Callable[..., Any]
) -> None:
    place = world(family, sizes=(8, 8))
    model = place.fleet.global_model
    moving = set(FineTune(part).trainable(model))
    head = set(model.label_rows()) & set(model.last_exit_weights())
    assert (
        moving
        == {"head": head, "body": set(model.last_exit_weights()) - head, "all": set(model.last_exit_weights())}[part]
    )
    assert moving


@pytest.mark.parametrize("family", FAMILIES)
def test_fine_tune_initial_equals_local_accuracy(family: str, world: Callable[..., Any]) -> None:
    """Also for a net that looks at the whole batch, where padding would be seen: devices hold 3, 5 and 8 tests."""
    place = world(family, sizes=(8, 8, 8), test_sizes=(3, 5, 8))
    rows, weights = tuned_rows(place, FineTune(epochs=1, batch_size=100))
    filled = place.evaluator().statistics.fill(
        {place.fleet.largest: weights},
        place.fleet,
        lambda task, boxes: place.engine(METHODS["fedavg"]()).ask(Request(task, boxes, 1)),
        1,
    )[place.fleet.largest]
    for index, own in enumerate(place.partition.test):
        x, y = place.dataset.test.x[own], place.dataset.test.y[own]
        block = {name: one.unsqueeze(0) for name, one in filled.items()}
        logits = place.fleet.global_model(block, place.dataset.preparation(x).unsqueeze(0)).logits[0]
        expected = 100 * float((logits.argmax(-1) == y).double().mean())
        assert values(rows, "initial", "a")[str(index)] == pytest.approx(expected)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("family", FAMILIES)
def test_fine_tune_block_size_keeps_results(family: str, world: Callable[..., Any]) -> None:
    place = world(family, widths=(1.0, 0.5), sizes=(8, 8, 12), optimizer=Sgd(9.0))
    tune = FineTune(epochs=2, batch_size=4, lr=0.1)
    assert tuned_rows(place, tune)[0] == tuned_rows(place, tune, block=1)[0]


def test_logits_tier_that_is_an_exit_needs_no_own_pass(
    world: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = world("preactresnet", widths=(1.0, 1.0), sizes=(8, 8), models=None)
    small, large = place.fleet.global_model.with_settings(stages=1), place.fleet.global_model
    assert small.shapes().keys() < large.shapes().keys()
    place = world("preactresnet", sizes=(8, 8), models=[("simple", small), ("complex", large)])
    evaluator, weights = replace(place.evaluator(), batch_size=3), place.fleet.global_model.initial_weights(1)
    models = {tier: tier.footprint.read(weights) for tier in place.fleet.tiers}
    order = torch.arange(len(place.dataset.test.y))
    assert not large.is_batch_dependent()  # tried here, once
    passes: list[str] = []
    plain = type(large).__call__
    engine = place.engine(METHODS["fedavg"]())

    def logits(models: Any) -> Any:
        return evaluator.logits(models, place.fleet, lambda task, boxes: engine.ask(Request(task, boxes, 1)), order)

    def counted(self: Any, *arguments: Any) -> Any:
        passes.append("simple" if self == small else "complex")
        return plain(self, *arguments)

    monkeypatch.setattr(type(large), "__call__", counted)
    together = logits(models)
    batches = -(-len(order) // 3)
    assert passes.count("simple") <= 2  # the trial, and to learn its exits' names
    assert passes.count("complex") <= batches + 2
    apart = {tier: logits({tier: one})[tier] for tier, one in models.items()}
    assert all(torch.equal(together[tier], apart[tier]) for tier in models)
    moved = {
        tier: combine(lambda one: one + 0.01, one) if tier.name == "simple" else one for tier, one in models.items()
    }
    passes.clear()
    logits(moved)  # other weights, so no exit of the large one
    assert passes.count("simple") >= batches
