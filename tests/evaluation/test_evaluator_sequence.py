"""Models that answer at every position, held by the server or by devices, against a loop over positions."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fedloom.data import Examples
from fedloom.evaluation import Row
from fedloom.fleet import DeviceModel, Request, tier_slices
from fedloom.methods import METHODS, Method
from fedloom.methods.standalone import Standalone
from fedloom.models import Model

HELD = ((0, 1), (2,), (1, 3), (0, 3))
METRICS = {"perplexity", "perplexity_of_mean", "accuracy", "perplexity_hidden", "accuracy_hidden"}


def text_world(world: Callable[..., Any], hide: bool = True, **changes: Any) -> Any:
    """Some tokens of the test set are masked, but not the last device's; none if `hide` is false."""
    settings = {"widths": (1.0, 0.5), "sizes": (6, 6, 8, 8), "test_sizes": (7, 3, 2, 5), "labels": HELD, **changes}
    place = world("transformer", **settings)
    y = place.dataset.test.y
    hidden = torch.rand(y.shape, generator=torch.Generator().manual_seed(5)) < 0.4
    hidden[torch.as_tensor(place.partition.test[-1])] = False
    tests = Examples(y.masked_fill(hidden & hide, place.dataset.classes), y)
    return replace(place, dataset=replace(place.dataset, test=tests))


def evaluate(place: Any, candidates: Any, engine: Any, **changes: Any) -> list[Row]:
    evaluator = place.evaluator(**{"batch_size": 3, **changes})
    rows: list[Row] = evaluator.rows(
        candidates, place.fleet, lambda task, boxes: engine.ask(Request(task, boxes, 2)), 2, True
    )
    return rows


def by_key(rows: Sequence[Row]) -> dict[tuple[str, str, str], dict[str, float]]:
    """(test, tier, device) -> metric -> value."""
    found: dict[tuple[str, str, str], dict[str, float]] = {}
    for row in rows:
        of_one = found.setdefault((row.test, row.tier, row.device), {})
        assert row.metric not in of_one
        of_one[row.metric] = row.value
    return found


def answered(net: Model, weights: Mapping[str, Tensor], place: Any, rows: Sequence[int]) -> list[list[tuple[Any, ...]]]:
    """Row by row and position by position: the loss, whether the answer is right, and whether the word was hidden."""
    module = net.module().eval()
    module.load_state_dict(dict(weights))
    found = []
    for number in rows:
        x, y = place.dataset.test.x[number], place.dataset.test.y[number].tolist()
        with torch.no_grad():
            logits = module(x.unsqueeze(0)).logits[0].double().tolist()
        losses = [math.log(sum(map(math.exp, line))) - line[word] for line, word in zip(logits, y, strict=True)]
        right = [line.index(max(line)) == word for line, word in zip(logits, y, strict=True)]
        hidden = [token == place.dataset.preparation.mask_token for token in x.tolist()]
        found.append(list(zip(losses, right, hidden, strict=True)))
    return found


def expected(devices: Sequence[list[list[tuple[Any, ...]]]], batch_size: int = 3) -> dict[str, float]:
    """Batches are of one device's rows; everybody's answers count alike."""
    exponentials, rows = 0.0, 0
    for own in devices:
        for start in range(0, len(own), batch_size):
            batch = own[start : start + batch_size]
            losses = [loss for row in batch for loss, _, _ in row]
            exponentials, rows = exponentials + len(batch) * math.exp(sum(losses) / len(losses)), rows + len(batch)
    every = [one for own in devices for row in own for one in row]
    hidden = [one for one in every if one[2]]
    made = {
        "perplexity": exponentials / rows,
        "perplexity_of_mean": math.exp(sum(one[0] for one in every) / len(every)),
        "accuracy": 100 * sum(one[1] for one in every) / len(every),
    }
    if hidden:
        made["perplexity_hidden"] = math.exp(sum(one[0] for one in hidden) / len(hidden))
        made["accuracy_hidden"] = 100 * sum(one[1] for one in hidden) / len(hidden)
    return made


@pytest.mark.parametrize("hide", [True, False])
@pytest.mark.parametrize("block", [1, 16])
def test_rows_sequence_device_models_cover_every_position(block: int, hide: bool, world: Callable[..., Any]) -> None:
    """Blocks pad the shorter lists of windows; what is not hidden from a device has no metrics of its own."""
    place, method = text_world(world, hide), Standalone()
    engine = place.engine(method, devices_per_block=block)
    candidates = method.eval_targets(place.play(method, engine))
    found = by_key(evaluate(place, candidates, engine))
    rows_by_test: dict[tuple[str, str], list[Any]] = {}
    for number, device in enumerate(place.fleet.devices(1)):
        weights = engine.client_states.read(device)["weights"]
        for test, rows in (("global", range(len(place.dataset.test))), ("local", place.partition.test[number])):
            own = answered(device.model, weights, place, rows)
            assert found.pop((test, device.tier, device.name)) == pytest.approx(expected([own]), rel=1e-4)
            rows_by_test.setdefault((test, device.tier), []).append(own)
    for (test, tier), devices in rows_by_test.items():
        assert found.pop((test, tier, "")) == pytest.approx(expected(devices), rel=1e-4)
    assert not found


@pytest.mark.parametrize("name", ["ditto", "fedhenn", "standalone"])
def test_rows_sequence_personalized_methods_have_perplexity(name: str, world: Callable[..., Any]) -> None:
    settings = {"fedhenn": {"probe_size": 6, "strength": 0.5, "growth": "none"}}.get(name, {})
    method: Method = METHODS[name].from_settings(settings, METHODS)
    place = text_world(world, widths=(1.0,))
    engine = place.engine(method)
    rows = evaluate(place, method.eval_targets(place.play(method, engine, rounds=1)), engine)
    personal = by_key([row for row in rows if row.candidate == "personal" and not row.device])
    assert {key: set(metrics) for key, metrics in personal.items()} == {
        ("global", "a", ""): METRICS,
        ("local", "a", ""): METRICS,
    }


def test_rows_sequence_server_and_devices_agree(world: Callable[..., Any]) -> None:
    """Though devices look at fewer rows at a time: 3 rows a batch here, one at a time there."""
    place = text_world(world, widths=(1.0,))
    weights, engine = place.fleet.global_model.initial_weights(3), place.engine(Standalone())
    device_model = DeviceModel(
        lambda client, inbox: (client.model, inbox["shared"]), lambda device: {"shared": weights}
    )
    on_server, on_devices = (
        by_key(evaluate(place, {"one": candidate}, engine))["global", "a", ""]
        for candidate in (tier_slices(weights), device_model)
    )
    assert on_server.keys() == METRICS
    assert on_devices == pytest.approx(on_server, rel=1e-5)
    whole = answered(place.fleet.global_model, weights, place, range(len(place.dataset.test)))
    assert on_server == pytest.approx(expected([whole]), rel=1e-5)


@pytest.mark.parametrize("tests", [("global",), ("local",)])
def test_rows_sequence_contain_only_selected_tests(tests: tuple[str, ...], world: Callable[..., Any]) -> None:
    place, method = text_world(world), Standalone()
    rows = evaluate(place, method.eval_targets({}), place.engine(method), tests=tests)
    assert {row.test for row in rows} == set(tests)
    assert {row.metric for row in rows} == METRICS


def test_rows_sequence_device_without_tests_has_no_local_row(world: Callable[..., Any]) -> None:
    place, method = text_world(world, widths=(1.0,), test_sizes=(0, 3, 2, 5)), Standalone()
    found = by_key(evaluate(place, method.eval_targets({}), place.engine(method)))
    assert {device for test, _, device in found if test == "local"} == {"", "1", "2", "3"}
    assert {device for test, _, device in found if test == "global"} == {"", "0", "1", "2", "3"}


@pytest.mark.parametrize("held_by", ["server", "devices"])
def test_rows_sequence_diverged_model_is_still_evaluated(held_by: str, world: Callable[..., Any]) -> None:
    """Finite losses whose exponential is no number: a bad result, but no reason for a run to die."""
    place = text_world(world, widths=(1.0,))
    weights = place.fleet.global_model.initial_weights(0)
    weights["decoder.classifier.weight"] = weights["decoder.classifier.weight"] * 1e6
    device_model = DeviceModel(
        lambda client, inbox: (client.model, inbox["shared"]), lambda device: {"shared": weights}
    )
    candidate = tier_slices(weights) if held_by == "server" else device_model
    found = by_key(evaluate(place, {"one": candidate}, place.engine(Standalone())))["global", "a", ""]
    assert found["perplexity"] == found["perplexity_of_mean"] == math.inf
    assert 0 <= found["accuracy"] < 100
    assert place.refusals == []


def test_rows_sequence_unseen_logit_masks_tokens(world: Callable[..., Any]) -> None:
    """In its own windows only: there it knows all words, so a model that knows nothing guesses among those."""
    place = text_world(world, widths=(1.0,))
    zeros = {name: torch.zeros(shape) for name, shape in place.fleet.global_model.shapes().items()}
    candidate = DeviceModel(
        lambda client, inbox: (client.model, inbox["zeros"]), lambda device: {"zeros": zeros}, unseen_logit=-math.inf
    )
    found = by_key(evaluate(place, {"one": candidate}, place.engine(Standalone())))
    for number, words in enumerate(HELD):
        assert found["local", "a", str(number)]["perplexity"] == pytest.approx(len(words))
        assert found["global", "a", str(number)]["perplexity"] == pytest.approx(4)


def test_rows_images_device_upload_is_only_counts(world: Callable[..., Any]) -> None:
    place, method = world("convnet", widths=(1.0, 0.5)), Standalone()
    assert {row.metric for row in evaluate(place, method.eval_targets({}), place.engine(method))} == {"accuracy"}
