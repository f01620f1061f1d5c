"""FedAvg, standalone and centralized training: what they upload, keep and refuse."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from fedloom.fleet import DeviceModel, ServerModel
from fedloom.methods import fleet_problem
from fedloom.methods.centralized import Centralized
from fedloom.methods.fedavg import FedAvg
from fedloom.methods.lgfedavg import LGFedAvg
from fedloom.methods.standalone import Standalone


@pytest.mark.parametrize(("name", "method"), [("fedavg", FedAvg()), ("centralized", Centralized())])
def test_one_model_methods_several_tiers_are_refused(name: str, method: Any, world: Callable[..., Any]) -> None:
    assert fleet_problem(method, world().fleet) is None
    refusal = fleet_problem(method, world(widths=(1.0, 0.5)).fleet)
    assert refusal is not None
    assert name in refusal


def test_fedavg_two_names_for_same_model_are_accepted(world: Callable[..., Any]) -> None:
    assert fleet_problem(FedAvg(), world(widths=(1.0, 1.0)).fleet) is None


def test_standalone_redrawn_tiers_are_refused(world: Callable[..., Any]) -> None:
    fleet = world(widths=(1.0, 0.5)).fleet
    assert fleet_problem(Standalone(), fleet) is None
    refusal = fleet_problem(Standalone(), replace(fleet, assignment="redrawn"))
    assert refusal is not None
    assert 'fleet.assignment = "fixed"' in refusal


@pytest.mark.parametrize(("weighting", "shares"), [("examples", (4, 12)), ("uniform", (1, 1))])
def test_fedavg_weighting_follows_setting(
    weighting: Any, shares: tuple[int, int], world: Callable[..., Any], meddling: Callable[..., Any]
) -> None:
    """Compared with a loop over the replies, entry by entry."""
    sim, method = world(sizes=(4, 12)), FedAvg(weighting)
    engine = meddling(sim.engine(method), lambda replies: replies)
    made = method.round(method.start(sim.fleet, 0), sim.context(engine))["weights"]
    sent = {reply.device.name: reply.upload["weights"] for reply in engine.delivered}
    for name, tensor in made.items():
        first, second = (sent[device][name].double().flatten().tolist() for device in "01")
        for found, one, two in zip(tensor.flatten().tolist(), first, second, strict=True):
            expected = (shares[0] * one + shares[1] * two) / sum(shares)
            assert found == float(torch.tensor(expected, dtype=torch.float64).float())


def test_standalone_round_sends_nothing_and_keeps_model(world: Callable[..., Any]) -> None:
    sim, method = world(widths=(1.0, 0.5), sizes=(8, 8, 8, 8)), Standalone()
    engine = sim.engine(method)
    context = sim.context(engine)
    assert method.round({}, context) == {}
    engine.commit(1)
    assert (context.traffic.bytes_down, context.traffic.bytes_up) == (0, 0)
    for device in context.cohort:
        kept = engine.client_states.read(device)["weights"]
        assert {name: tensor.shape for name, tensor in kept.items()} == dict(device.model.shapes())
        first = method.init_client(device, 0)["weights"]
        assert any(not torch.equal(kept[name], tensor) for name, tensor in first.items())


def test_standalone_devices_are_independent(world: Callable[..., Any], parcels_equal: Callable[..., bool]) -> None:
    """Changing the data of one device changes nothing on the others."""
    sim, method = world(sizes=(8, 8, 8)), Standalone()
    x = sim.dataset.train.x.clone()
    x[torch.as_tensor(sim.partition.train[1])] += 50
    other = replace(sim, dataset=replace(sim.dataset, train=replace(sim.dataset.train, x=x)))
    kept = []
    for one in (sim, other):
        engine = one.engine(method, devices_per_block=1)
        one.play(method, engine)
        kept.append(engine.client_states.committed)
    assert [parcels_equal(kept[0][name], kept[1][name]) for name in "012"] == [True, False, True]


def test_standalone_evaluation_runs_on_devices() -> None:
    assert isinstance(Standalone().eval_targets({})["personal"], DeviceModel)
    assert "report_paper" not in Standalone().eval_targets({})


def mean_of_states(sim: Any, engine: Any, tier: str) -> dict[str, torch.Tensor]:
    kept = [engine.client_states.read(one)["weights"] for one in sim.fleet.devices(1) if one.tier == tier]
    return {name: torch.stack([one[name] for one in kept]).double().mean(0) for name in kept[0]}


@pytest.mark.parametrize("method", [Standalone(report=True), LGFedAvg(report=True)], ids=repr)
def test_report_evaluates_mean_of_all_devices_models(method: Any, world: Callable[..., Any]) -> None:
    """LG-FedAvg's code calls it Global. Devices that never took part count with what they started from."""
    sim = world(widths=(1.0, 0.5), sizes=(8, 5, 9, 12))
    engine = sim.engine(method)
    server = sim.play(method, engine, rounds=2, participation=0.5)
    target = method.eval_targets(server)["report_paper"]
    assert isinstance(target, ServerModel)
    for tier in sim.fleet.tiers:
        made, kept = target.weights(tier), mean_of_states(sim, engine, tier.name)
        assert made.keys() == tier.model.shapes().keys()
        for name, weight in made.items():
            wanted = kept[name] if name in kept else tier.footprint.only(name).read(server["weights"])[name]
            assert torch.allclose(weight.double(), wanted.double(), atol=1e-7), name


@pytest.mark.parametrize("method", [Standalone(), LGFedAvg()], ids=repr)
def test_report_changes_no_model(method: Any, world: Callable[..., Any], parcels_equal: Callable[..., bool]) -> None:
    sim, kept = world(sizes=(8, 5, 9)), []
    for one in (method, replace(method, report=True)):
        engine = sim.engine(one)
        sim.play(one, engine, rounds=2, participation=0.7)
        kept.append(engine.client_states.committed)
    assert kept[0].keys() == kept[1].keys()
    assert all(parcels_equal(kept[0][name], kept[1][name]) for name in kept[0])


@pytest.mark.parametrize(("share", "rows"), [(1.0, 20), (0.5, 9), (0.25, 4)])
def test_centralized_data_share_pools_first_devices(
    share: float, rows: int, world: Callable[..., Any], meddling: Any
) -> None:
    sim, method = world(sizes=(4, 5, 6, 5)), Centralized(data_share=share)
    engine = meddling(sim.engine(method), lambda replies: replies)
    sim.play(method, engine, rounds=1)
    assert [reply.examples for reply in engine.delivered] == [rows]


def test_centralized_cohort_does_not_matter(world: Callable[..., Any], parcels_equal: Callable[..., bool]) -> None:
    sim, method = world(sizes=(4, 5, 6, 5)), Centralized()
    made = [sim.play(method, sim.engine(method), participation=share) for share in (1.0, 0.25)]
    assert parcels_equal(*made)
