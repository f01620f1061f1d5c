"""Methods that must agree where one is a special case of the other."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from fedloom.client import Schedule, Sgd
from fedloom.fleet import Fleet, Request, make_nested_tiers
from fedloom.methods import Method, fleet_problem
from fedloom.methods.centralized import Centralized
from fedloom.methods.decouple import Decouple
from fedloom.methods.ditto import Ditto
from fedloom.methods.efedsup import EFedSup
from fedloom.methods.fedavg import FedAvg
from fedloom.methods.fedhen import FedHeN
from fedloom.methods.fedin import FedIN
from fedloom.methods.fedprox import FedProx
from fedloom.methods.fedrolex import FedRolex
from fedloom.methods.fedsup import FedSup
from fedloom.methods.fjord import FjORD
from fedloom.methods.heterofl import HeteroFL
from fedloom.methods.lgfedavg import LGFedAvg
from fedloom.methods.noside import NoSide
from fedloom.methods.standalone import Standalone
from fedloom.models import Model

pytestmark = pytest.mark.slow

FULL_BATCH = Schedule(batch_size=1000, epochs=1)
SKEWED = [[0, 1], [1, 2], [2, 3, 0]]


def test_heterofl_all_devices_largest_is_fedavg(
    family: str, world: Callable[..., Any], parcels_equal: Callable[..., bool]
) -> None:
    """To the bit, round after round, with cohorts and unequal data."""
    sim = world(family, sizes=(8, 8, 5, 9, 12))
    methods = HeteroFL(), FedAvg(weighting="uniform")
    made = [sim.play(method, sim.engine(method), rounds=3, participation=0.6) for method in methods]
    assert parcels_equal(*made)


def test_heterofl_example_weighting_is_fedavg(
    family: str, world: Callable[..., Any], parcels_equal: Callable[..., bool]
) -> None:
    sim = world(family, sizes=(8, 8, 5, 9, 12))
    methods = HeteroFL(weighting="examples"), FedAvg()
    assert parcels_equal(*(sim.play(method, sim.engine(method)) for method in methods))


def test_weighting_equal_sizes_makes_no_difference(
    family: str, world: Callable[..., Any], difference: Callable[..., float]
) -> None:
    sim = world(family, sizes=(8, 8, 8))
    methods = FedAvg("uniform"), FedAvg("examples")
    assert difference(*(sim.play(method, sim.engine(method)) for method in methods)) <= 1e-6


def test_heterofl_absent_labels_differ_from_fedavg(
    world: Callable[..., Any], parcels_equal: Callable[..., bool]
) -> None:
    sim = world(sizes=(8, 8, 9), labels=SKEWED)
    methods = HeteroFL(), FedAvg("uniform")
    assert not parcels_equal(*(sim.play(method, sim.engine(method)) for method in methods))


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("normalization", ["none", "group"])
def test_fedavg_one_full_batch_is_centralized_step(
    family: str, normalization: str, world: Callable[..., Any], difference: Callable[..., float]
) -> None:
    """By hand, and by the centralized method; without batch norm, which would see other batches."""
    sim = world(
        family,
        sizes=(3, 8, 5),
        labels=SKEWED,
        normalization=normalization,
        schedule=FULL_BATCH,
        optimizer=Sgd(0.1, momentum=0.9, weight_decay=1e-2),
    )
    start = FedAvg().start(sim.fleet, 0)
    federated, centralized = (sim.play(method, sim.engine(method), rounds=1) for method in (FedAvg(), Centralized()))
    module, data = sim.fleet.global_model.module(), sim.dataset
    module.load_state_dict(dict(start["weights"]))
    F.cross_entropy(module(data.preparation(data.train.x)).logits, data.train.y).backward()
    for weight in module.parameters():  # torch would skip weight decay for a head without gradient
        weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
    torch.optim.SGD(module.parameters(), 0.1, momentum=0.9, weight_decay=1e-2).step()
    by_hand = {"weights": {name: weight.detach() for name, weight in module.named_parameters()}}
    assert difference(federated, by_hand) <= 1e-12
    assert difference(centralized, by_hand) <= 1e-12
    assert difference(federated, start) > 1e-4


@pytest.mark.usefixtures("double")
def test_centralized_on_one_device_is_fedavg(
    family: str, world: Callable[..., Any], difference: Callable[..., float]
) -> None:
    """In full batches, because the pooled device shuffles with its own stream."""
    sim = world(family, sizes=(8, 6, 5), schedule=replace(FULL_BATCH, epochs=3))
    alone = replace(sim, fleet=replace(sim.fleet, size=1), partition=first_of(sim.partition))
    gathered = sim.play(Centralized(data_share=1 / 3), sim.engine(Centralized()), rounds=3)
    single = alone.play(FedAvg(), alone.engine(FedAvg()), rounds=3)
    assert difference(gathered, single) <= 1e-10


def first_of(partition: Any) -> Any:
    return replace(partition, train=partition.train[:1], test=partition.test[:1])


def test_standalone_one_device_is_fedavg(
    family: str, world: Callable[..., Any], parcels_equal: Callable[..., bool]
) -> None:
    """To the bit: the mean over one device is its upload, and both start equal."""
    sim = world(family, sizes=(11,))
    engine = sim.engine(Standalone())
    sim.play(Standalone(), engine, rounds=3)
    server = sim.play(FedAvg(), sim.engine(FedAvg()), rounds=3)
    assert parcels_equal(engine.client_states.committed["0"], server)


def test_heterofl_one_device_is_standalone(
    family: str, world: Callable[..., Any], parcels_equal: Callable[..., bool]
) -> None:
    sim = world(family, sizes=(11,))
    engine = sim.engine(Standalone())
    sim.play(Standalone(), engine, rounds=2)
    assert parcels_equal(sim.play(HeteroFL(), sim.engine(HeteroFL())), engine.client_states.committed["0"])


UNEQUAL = (8, 8, 5, 9, 12)
SIMPLE: dict[str, dict[str, Any]] = {
    "columnnet": {"held": 1},
    "preactresnet": {"stages": 1},
    "unet": {"decoder": False},
}  # a model with one exit, where the family has two


@pytest.mark.parametrize("weighting", ["uniform", "examples"])
def test_fedrolex_all_devices_largest_is_fedavg(
    weighting: Any, family: str, world: Callable[..., Any], parcels_equal: Callable[..., bool]
) -> None:
    sim = world(family, sizes=UNEQUAL)
    methods = FedRolex(weighting), FedAvg(weighting)
    made = [sim.play(method, sim.engine(method), rounds=3, participation=0.6) for method in methods]
    assert parcels_equal(*made)


@pytest.mark.parametrize("method", [FedHeN(), NoSide(), NoSide("trained_only"), Decouple()], ids=repr)
def test_early_exit_methods_simple_devices_only_are_fedavg(
    method: Method, family: str, world: Callable[..., Any], parcels_equal: Callable[..., bool]
) -> None:
    sim = world(family, sizes=UNEQUAL, **SIMPLE.get(family, {}))
    made = sim.play(method, sim.engine(method), rounds=3, participation=0.6)
    fedavg = FedAvg("uniform")
    expected = sim.play(fedavg, sim.engine(fedavg), rounds=3, participation=0.6)
    assert parcels_equal({"weights": made["a" if isinstance(method, Decouple) else "weights"]}, expected)


@pytest.mark.parametrize("method", [FedHeN(), NoSide(), NoSide("trained_only"), Decouple()], ids=repr)
def test_early_exit_methods_empty_complex_tier_changes_nothing(
    method: Method, world: Callable[..., Any], tiny_model: Callable[..., Model], parcels_equal: Callable[..., bool]
) -> None:
    """The simple part equals FedAvg on simple devices alone; the rest keeps its initial weights."""
    sizes = [("simple", tiny_model("preactresnet", stages=1)), ("complex", tiny_model("preactresnet"))]
    sim = world(models=sizes, sizes=UNEQUAL, shares=(1.0, 0.0))
    alone = replace(sim, fleet=Fleet(make_nested_tiers(sizes[:1]), (1.0,), len(UNEQUAL), seed=0))
    first = sim.fleet.global_model.initial_weights(0)
    simple, whole = (tier.footprint for tier in sim.fleet.tiers)
    ours, theirs = method.start(sim.fleet, 0), FedAvg().start(alone.fleet, 0, simple.read(first))
    engines = sim.engine(method), alone.engine(FedAvg("uniform"))
    for number in (1, 2):
        ours = method.round(ours, sim.context(engines[0], number, 0.6))
        theirs = FedAvg("uniform").round(theirs, alone.context(engines[1], number, 0.6))
    found = [target_weights(method, ours, tier) for tier in sim.fleet.tiers]
    assert parcels_equal({"weights": found[0]}, theirs)
    assert all(torch.equal(found[1][name], first[name]) for name in whole.blocks.keys() - simple.blocks.keys())


def target_weights(method: Method, server: Any, tier: Any) -> Any:
    return method.eval_targets(server)["server"].weights(tier)  # type: ignore[union-attr, call-arg, arg-type]


def test_noside_complex_devices_only_is_fedavg_except_exit_head(
    world: Callable[..., Any], bits_equal: Callable[..., bool]
) -> None:
    """FedAvg applies weight decay to that head too."""
    sim = world("preactresnet", sizes=UNEQUAL, optimizer=Sgd(0.1, momentum=0.9, weight_decay=0.01, clip_norm=1.0))
    first = sim.fleet.global_model.initial_weights(0)
    ours, theirs = (
        sim.play(method, sim.engine(method), rounds=3)["weights"] for method in (NoSide(), FedAvg("uniform"))
    )
    for name, weight in ours.items():
        head = name.startswith("exit.")
        assert bits_equal(weight, theirs[name]) != (head and bool(first[name].any()))
        assert bits_equal(weight, first[name]) == head


@pytest.mark.parametrize("method", [FedSup(subnets=1), FedProx(0.0), EFedSup()], ids=repr)
def test_methods_with_one_size_are_fedavg_to_the_bit(
    method: Method, family: str, world: Callable[..., Any], parcels_equal: Callable[..., bool]
) -> None:
    sim = world(family, sizes=UNEQUAL)
    made = [sim.play(one, sim.engine(one), rounds=3, participation=0.6) for one in (method, FedAvg())]
    assert parcels_equal(*made)


@pytest.mark.parametrize(
    "method", [FedSup(subnets=1), EFedSup({"width": (1.0,)}, {"a": 1.0, "b": 1.0})], ids=["fedsup", "efedsup"]
)
def test_supernet_methods_largest_only_are_fedavg(
    method: Method, world: Callable[..., Any], parcels_equal: Callable[..., bool]
) -> None:
    """Also with other tiers: every device gets the whole supernet."""
    sim, alone = world(widths=(1.0, 0.5), sizes=UNEQUAL), world(sizes=UNEQUAL)
    made = sim.play(method, sim.engine(method, devices_per_block=1), rounds=3, participation=0.6)
    assert parcels_equal(
        made, alone.play(FedAvg(), alone.engine(FedAvg(), devices_per_block=1), rounds=3, participation=0.6)
    )


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("widths", [(), (1.0,)])
@pytest.mark.parametrize("distillation", [True, False])
def test_fjord_one_width_is_fedavg(
    widths: Any, distillation: bool, family: str, world: Callable[..., Any], difference: Callable[..., float]
) -> None:
    """A model that is its own teacher gets no gradient from distillation."""
    sim, method = world(family, sizes=UNEQUAL), FjORD(widths, distillation)
    if widths and family == "columnnet":
        assert "has no setting `width`" in str(fleet_problem(method, sim.fleet))
        return
    made, expected, start = (
        sim.play(method, sim.engine(method, devices_per_block=1), participation=0.6),
        sim.play(FedAvg(), sim.engine(FedAvg(), devices_per_block=1), participation=0.6),
        method.start(sim.fleet, 0),
    )
    assert difference(made, expected) <= 1e-12
    assert difference(start, expected) > 1e-3


def test_fjord_equal_examples_aggregates_as_heterofl(
    world: Callable[..., Any], scripted: Callable[..., Any], difference: Callable[..., float]
) -> None:
    sim = world(widths=(1.0, 0.5, 0.25), sizes=(8,) * 6)
    heterofl = HeteroFL(only_seen_rows=False)
    replies = list(sim.engine(heterofl).ask(Request(heterofl.train, inboxes_for(sim, heterofl), 1)))
    by_name = {reply.device.name: reply for reply in replies}
    engine = scripted(lambda device, inbox: replace(by_name[device.name], device=device))
    made = [method.round(heterofl.start(sim.fleet, 0), sim.context(engine)) for method in (FjORD(), heterofl)]
    assert difference(*made) <= 1e-7


def inboxes_for(sim: Any, method: Method) -> Any:
    start = method.start(sim.fleet, 0)["weights"]
    return {device: {"weights": device.footprint.read(start)} for device in sim.fleet.devices(1)}


def test_methods_sharing_nothing_are_standalone(
    family: str, world: Callable[..., Any], parcels_equal: Callable[..., bool]
) -> None:
    """To the bit: LG-FedAvg of no layer, FedIN without features and aggregation, Ditto without its proximal term."""
    sim = world(family, sizes=UNEQUAL)
    methods = LGFedAvg("none"), Ditto(0.0), FedIN(middle="none", aggregation=False)
    taken = [method for method in methods if fleet_problem(method, sim.fleet) is None]
    assert len(taken) == (3 if family == "splitnet" else 2)
    kept = []
    for method in (Standalone(), *taken):
        engine = sim.engine(method)
        sim.play(method, engine, rounds=3, participation=0.6)
        kept.append(dict(engine.client_states.committed))
    for device_states in kept[1:]:
        assert device_states.keys() == kept[0].keys()
        assert all(parcels_equal(device_states[name], parcel) for name, parcel in kept[0].items())


@pytest.mark.parametrize("method", [LGFedAvg("all"), Ditto(0.0), Ditto(3.0)], ids=repr)
def test_methods_sharing_everything_have_fedavg_server(
    method: Method, family: str, world: Callable[..., Any], parcels_equal: Callable[..., bool]
) -> None:
    """Regardless of what else their devices do."""
    sim = world(family, sizes=UNEQUAL, optimizer=Sgd(0.02))
    made = [sim.play(one, sim.engine(one), participation=0.6) for one in (method, FedAvg())]
    assert sim.refusals == []
    assert parcels_equal(*made)
