"""Ditto, LG-FedAvg, Per-FedAvg and FedRep: personal models, also of held-out devices."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fedloom.client import Schedule, Sgd, gradient, label_loss, merge_plans
from fedloom.evaluation import FineTune, Row
from fedloom.fleet import DeviceModel, Request, draw_cohort
from fedloom.methods import Method, fleet_problem
from fedloom.methods.ditto import Ditto
from fedloom.methods.fedavg import FedAvg
from fedloom.methods.fedgkt import FedGKT
from fedloom.methods.fedin import FedIN
from fedloom.methods.fedrep import FedRep, take_epochs
from fedloom.methods.heterofl import HeteroFL
from fedloom.methods.lgfedavg import LGFedAvg
from fedloom.methods.perfedavg import PerFedAvg
from fedloom.methods.standalone import Standalone

pytestmark = pytest.mark.slow

SIZES = (8, 5, 9, 12)
ONE_BATCH = Schedule(batch_size=100)


def rows_of(sim: Any, method: Method, server: Any, engine: Any, **changes: Any) -> list[Row]:
    evaluator, last = sim.evaluator(**changes), "fine_tune" in changes
    made: list[Row] = evaluator.rows(
        method.eval_targets(server), sim.fleet, lambda task, boxes: engine.ask(Request(task, boxes, 9)), 9, True, last
    )
    return made


# Ditto


@pytest.mark.parametrize("hold", [0.0, 0.75, 20.0])
def test_ditto_global_model_is_fedavg_for_any_hold(
    hold: float, world: Callable[..., Any], parcels_equal: Callable[..., bool]
) -> None:
    sim = world(sizes=SIZES, optimizer=Sgd(0.05))
    made = [sim.play(one, sim.engine(one), rounds=3, participation=0.6) for one in (Ditto(hold), FedAvg())]
    assert parcels_equal(*made)


def test_ditto_large_hold_stays_near_global_model(world: Callable[..., Any], difference: Callable[..., float]) -> None:
    sim = world(sizes=(8, 8), schedule=Schedule(4, 4), optimizer=Sgd(0.05))
    apart = []
    for hold in (0.0, 1.0, 10.0):
        engine = sim.engine(Ditto(hold))
        sim.play(Ditto(hold), engine, rounds=1)
        start = Ditto(hold).start(sim.fleet, 0)
        apart.append(difference(engine.client_states.committed["0"], start))
    assert apart[0] > apart[1] > apart[2] > 0


def test_ditto_fedbabu_compat_averages_and_restarts_personal_models(
    world: Callable[..., Any], meddling: Callable[..., Any], parcels_equal: Callable[..., bool]
) -> None:
    """A device's state is what it uploaded, and has no effect on the next round."""
    sim, method = world(sizes=SIZES, optimizer=Sgd(0.05)), Ditto(fedbabu_compat=True)
    engine = sim.engine(method)
    recorder = meddling(engine, list)
    server = sim.play(method, recorder, rounds=1)
    for reply in recorder.delivered:
        assert parcels_equal(engine.client_states.committed[reply.device.name], reply.upload)
    forgetful = sim.engine(method)
    again = [method.round(server, sim.context(one, 2)) for one in (engine, forgetful)]
    assert parcels_equal(*again)


def test_ditto_fedbabu_compat_without_hold_is_fedavg(
    world: Callable[..., Any], parcels_equal: Callable[..., bool]
) -> None:
    sim = world(sizes=SIZES)
    methods = Ditto(0.0, fedbabu_compat=True), FedAvg()
    assert parcels_equal(*(sim.play(one, sim.engine(one), rounds=3, participation=0.6) for one in methods))
    held = Ditto(0.75, fedbabu_compat=True)
    assert not parcels_equal(*(sim.play(one, sim.engine(one)) for one in (held, FedAvg())))


# LG-FedAvg


def test_lgfedavg_sharing_all_is_fedavg(
    family: str, world: Callable[..., Any], parcels_equal: Callable[..., bool]
) -> None:
    """All devices are evaluated with the same weights, also those that did not take part."""
    sim, method = world(family, sizes=SIZES), LGFedAvg("all")
    engine = sim.engine(method)
    server = sim.play(method, engine, rounds=3, participation=0.6)
    assert parcels_equal(server, sim.play(FedAvg(), sim.engine(FedAvg()), rounds=3, participation=0.6))
    for device in sim.fleet.devices(1):
        assert parcels_equal(method.inbox(server, device), server)
        assert engine.client_states.read(device)["weights"] == {}


@pytest.mark.parametrize("shared", ["head", "body", ("blocks",), ("classifier.bias",)])
def test_lgfedavg_round_uploads_shared_and_keeps_other_layers(
    shared: Any, world: Callable[..., Any], meddling: Callable[..., Any]
) -> None:
    sim, method = world(sizes=SIZES), LGFedAvg(shared)
    assert fleet_problem(method, sim.fleet) is None
    engine = sim.engine(method)
    recorder = meddling(engine, list)
    server = sim.play(method, recorder, rounds=2)
    names = set(sim.fleet.global_model.shapes())
    for reply in recorder.delivered:
        sent, kept = set(reply.upload["weights"]), set(engine.client_states.committed[reply.device.name]["weights"])
        assert sent == set(server["weights"])
        assert (sent | kept, sent & kept) == (names, set())
        assert sent and kept


def test_lgfedavg_unknown_layer_is_refused(world: Callable[..., Any]) -> None:
    """Also if other names are right, or a typo would silently keep a layer private."""
    fleet = world("splitnet").fleet
    assert fleet_problem(LGFedAvg(("extractor", "classifier")), fleet) is None
    assert fleet_problem(LGFedAvg(("extractor", "clasifier")), fleet) == "no layer of splitnet is named 'clasifier'"
    assert fleet_problem(LGFedAvg(("extract",)), fleet) == "no layer of splitnet is named 'extract'"


# Per-FedAvg


def test_perfedavg_zero_adaptation_rate_is_fedavg(
    family: str, world: Callable[..., Any], parcels_equal: Callable[..., bool]
) -> None:
    """With one batch a round."""
    sim, method = world(family, sizes=SIZES, schedule=ONE_BATCH), PerFedAvg(0.0)
    made = [sim.play(one, sim.engine(one), rounds=3, participation=0.6) for one in (method, FedAvg())]
    assert parcels_equal(*made)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("last", ["keep", "wrap", "drop"])
@pytest.mark.parametrize("rate", [None, 0.0, 0.3])
def test_perfedavg_step_matches_manual_computation(
    rate: float | None, last: Any, world: Callable[..., Any], meddling: Callable[..., Any]
) -> None:
    """Devices of one to four batches in one block: in pairs, and an odd batch with itself."""
    sim = world(
        sizes=(8, 5, 11, 16, 4),
        schedule=Schedule(4, 1, last),
        optimizer=Sgd(0.1, momentum=0.9, weight_decay=1e-2),
        normalization="group",
    )
    method = PerFedAvg(rate)
    engine = sim.engine(method)
    recorder = meddling(engine, list)
    method.round(method.start(sim.fleet, 0), sim.context(recorder))
    assert len(recorder.delivered) == 5
    for reply in recorder.delivered:
        plan = engine.plan(Request(method.train, {}, 1), reply.device)
        expected = perfedavg_by_hand(sim, plan.rows.split(plan.sizes), 0.1 if rate is None else rate)
        for name, weight in reply.upload["weights"].items():
            assert torch.allclose(weight, expected[name], atol=1e-10)


def perfedavg_by_hand(sim: Any, batches: Any, rate: float) -> dict[str, Tensor]:
    module = sim.fleet.global_model.module()
    module.load_state_dict(sim.fleet.global_model.initial_weights(0))
    weights = list(module.parameters())
    optimizer = torch.optim.SGD(weights, 0.1, momentum=0.9, weight_decay=1e-2)

    def slope(rows: Tensor) -> Any:
        logits = module(sim.dataset.preparation(sim.dataset.train.x[rows])).logits
        return torch.autograd.grad(F.cross_entropy(logits, sim.dataset.train.y[rows]), weights)

    for start in range(0, len(batches), 2):
        first, second = batches[start], batches[min(start + 1, len(batches) - 1)]
        before, ahead = [weight.detach().clone() for weight in weights], slope(first)
        with torch.no_grad():
            for weight, step in zip(weights, ahead, strict=True):
                weight -= rate * step
        there = slope(second)
        with torch.no_grad():
            for weight, old, step in zip(weights, before, there, strict=True):
                weight.copy_(old)
                weight.grad = step
        optimizer.step()
    return {name: weight.detach() for name, weight in module.named_parameters()}


def test_perfedavg_is_evaluated_after_one_local_step(world: Callable[..., Any], client_for: Callable[..., Any]) -> None:
    sim, method = world(sizes=(8, 8), schedule=ONE_BATCH), PerFedAvg(0.2)
    engine, devices = sim.engine(method), sim.fleet.devices(1)
    plan = merge_plans([engine.plan(Request(method.train, {}, 1), device) for device in devices])
    client = client_for(sim.fleet.global_model, sim.dataset.train, plan, preparation=sim.dataset.preparation)
    weights = {name: one.expand(2, *one.shape) for name, one in method.start(sim.fleet, 0)["weights"].items()}
    _, adapted = method.personal_model(client, {"weights": weights})
    slope = gradient(label_loss(client), weights, client.batch(plan[0]))
    for name, weight in adapted.items():
        assert torch.allclose(weight, weights[name] - 0.2 * slope[name], atol=1e-6)
        assert not torch.equal(weight[0], weight[1])


# FedRep


def test_fedrep_server_has_only_body(
    world: Callable[..., Any], scripted: Callable[..., Any], parcels_equal: Callable[..., bool]
) -> None:
    sim, method = world(sizes=SIZES), FedRep()
    engine = sim.engine(method)
    server = sim.play(method, engine)
    head = set(sim.fleet.global_model.label_rows())
    assert head
    assert set(server["weights"]) == set(sim.fleet.global_model.shapes()) - head
    asked = scripted(lambda device, inbox: None)
    method.round(server, sim.context(asked, 3))
    (_, boxes), *_ = asked.asked
    assert len(boxes) == 4
    assert all(parcels_equal(box, {"weights": server["weights"]}) for box in boxes.values())
    heads = [engine.client_states.committed[name]["weights"] for name in "0123"]
    assert all(set(one) == head for one in heads)
    assert len({tuple(one["classifier.bias"].tolist()) for one in heads}) == 4


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("body_epochs", [1, 2, 5])
def test_fedrep_trains_head_then_body(
    body_epochs: int, world: Callable[..., Any], meddling: Callable[..., Any]
) -> None:
    """By hand over three epochs of heads, with decay and momentum."""
    sim = world(sizes=SIZES, schedule=Schedule(4, 3), optimizer=Sgd(0.1, momentum=0.9, weight_decay=1e-2))
    method = FedRep(body_epochs)
    engine = sim.engine(method)
    recorder = meddling(engine, list)
    method.round(method.start(sim.fleet, 0), sim.context(recorder))
    engine.commit(1)
    head = set(sim.fleet.global_model.label_rows())
    for reply in recorder.delivered:
        plan = engine.plan(Request(method.train, {}, 1), reply.device)
        batches = plan.rows.split(plan.sizes)
        epoch = len(batches) // 3
        later = [batches[n % len(batches)] for n in range(body_epochs * epoch)]
        module = sim.fleet.global_model.module().train()
        module.load_state_dict(sim.fleet.global_model.initial_weights(0), strict=False)
        named = dict(module.named_parameters())
        for names, seen in ((head, batches), (set(named) - head, later)):
            optimizer = torch.optim.SGD([named[name] for name in sorted(names)], 0.1, momentum=0.9, weight_decay=1e-2)
            for rows in seen:
                optimizer.zero_grad()
                logits = module(sim.dataset.preparation(sim.dataset.train.x[rows])).logits
                F.cross_entropy(logits, sim.dataset.train.y[rows]).backward()
                optimizer.step()
        made = {**reply.upload["weights"], **engine.client_states.committed[reply.device.name]["weights"]}
        assert made.keys() == named.keys()
        for name, weight in made.items():
            assert torch.allclose(weight, named[name].detach(), atol=1e-9)


@pytest.mark.usefixtures("double")
def test_fedrep_blocks_of_unequal_devices_give_same_body(
    world: Callable[..., Any], difference: Callable[..., float]
) -> None:
    sim = world(sizes=(8, 5, 12, 3), schedule=Schedule(4, 2, "wrap"))
    method = FedRep(body_epochs=3)
    engines = [sim.engine(method, devices_per_block=block) for block in (1, 16)]
    assert difference(*(sim.play(method, engine) for engine in engines)) <= 1e-10
    for name in "0123":
        assert difference(*(engine.client_states.committed[name] for engine in engines)) <= 1e-10


def test_fedrep_last_heads_train_every_device_and_keep_body(
    world: Callable[..., Any], parcels_equal: Callable[..., bool]
) -> None:
    sim, method = with_holdout(world(sizes=SIZES)), FedRep()
    engine = sim.engine(method)
    server = sim.play(method, engine)
    before = {name: dict(parcel) for name, parcel in engine.client_states.committed.items()}
    assert set(before) == {"0", "2"}
    assert parcels_equal(method.finish(server, sim.context(engine, 3)), server)
    engine.commit(3)
    assert set(engine.client_states.committed) == set("0123")
    first = method.init_client(sim.fleet.device(1, 1), 0)
    for name, parcel in engine.client_states.committed.items():
        assert parcel["weights"].keys() == set(sim.fleet.global_model.label_rows())
        assert not parcels_equal(parcel, before.get(name, first))
    assert FedRep(last_heads=False).finish(server, sim.context(engine, 3)) is None


def test_fedrep_last_heads_skip_inactive_tiers(world: Callable[..., Any]) -> None:
    sim, method = world(widths=(1.0, 0.5), sizes=SIZES), FedRep()
    sim = replace(sim, fleet=sim.fleet.restrict_tiers(["b"]))
    engine = sim.engine(method)
    server = sim.play(method, engine)
    method.finish(server, sim.context(engine, 3))
    engine.commit(3)
    assert set(engine.client_states.committed) == {"2", "3"}


def test_fedrep_last_head_lowers_loss(world: Callable[..., Any]) -> None:
    sim = world(sizes=(12, 12, 12), schedule=Schedule(4, 10), optimizer=Sgd(0.1), labels=[[0, 1], [1, 2], [2, 3]])
    sim, method = replace(sim, fleet=replace(sim.fleet, holdout_devices=frozenset({2}))), FedRep()
    engine = sim.engine(method)
    server = sim.play(method, engine, rounds=3)
    before = rows_of(sim, method, server, engine)
    method.finish(server, sim.context(engine, 4))
    engine.commit(4)
    after = rows_of(sim, method, server, engine)
    shares = [value_of(rows, "unseen", "2") for rows in (before, after)]
    assert shares[1] > shares[0]


def test_take_epochs_activates_only_devices_of_epoch(world: Callable[..., Any]) -> None:
    """Devices with two and three steps per epoch run their first epochs together."""
    sim, method = world(sizes=(5, 12), schedule=Schedule(4, 2, "wrap")), FedRep()
    engine = sim.engine(method)
    plan = merge_plans([engine.plan(Request(method.train, {}, 1), device) for device in sim.fleet.devices(1)])
    assert [step.active.tolist() for step in take_epochs(plan, 1)] == [[1, 1], [1, 1], [0, 1]]


# all of them, and held-out devices


def with_holdout(sim: Any, *indices: int) -> Any:
    return replace(sim, fleet=replace(sim.fleet, holdout_devices=frozenset(indices or {1, 3})))


def value_of(rows: list[Row], test: str, device: str, metric: str = "accuracy") -> float:
    (value,) = (row.value for row in rows if (row.test, row.device, row.metric) == (test, device, metric))
    return value


def test_personalized_methods_evaluate_every_device(method: Method, world_for: Callable[..., Any]) -> None:
    sim = world_for(method, None, sizes=SIZES, labels=[[0, 1], [1, 2], [2, 3], [0, 3]])
    engine = sim.engine(method)
    rows = rows_of(sim, method, sim.play(method, engine), engine)
    own = {row.device: row.value for row in rows if (row.test, row.metric) == ("local", "accuracy") and row.device}
    assert set(own) == set("0123")
    assert all(0 <= value <= 100 for value in own.values())
    assert sim.refusals == []


OWN = [Standalone(), Ditto(), LGFedAvg(), FedRep(), FedIN(pairs=4, batch=6)]


@pytest.mark.parametrize("method", OWN, ids=lambda method: type(method).__name__)
def test_personal_model_combines_state_and_inbox(method: Method, world: Callable[..., Any]) -> None:
    sim = world("splitnet", sizes=SIZES, test_sizes=(9, 6, 11, 7), normalization="group", optimizer=Sgd(0.02))
    engine = sim.engine(method)
    server = sim.play(method, engine)
    candidate = method.eval_targets(server)["personal"]
    assert isinstance(candidate, DeviceModel)
    rows = [row for row in rows_of(sim, method, server, engine) if row.candidate == "personal"]
    data = sim.dataset
    for device, own in zip(sim.fleet.devices(1), sim.partition.test, strict=True):
        held = {**engine.client_states.committed[device.name]["weights"], **candidate.inbox(device).get("weights", {})}
        assert held.keys() == device.model.shapes().keys()
        block = {name: weight[None] for name, weight in held.items()}
        right = device.model(block, data.preparation(data.test.x)[None]).logits[0].argmax(-1) == data.test.y
        assert value_of(rows, "global", device.name) == pytest.approx(100 * float(right.double().mean()))
        assert value_of(rows, "local", device.name) == pytest.approx(100 * float(right[own].double().mean()))


@pytest.mark.parametrize("participation", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("assignment", ["fixed", "redrawn"])
def test_holdout_devices_are_in_no_cohort(participation: float, assignment: Any, world: Callable[..., Any]) -> None:
    fleet = with_holdout(world(widths=(1.0, 0.5), sizes=(4,) * 10), 0, 4, 9).fleet
    fleet, met = replace(fleet, assignment=assignment), set()
    for number in range(1, 40):
        cohort = draw_cohort(fleet, participation, number)
        assert len(cohort) == math.ceil(participation * 7)
        met |= {device.name for device in cohort}
        assert {device.name for device in fleet.eligible_devices(number)} == set("1235678")
        assert len(fleet.devices(number)) == 10
    assert met == set("1235678")


def test_holdout_devices_share_active_tiers(world: Callable[..., Any]) -> None:
    fleet = with_holdout(world(widths=(1.0, 0.5), sizes=SIZES), 3).fleet.restrict_tiers(["b"])
    assert [device.name for device in fleet.eligible_devices(1)] == ["2"]
    assert [device.name for device in draw_cohort(fleet, 1.0, 1)] == ["2"]


@pytest.mark.parametrize("method", [HeteroFL(), FedRep(), Standalone(), Ditto(), LGFedAvg(), PerFedAvg()], ids=repr)
def test_holdout_devices_are_evaluated_separately(method: Method, world: Callable[..., Any]) -> None:
    sim = with_holdout(world(sizes=SIZES))
    engine = sim.engine(method)
    server = sim.play(method, engine)
    if (last := method.finish(server, sim.context(engine, 3))) is not None:
        server = last
        engine.commit(3)
    rows = [row for row in rows_of(sim, method, server, engine) if row.metric == "accuracy"]
    for name in method.eval_targets(server):
        found = {test: {row.device for row in rows if (row.candidate, row.test) == (name, test)} for test in TESTS}
        assert found["local"] == {"", "0", "2"}
        assert found["unseen"] == {"", "1", "3"}
        for test in TESTS:
            mine = [row for row in rows if (row.candidate, row.test) == (name, test)]
            total = {device: len(sim.partition.test[int(device)]) for device in found[test] - {""}}
            mean = sum(value_of(mine, test, device) * count for device, count in total.items()) / sum(total.values())
            assert value_of(mine, test, "") == pytest.approx(mean)


TESTS = ("local", "unseen")


def test_holdout_without_devices_adds_no_rows(world: Callable[..., Any]) -> None:
    sim, method = world(sizes=SIZES), HeteroFL()
    engine = sim.engine(method)
    rows = rows_of(sim, method, sim.play(method, engine), engine, fine_tune=FineTune(epochs=1))
    assert {row.test for row in rows} == {"global", "local"}


def test_holdout_devices_do_not_influence_training(
    world: Callable[..., Any], parcels_equal: Callable[..., bool]
) -> None:
    """Changing their data changes nothing."""
    sim = with_holdout(world("splitnet", sizes=SIZES))
    x = sim.dataset.train.x.clone()
    x[torch.as_tensor(sim.partition.train[1])] += 50
    other = replace(sim, dataset=replace(sim.dataset, train=replace(sim.dataset.train, x=x)))
    for method in (HeteroFL(), FedRep(), FedIN(pairs=4, batch=6), FedGKT(server_planes=(2,), server_blocks=(1,))):
        assert parcels_equal(*(one.play(method, one.engine(method)) for one in (sim, other)))


def test_holdout_devices_are_fine_tuned_too(world: Callable[..., Any]) -> None:
    sim, method = with_holdout(world(widths=(1.0, 0.5), sizes=SIZES)), HeteroFL()
    engine = sim.engine(method)
    tune = FineTune("all", epochs=3, batch_size=4, lr=0.1)
    rows = rows_of(sim, method, sim.play(method, engine), engine, fine_tune=tune)
    for tier in ("a", "b"):
        for metric in ("initial", "personalized"):
            found = [row for row in rows if (row.tier, row.metric) == (tier, metric)]
            assert {row.device for row in found if row.test == "local"} == {"", "0", "2"}
            assert {row.device for row in found if row.test == "unseen"} == {"", "1", "3"}
            each = [row.value for row in found if row.test == "unseen" and row.device]
            assert value_of(found, "unseen", "", metric) == pytest.approx(sum(each) / 2)
