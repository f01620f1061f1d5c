"""FedIN: shared ends, private intermediate layers, and the feature pairs that devices exchange."""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fedloom.client import Client, PaddedIndices, Schedule, Sgd, fit, gradient, label_loss, merge_plans
from fedloom.fleet import Reply, Request
from fedloom.methods import fleet_problem
from fedloom.methods.fedin import FedIN, collect_pairs, empty_buffer, features_loss, sample_pairs, update_buffer
from fedloom.methods.lgfedavg import LGFedAvg
from fedloom.methods.standalone import Standalone
from fedloom.models import Model, build_model
from fedloom.tensors import combine, inner

SIZES = (8, 5, 9, 12)
A_TO_E = {"a": (2, 3), "b": (2, 1), "c": (2, 2), "d": (1, 3), "e": (1, 1)}
SMALL = FedIN(pairs=4, batch=6)


@pytest.fixture
def sim(world: Callable[..., Any], tiny_model: Callable[..., Model]) -> Any:
    """Two models whose intermediate layers differ in depth."""
    sizes = [("a", tiny_model("splitnet")), ("b", tiny_model("splitnet", extra=(0, 0)))]
    return world(models=sizes, sizes=SIZES)


def client_of(sim: Any, method: FedIN, sizes: int = 1, **changes: Any) -> Client:
    """The first devices of a fleet as clients of round one, all with the largest model."""
    engine, devices = sim.engine(method), sim.fleet.devices(1)[:sizes]
    rows = torch.stack([engine.client_data.rows(device) for device in devices])
    made = Client(
        model=sim.fleet.global_model,
        optimizer=sim.optimizer,
        examples=sim.dataset.train,
        tests=sim.dataset.test,
        test_indices=PaddedIndices(rows, torch.ones_like(rows, dtype=torch.bool)),
        train_indices=PaddedIndices(rows, torch.ones_like(rows, dtype=torch.bool)),
        preparation=sim.dataset.preparation,
        plan=merge_plans([engine.plan(Request(method.train, {}, 1), device) for device in devices]),
        seen_labels=torch.ones(sizes, sim.dataset.classes, dtype=torch.bool),
        state={},
    )
    return replace(made, **changes)


def random_pairs(client: Client, count: int = 5) -> dict[str, Tensor]:
    devices, model = len(client.seen_labels), client.model
    return {
        "enter": torch.randn(devices, count, *model.submodel("intermediate").input_shape),
        "leave": torch.randn(devices, count, *model.submodel("classifier").input_shape),
    }


def slopes(client: Client, weights: Any, pairs: Any) -> tuple[Any, Any, Any]:
    """The gradients of the labels, of the features, and of both in one backward pass."""
    batch, labels, features = client.batch(client.plan[0]), label_loss(client), features_loss(client, pairs)
    each = [gradient(loss, weights, batch) for loss in (labels, features)]
    return each[0], each[1], gradient(lambda w, b: labels(w, b) + features(w, b), weights, batch)


@pytest.mark.usefixtures("double")
def test_features_loss_trains_intermediate_layers_only(
    world: Callable[..., Any], block_weights: Callable[..., Any]
) -> None:
    client = client_of(world("splitnet"), SMALL, 2)
    labels, features, _ = slopes(client, block_weights(client.model, 2), random_pairs(client))
    for name, slope in features.items():
        assert bool(slope.any()) == name.startswith("intermediate.")
        assert bool(labels[name].any())


@pytest.mark.usefixtures("double")
def test_features_gradient_adds_to_label_gradient(world: Callable[..., Any], block_weights: Callable[..., Any]) -> None:
    client = client_of(world("splitnet"), SMALL, 2)
    labels, features, both = slopes(client, block_weights(client.model, 2), random_pairs(client))
    summed = FedIN(middle="sum").combine_gradients(labels, features)
    assert all(torch.allclose(summed[name], slope, atol=1e-12) for name, slope in both.items())


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("local", [0.0, 1.0, 2.0])
def test_fedin_sum_step_matches_manual_computation(
    local: float, world: Callable[..., Any], block_weights: Callable[..., Any]
) -> None:
    """The whole task, one step of plain gradient descent."""
    sim = world("splitnet", schedule=Schedule(100), optimizer=Sgd(0.1))
    client = client_of(sim, SMALL, 2)
    weights, pairs = block_weights(client.model, 2), random_pairs(client)
    labels, features, _ = slopes(client, weights, pairs)
    ends = {name: one for name, one in weights.items() if not name.startswith("intermediate.")}
    client = replace(client, state={"weights": {name: one for name, one in weights.items() if name not in ends}})
    made = replace(SMALL, local=local).train.run(client, {"weights": ends, "pairs": pairs})
    assert made.state is not None
    for name, weight in {**made.upload["weights"], **made.state["weights"]}.items():
        slope = labels[name] if name in ends else local / 2 * labels[name] + features[name]
        assert torch.allclose(weight, weights[name] - 0.1 * slope, atol=1e-12)


numbers = st.floats(-10, 10, width=32)
vectors = st.lists(numbers, min_size=3, max_size=3)


@given(own=vectors, other=vectors, elsewhere=st.lists(vectors, max_size=5))
def test_project_is_closest_non_opposing_gradient(
    own: list[float], other: list[float], elsewhere: list[list[float]]
) -> None:
    labels, features = (torch.tensor([numbers], dtype=torch.float64) for numbers in (own, other))
    made = FedIN(middle="project").combine_gradients({"w": labels}, {"w": features})["w"]
    assert float((made * labels).sum()) >= -1e-6
    if float((labels * features).sum()) >= 0:
        assert torch.equal(made, features)
    for numbers in elsewhere:
        feasible = torch.tensor([numbers], dtype=torch.float64)
        if float((feasible * labels).sum()) >= 0:
            assert float((made - features).norm()) <= float((feasible - features).norm()) + 1e-9


@given(own=st.lists(vectors, min_size=2, max_size=4), other=st.lists(vectors, min_size=4, max_size=4))
def test_project_is_per_device_and_tensor(own: list[list[float]], other: list[list[float]]) -> None:
    """With `project_all`, all tensors of a device are one vector."""
    labels, features = (torch.tensor(one[: len(own)], dtype=torch.float64) for one in (own, other))
    bundles = [{"a": one[:, :1], "b": one[:, 1:]} for one in (labels, features)]
    for middle in ("project", "project_all"):
        method = FedIN(middle=middle)  # type: ignore[arg-type]
        block = method.combine_gradients(*bundles)
        for device in range(len(own)):
            alone = method.combine_gradients(
                *({name: one[device : device + 1] for name, one in b.items()} for b in bundles)
            )
            assert all(torch.equal(block[name][device : device + 1], one) for name, one in alone.items())
        if middle == "project":
            parts = [method.combine_gradients(*({name: b[name]} for b in bundles)) for name in ("a", "b")]
            assert torch.equal(block["a"], parts[0]["a"]) and torch.equal(block["b"], parts[1]["b"])
        else:
            whole = FedIN(middle="project").combine_gradients({"w": labels}, {"w": features})["w"]
            assert torch.allclose(torch.cat([block["a"], block["b"]], 1), whole, atol=1e-9)


def test_project_zero_label_gradient_keeps_features() -> None:
    other = {"w": torch.tensor([[1.0, -2.0]])}
    for middle in ("project", "project_all", "sum"):
        made = FedIN(middle=middle).combine_gradients({"w": torch.zeros(1, 2)}, other)  # type: ignore[arg-type]
        assert torch.equal(made["w"], other["w"])


@pytest.mark.usefixtures("double")
def test_features_loss_of_own_pairs_is_zero(world: Callable[..., Any], block_weights: Callable[..., Any]) -> None:
    sim = world("splitnet", normalization="group")
    client = client_of(sim, SMALL, 2)
    weights = block_weights(client.model, 2)
    pairs, batch = collect_pairs(client, weights, 6), client.batch(client.plan[0])
    loss = features_loss(client, pairs)
    assert loss(weights, replace(batch, step_seeds=None)).tolist() == [0.0, 0.0]
    assert not any(bool(slope.any()) for slope in gradient(loss, weights, replace(batch, step_seeds=None)).values())
    assert bool((loss(combine(lambda one: one + 0.1, weights), replace(batch, step_seeds=None)) > 0).all())


@pytest.mark.usefixtures("double")
def test_collect_pairs_matches_evaluation_mode(world: Callable[..., Any], block_weights: Callable[..., Any]) -> None:
    """With batch norm statistics of the device's own data; each example appears at most once."""
    client = client_of(world("splitnet"), SMALL, 2)
    weights = block_weights(client.model, 2)
    total = [client.model.batch_statistics(weights, client.batch(step).x) for step in client.plan]
    ready = {**weights, **combine(lambda *each: sum(each) / len(each), *total)}
    assert client.train_indices is not None
    x = client.preparation(client.examples.x[client.train_indices.rows])
    expected = client.model(ready, x).taps
    pairs = collect_pairs(client, weights, 6)
    for device in range(2):
        found = [
            int((expected["extractor"][device] - enter).abs().flatten(1).sum(1).argmin())
            for enter in pairs["enter"][device]
        ]
        assert len(set(found)) == 6
        assert torch.allclose(pairs["enter"][device], expected["extractor"][device][found], atol=1e-12)
        assert torch.allclose(pairs["leave"][device], expected["features"][device][found], atol=1e-12)


def test_pair_layout_is_equal_for_all_models(tiny_model: Callable[..., Model]) -> None:
    nets = [tiny_model("splitnet", extra=extra) for extra in A_TO_E.values()]
    shapes = {tuple((name, shape) for name, (shape, _) in SMALL.upload_layout(net, {}, 9).items()) for net in nets}
    assert len(shapes) == 1
    assert len({tuple(net.shapes()) for net in nets}) == 5


def test_fedin_models_a_to_e_train_together(
    world: Callable[..., Any], tiny_model: Callable[..., Model], meddling: Callable[..., Any]
) -> None:
    nets = [(name, tiny_model("splitnet", extra=extra)) for name, extra in A_TO_E.items()]
    sim = world(models=nets, sizes=(8,) * 5, optimizer=Sgd(0.01))
    assert fleet_problem(SMALL, sim.fleet) is None
    engine = meddling(sim.engine(SMALL), list)
    server = sim.play(SMALL, engine)
    assert sim.refusals == []
    assert len(engine.delivered) == 10
    assert len(server["pairs"]["enter"]) == 5 * 4


def reply_of(sim: Any, index: int, tag: float, count: int) -> Reply:
    device = sim.fleet.devices(1)[index]
    layout = FedIN(pairs="all").upload_layout(device.model, {}, count)
    pairs = {name: torch.full(shape, tag, dtype=dtype) for name, (shape, dtype) in layout.items()}
    return Reply(device, count, {"pairs": pairs})


counts = st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=3), min_size=1, max_size=6)


@given(counts=counts, most=st.integers(1, 9), max_age=st.integers(1, 4))
def test_update_buffer_keeps_newest_pairs(counts: list[list[int]], most: int, max_age: int, world: Any) -> None:
    """Compared with a plain list of (round, device) pairs."""
    sim = world("splitnet")
    buffer, plain = empty_buffer(sim.fleet.global_model), list[tuple[int, float]]()
    for number, sizes in enumerate(counts, 1):
        tags = [number + index / 10 for index in range(len(sizes))]
        replies = [reply_of(sim, index, tag, sizes[index]) for index, tag in enumerate(tags)]
        buffer = update_buffer(buffer, replies, number, most, max_age)
        if sum(sizes) > most:
            sizes = [min(count, math.ceil(most / len(sizes))) for count in sizes]  # each is cut to its share
        plain = [one for one in plain if one[0] + max_age > number]
        plain = (plain + [(number, tag) for tag, count in zip(tags, sizes, strict=True) for _ in range(count)])[-most:]
        assert buffer["round"].tolist() == [one[0] for one in plain]
        for name in ("enter", "leave"):
            assert len(buffer[name]) <= most
            tagged = buffer[name].flatten(1)
            assert torch.equal(tagged, torch.tensor([one[1] for one in plain]).view(-1, 1).expand_as(tagged))


@given(held=st.integers(0, 9), count=st.integers(1, 12), seed=st.integers(0, 9))
def test_sample_pairs_draws_without_replacement(held: int, count: int, seed: int) -> None:
    numbers = torch.arange(float(held))
    buffer = {"enter": numbers.view(-1, 1), "leave": -numbers.view(-1, 1), "round": torch.ones(held)}
    made = sample_pairs(buffer, count, 1, np.random.default_rng(seed))
    assert ("pairs" in made) == (held > 0)
    assert sample_pairs(buffer, count, 2, np.random.default_rng(seed)) == {}  # all are too old
    if held:
        enter, leave = (made["pairs"][name].flatten().tolist() for name in ("enter", "leave"))
        assert len(enter) == len(set(enter)) == min(held, count)
        assert set(enter) <= set(numbers.tolist())
        assert leave == [-one for one in enter]


def test_fedin_pairs_are_sent_next_round_without_labels(
    sim: Any, scripted: Callable[..., Any], meddling: Callable[..., Any]
) -> None:
    """The first round sends no pairs; later all devices get the same sample of the uploads."""
    alone = sim.engine(SMALL)
    recorder = meddling(alone, list)
    server, boxes = SMALL.start(sim.fleet, 0), []
    for number in (1, 2, 3):
        asked = scripted(lambda device, inbox: None)
        SMALL.round(server, sim.context(asked, number))
        boxes.append(list(asked.asked[0][1].values()))
        server = SMALL.round(server, sim.context(recorder, number))
        alone.commit(number)
    assert all(box.keys() == {"weights"} for box in boxes[0])
    for number, dealt_out in enumerate(boxes[1:]):
        sent = [
            one for reply in recorder.delivered[4 * number : 4 * number + 4] for one in reply.upload["pairs"]["enter"]
        ]
        for box in dealt_out:
            assert box.keys() == {"weights", "pairs"}
            assert len(box["pairs"]["enter"]) == 6
            assert all(any(torch.equal(one, other) for other in sent) for one in box["pairs"]["enter"])
            assert torch.equal(box["pairs"]["enter"], dealt_out[0]["pairs"]["enter"])
    for reply in recorder.delivered:
        assert reply.upload.keys() == {"weights", "pairs"}
        assert reply.upload["pairs"].keys() == {"enter", "leave"}
        assert all(tensor.is_floating_point() for bundle in reply.upload.values() for tensor in bundle.values())


@pytest.mark.parametrize(("pairs", "sent"), [("all", list(SIZES)), (3, [3] * 4), (8, [8, 5, 8, 8])])
@pytest.mark.parametrize("last", ["keep", "drop", "wrap"])
def test_fedin_pairs_are_limited_by_examples(
    pairs: Any, sent: list[int], last: Any, sim: Any, meddling: Callable[..., Any]
) -> None:
    """Also where its plan skips some examples."""
    sim, method = replace(sim, schedule=Schedule(4, 1, last)), FedIN(pairs=pairs)
    engine = meddling(sim.engine(method), list)
    server = sim.play(method, engine, rounds=1)
    assert sim.refusals == []
    found = {reply.device.name: reply.upload["pairs"]["enter"] for reply in engine.delivered}
    assert [len(found[name]) for name in sorted(found)] == sent
    assert len(server["pairs"]["enter"]) == sum(sent)
    for own in found.values():
        assert len({tuple(one.flatten().tolist()) for one in own}) == len(own)


def test_collect_pairs_draws_anew_each_round(sim: Any, meddling: Callable[..., Any]) -> None:
    """On a device that does not learn, so that an example always has the same features."""
    method = FedIN(pairs=3)
    still = replace(sim, optimizer=Sgd(1e-30), dataset=sim.dataset)
    engine = meddling(still.engine(method, devices_per_block=1), list)
    still.play(method, engine, rounds=4)
    drawn = [reply.upload["pairs"]["enter"] for reply in engine.delivered if reply.device.name == "3"]
    assert any(not torch.allclose(one, other, atol=1e-3) for one, other in pairwise(drawn))


@pytest.mark.parametrize("middle", ["sum", "none"])
def test_fedin_without_pairs_trains_on_labels_only(
    middle: Any, sim: Any, world: Callable[..., Any], bits_equal: Callable[..., bool]
) -> None:
    """In the first round, and with middle = "none"."""
    sim, method = world("splitnet", sizes=(8, 8)), replace(SMALL, middle=middle)
    client = client_of(sim, method, 2)
    first = {name: one.expand(2, *one.shape) for name, one in client.model.initial_weights(0).items()}
    shared = {name: one for name, one in first.items() if not name.startswith("intermediate.")}
    memory = {"weights": {name: one for name, one in first.items() if name not in shared}}
    made = method.train.run(replace(client, state=memory), {"weights": shared})
    expected = fit(client, first, label_loss(client))
    assert made.state is not None
    assert made.upload["weights"].keys() == shared.keys()
    for name, weight in {**made.upload["weights"], **made.state["weights"]}.items():
        assert bits_equal(weight, expected[name])


def test_fedin_middle_none_uploads_no_pairs(sim: Any, meddling: Callable[..., Any]) -> None:
    method = replace(SMALL, middle="none")
    engine = meddling(sim.engine(method), list)
    server = sim.play(method, engine)
    assert {len(reply.upload["pairs"][name]) for reply in engine.delivered for name in ("enter", "leave")} == {0}
    assert len(server["pairs"]["round"]) == 0
    assert sim.refusals == []


def test_fedin_without_features_and_aggregation_is_standalone(sim: Any, parcels_equal: Callable[..., bool]) -> None:
    method = replace(SMALL, middle="none", aggregation=False)
    engines = sim.engine(method), sim.engine(Standalone())
    for one, engine in zip((method, Standalone()), engines, strict=True):
        sim.play(one, engine, rounds=3, participation=0.6)
    ours, theirs = (engine.client_states.committed for engine in engines)
    assert ours.keys() == theirs.keys()
    assert all(parcels_equal(ours[name], theirs[name]) for name in theirs)


def test_fedin_without_aggregation_still_shares_pairs(sim: Any, difference: Callable[..., float]) -> None:
    method = replace(SMALL, aggregation=False)
    engines = sim.engine(method), sim.engine(Standalone())
    server, _ = (sim.play(one, engine) for one, engine in zip((method, Standalone()), engines, strict=True))
    assert server["weights"] == {}
    assert len(server["pairs"]["enter"]) == 4 * 4
    assert difference(*(engine.client_states.committed["0"] for engine in engines)) > 1e-4


def test_fedin_without_features_is_lgfedavg(world: Callable[..., Any], difference: Callable[..., float]) -> None:
    """With equal sizes, as only the weighting differs."""
    sim = world("splitnet", sizes=(8, 8, 8))
    methods = replace(SMALL, middle="none"), LGFedAvg(("extractor", "classifier"))
    engines = [sim.engine(method) for method in methods]
    ours, theirs = (sim.play(method, engine) for method, engine in zip(methods, engines, strict=True))
    assert difference({"weights": ours["weights"]}, theirs) <= 1e-6
    device_states = [engine.client_states.committed for engine in engines]
    assert all(difference(device_states[0][name], device_states[1][name]) <= 1e-5 for name in "012")


def test_fedin_ends_are_averaged_uniformly(sim: Any, meddling: Callable[..., Any]) -> None:
    engine = meddling(sim.engine(SMALL), list)
    server = sim.play(SMALL, engine, rounds=1)
    assert server["weights"].keys() == set(sim.fleet.global_model.shapes()) - {
        name for name in sim.fleet.global_model.shapes() if name.startswith("intermediate.")
    }
    for name, weight in server["weights"].items():
        mean = torch.stack([reply.upload["weights"][name].double() for reply in engine.delivered]).mean(0)
        assert torch.allclose(weight.double(), mean, atol=1e-6)


@pytest.mark.usefixtures("double")
def test_fedin_sequential_makes_two_updates(world: Callable[..., Any], block_weights: Callable[..., Any]) -> None:
    """By hand over two steps with momentum and decay; each update has its own velocity."""
    sim = world("splitnet", optimizer=Sgd(0.01, momentum=0.9, weight_decay=0.01))
    client = client_of(sim, SMALL)
    weights, pairs = block_weights(client.model, 1), random_pairs(client)
    ends = {name: one for name, one in weights.items() if not name.startswith("intermediate.")}
    client = replace(client, state={"weights": {name: one for name, one in weights.items() if name not in ends}})
    made = replace(SMALL, middle="sequential").train.run(client, {"weights": ends, "pairs": pairs})
    expected = {name: one.clone() for name, one in weights.items()}
    losses = label_loss(client), features_loss(client, pairs)
    velocities = [{name: torch.zeros_like(one) for name, one in weights.items()} for _ in losses]
    assert len(client.plan) == 2
    for step in client.plan:
        for number, (loss, velocity) in enumerate(zip(losses, velocities, strict=True)):
            slope = gradient(loss, expected, client.batch(step))
            for name in [name for name in expected if number == 0 or name not in ends]:
                velocity[name] = 0.9 * velocity[name] + slope[name] + 0.01 * expected[name]
                expected[name] = expected[name] - 0.01 * velocity[name]
    assert made.state is not None
    for name, weight in {**made.upload["weights"], **made.state["weights"]}.items():
        assert torch.allclose(weight, expected[name], atol=1e-10)


@pytest.mark.parametrize("middle", ["sum", "project", "project_all", "sequential"])
def test_fedin_pairs_of_others_change_training(middle: Any, sim: Any, difference: Callable[..., float]) -> None:
    made = []
    for one in (middle, "none"):
        method = replace(SMALL, middle=one)
        engine = sim.engine(method)
        sim.play(method, engine)
        made.append(engine.client_states.committed["0"])
    assert sim.refusals == []
    assert difference(*made) > 1e-4


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [("convnet", {}, "needs nets with children named extractor, intermediate, classifier; convnet has others"),
     ("splitnet", {"channels": 2, "widest": 1.0}, "needs features of one shape; tier 'b' has")],
)  # fmt: skip
def test_fedin_models_with_other_parts_are_refused(
    family: str, changes: Any, message: str, world: Callable[..., Any], tiny_model: Callable[..., Model]
) -> None:
    sim = world(models=[("a", tiny_model(family)), ("b", tiny_model(family, **changes))])
    assert message in str(fleet_problem(SMALL, sim.fleet))


def test_fedin_unequal_feature_shapes_are_refused(world: Callable[..., Any], tiny_model: Callable[..., Model]) -> None:
    """Only one model pools in its classifier, so its intermediate layers return a map."""
    nets = [("a", tiny_model("splitnet")), ("b", tiny_model("splitnet", pool="classifier"))]
    assert "features of one shape" in str(fleet_problem(SMALL, world(models=nets).fleet))
    sim = world("splitnet", pool="classifier")
    server = sim.play(SMALL, sim.engine(SMALL))
    assert sim.refusals == []
    assert server["pairs"]["leave"].dim() == 4


def test_fedin_tied_intermediate_blocks_train(
    world: Callable[..., Any], tiny_model: Callable[..., Model], difference: Callable[..., float]
) -> None:
    nets = [(name, tiny_model("splitnet", extra=extra, tied=True)) for name, extra in (("a", (2, 3)), ("b", (1, 1)))]
    sim = world(models=nets, sizes=(8, 8, 8, 8), optimizer=Sgd(0.01))
    assert nets[0][1].shapes() == nets[1][1].shapes()
    assert fleet_problem(SMALL, sim.fleet) is None
    engine = sim.engine(SMALL)
    sim.play(SMALL, engine)
    assert sim.refusals == []
    for device in sim.fleet.devices(1):
        assert difference(SMALL.init_client(device, 0), engine.client_states.committed[device.name]) > 1e-4


def test_fedin_projected_update_does_not_oppose_labels(sim: Any) -> None:
    """The devices' gradients at a real step, by tensor and over all."""
    client = client_of(sim, SMALL)
    weights = {name: one[None] for name, one in client.model.initial_weights(0).items()}
    labels, features, _ = slopes(client, weights, random_pairs(client))
    middle = {name: labels[name] for name in labels if name.startswith("intermediate.")}
    other = {name: features[name] for name in middle}
    whole = FedIN(middle="project_all").combine_gradients(middle, other)
    assert float(inner(whole, middle)) >= -1e-6
    for name, step in FedIN(middle="project").combine_gradients(middle, other).items():
        assert float((step * middle[name]).sum()) >= -1e-6


class Plain(nn.Module):
    """A custom model whose intermediate layers may run more than once."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.extractor = nn.Sequential(nn.Flatten(), nn.Linear(36, 8))
        self.intermediate, self.classifier, self.times = nn.Linear(8, 8), nn.Linear(8, 4), times

    def forward(self, x: Tensor) -> Tensor:
        x = self.extractor(x)
        for _ in range(self.times):
            x = self.intermediate(x)
        made: Tensor = self.classifier(x)
        return made


def test_fedin_custom_model_needs_parts_that_run_once(world: Callable[..., Any]) -> None:
    once, twice = (
        world(models=[("a", build_model("plain", Plain, {"times": times}, (1, 6, 6), 4))]) for times in (1, 2)
    )
    assert fleet_problem(SMALL, once.fleet) is None
    assert once.play(SMALL, once.engine(SMALL))["pairs"]["enter"].shape == (12, 8)
    assert "fedin cannot split plain: intermediate cannot run on its own" in str(fleet_problem(SMALL, twice.fleet))
