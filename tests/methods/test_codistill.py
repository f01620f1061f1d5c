"""Co-distillation: what it reduces to, which tiers cannot lose, which nets a device trains, and what they cost."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from fedloom.fleet import Fleet, ServerModel, make_tiers
from fedloom.methods import fleet_problem, training_macs
from fedloom.methods.codistill import CoDistill
from fedloom.methods.fedavg import FedAvg
from fedloom.models import Model, compute_cost
from fedloom.tensors import Parcel
from fedloom.testing import TinyWorld, tiny_model

SIZES = (8, 5, 9, 8, 12)


def three_widths() -> list[tuple[str, Model]]:
    widths = (("a", 1.0), ("b", 0.5), ("c", 0.25))
    return [(name, tiny_model("convnet", width=width, scaler=False)) for name, width in widths]


def foreign() -> list[tuple[str, Model]]:
    return [("a", tiny_model("preresnet", hidden=(6, 8))), ("b", tiny_model("convnet"))]


def net(server: Parcel, tier: str) -> Parcel:
    return {
        "weights": {n.removeprefix(f"{tier}:"): w for n, w in server["weights"].items() if n.startswith(f"{tier}:")}
    }


def played(method: Any, sim: TinyWorld, rounds: int = 3) -> Parcel:
    return sim.play(method, sim.engine(method), rounds=rounds)


def test_codistill_on_one_tier_is_fedavg(parcels_equal: Callable[..., bool]) -> None:
    sim = TinyWorld.make("convnet", sizes=SIZES)
    assert parcels_equal(net(played(CoDistill(), sim), "a"), played(FedAvg(), sim))


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("models", [three_widths, foreign])
def test_codistill_without_distillation_is_both_simple_alternatives(
    models: Callable[[], list[tuple[str, Model]]], difference: Callable[..., float]
) -> None:
    """But for rounding, which depends on the blocks in which devices train: the smallest net is what all devices make
    of it, and the largest what those make of it that can run it."""
    nets = models()
    sim, smallest = TinyWorld.make(models=nets, sizes=SIZES), nets[-1][0]
    found, taught = played(CoDistill(distillation=0.0), sim), played(CoDistill(warm_up=0), sim)
    small_for_all = played(FedAvg(), TinyWorld.make(models=nets[-1:], sizes=SIZES))
    assert difference(net(found, smallest), small_for_all) < 1e-12

    fedavg = FedAvg()
    server, engine = {"weights": nets[0][1].initial_weights(0)}, sim.engine(fedavg)
    for number in (1, 2, 3):
        context = sim.context(engine, number)
        server = fedavg.round(server, replace(context, cohort=[d for d in context.cohort if d.tier == "a"]))
    assert difference(net(found, "a"), server) < 1e-12
    assert difference(net(taught, smallest), small_for_all) < 1e-12  # the smallest learns from no other
    assert difference(net(taught, "a"), server) > 1e-4


def test_codistill_upload_has_the_nets_that_cost_no_more() -> None:
    sim, method = TinyWorld.make(models=three_widths(), sizes=SIZES), CoDistill()
    context = sim.context(sim.engine(method))
    server = method.start(sim.fleet, 0)
    for tier, expected in (("a", {"a", "b", "c"}), ("b", {"b", "c"}), ("c", {"c"})):
        (of_tier,) = [one for one in sim.fleet.tiers if one.name == tier]
        footprint = method.aggregation_footprint(of_tier, sim.fleet, 1)
        assert {name.partition(":")[0] for name in footprint.read(server["weights"])} == expected
    before = context.traffic.bytes_up
    method.round(server, context)
    entries = {name: sum(shape.numel() for shape in model.shapes().values()) for name, model in three_widths()}
    sent = {"a": sum(entries.values()), "b": entries["b"] + entries["c"], "c": entries["c"]}
    assert context.traffic.bytes_up - before == 4 * sum(sent[device.tier] for device in context.cohort)


def test_codistill_net_with_fewer_weights_but_more_work_is_not_trained() -> None:
    """A convolution has few weights and much work, a linear layer the opposite."""
    conv, linear = tiny_model("convnet"), tiny_model("mlp", hidden=(20, 10))
    costs = compute_cost(conv), compute_cost(linear)
    assert costs[0].parameters < costs[1].parameters and costs[0].macs > costs[1].macs
    models = {"a": conv, "b": linear}
    assert CoDistill().trained_beside(conv, models) == CoDistill().trained_beside(linear, models) == ()


def test_codistill_macs_are_those_of_all_nets_that_a_device_trains() -> None:
    models = dict(three_widths())
    macs = {tier: 3.0 * compute_cost(model).macs * 10 for tier, model in models.items()}
    found = {tier: training_macs(CoDistill(), model, models, 10, 2) for tier, model in models.items()}
    assert found == pytest.approx({"a": sum(macs.values()), "b": macs["b"] + macs["c"], "c": macs["c"]})


def test_codistill_tiers_with_one_model_share_it(parcels_equal: Callable[..., bool]) -> None:
    model = tiny_model("mlp")
    sim = TinyWorld.make(models=[("a", model), ("b", model)], sizes=SIZES)
    found = played(CoDistill(), sim)
    assert parcels_equal(net(found, "a,b"), played(FedAvg(), sim))
    target = CoDistill().eval_targets(found)["server"]
    assert isinstance(target, ServerModel)
    assert all(parcels_equal({"weights": target.weights(tier)}, net(found, "a,b")) for tier in sim.fleet.tiers)


def test_codistill_takes_fleets_of_any_architecture() -> None:
    fleet = Fleet(make_tiers(foreign()), (0.5, 0.5), 6, seed=0)
    assert fleet_problem(CoDistill(), fleet) is None
