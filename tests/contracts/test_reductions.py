"""Methods that must agree where one is a special case of the other."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from fedloom.methods.centralised import Centralised
from fedloom.methods.fedavg import FedAvg
from fedloom.methods.heterofl import HeteroFL
from fedloom.methods.standalone import Standalone
from fedloom.training import Schedule, Sgd

FULL_BATCH = Schedule(batch_size=1000, epochs=1)
SKEWED = [[0, 1], [1, 2], [2, 3, 0]]


def test_heterofl_with_everybody_at_the_top_is_fedavg(
    family: str, world: Callable[..., Any], parcels_equal: Callable[..., bool]
) -> None:
    """To the bit, round after round, with cohorts and unequal data."""
    place = world(family, sizes=(8, 8, 5, 9, 12))
    methods = HeteroFL(), FedAvg(weighting="uniform")
    made = [place.play(method, place.engine(method), rounds=3, participation=0.6) for method in methods]
    assert parcels_equal(*made)


def test_heterofl_weighted_by_examples_is_fedavg_weighted_by_examples(
    family: str, world: Callable[..., Any], parcels_equal: Callable[..., bool]
) -> None:
    place = world(family, sizes=(8, 8, 5, 9, 12))
    methods = HeteroFL(weighting="examples"), FedAvg()
    assert parcels_equal(*(place.play(method, place.engine(method)) for method in methods))


def test_equal_sizes_make_both_weightings_one(
    family: str, world: Callable[..., Any], difference: Callable[..., float]
) -> None:
    place = world(family, sizes=(8, 8, 8))
    methods = FedAvg("uniform"), FedAvg("examples")
    assert difference(*(place.play(method, place.engine(method)) for method in methods)) <= 1e-6


def test_absent_labels_are_what_tells_them_apart(world: Callable[..., Any], parcels_equal: Callable[..., bool]) -> None:
    place = world(sizes=(8, 8, 9), labels=SKEWED)
    methods = HeteroFL(), FedAvg("uniform")
    assert not parcels_equal(*(place.play(method, place.engine(method)) for method in methods))


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("normalisation", ["none", "group"])
def test_one_full_batch_of_everybody_is_one_centralised_step(
    family: str, normalisation: str, world: Callable[..., Any], difference: Callable[..., float]
) -> None:
    """Batch norm would see other batches, so without it. By hand, and by the centralised method."""
    place = world(
        family,
        sizes=(3, 8, 5),
        labels=SKEWED,
        normalisation=normalisation,
        schedule=FULL_BATCH,
        optimiser=Sgd(0.1, momentum=0.9, weight_decay=1e-2),
    )
    start = FedAvg().start(place.fleet, 0)
    federated, centralised = (
        place.play(method, place.engine(method), rounds=1) for method in (FedAvg(), Centralised())
    )
    module, data = place.fleet.whole.module(), place.dataset
    module.load_state_dict(dict(start["weights"]))
    F.cross_entropy(module(data.preparation(data.train.x)).logits, data.train.y).backward()
    for weight in module.parameters():  # torch would leave a head that no label reaches out of weight decay
        weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
    torch.optim.SGD(module.parameters(), 0.1, momentum=0.9, weight_decay=1e-2).step()
    by_hand = {"weights": {name: weight.detach() for name, weight in module.named_parameters()}}
    assert difference(federated, by_hand) <= 1e-12
    assert difference(centralised, by_hand) <= 1e-12
    assert difference(federated, start) > 1e-4


@pytest.mark.usefixtures("double")
def test_centralised_on_one_devices_data_is_that_devices_fedavg(
    family: str, world: Callable[..., Any], difference: Callable[..., float]
) -> None:
    """In full batches: the gathering machine shuffles under a name of its own."""
    place = world(family, sizes=(8, 6, 5), schedule=replace(FULL_BATCH, epochs=3))
    alone = replace(place, fleet=replace(place.fleet, size=1), partition=first_of(place.partition))
    gathered = place.play(Centralised(data_share=1 / 3), place.engine(Centralised()), rounds=3)
    single = alone.play(FedAvg(), alone.engine(FedAvg()), rounds=3)
    assert difference(gathered, single) <= 1e-10


def first_of(partition: Any) -> Any:
    return replace(partition, train=partition.train[:1], test=partition.test[:1])


def test_standalone_with_one_device_is_fedavg_with_one_device(
    family: str, world: Callable[..., Any], parcels_equal: Callable[..., bool]
) -> None:
    """To the bit: a mean over one is itself, and both start alike."""
    place = world(family, sizes=(11,))
    engine = place.engine(Standalone())
    place.play(Standalone(), engine, rounds=3)
    server = place.play(FedAvg(), place.engine(FedAvg()), rounds=3)
    assert parcels_equal(engine.memory.committed["0"], server)


def test_heterofl_with_one_device_of_one_tier_is_standalone(
    family: str, world: Callable[..., Any], parcels_equal: Callable[..., bool]
) -> None:
    place = world(family, sizes=(11,))
    engine = place.engine(Standalone())
    place.play(Standalone(), engine, rounds=2)
    assert parcels_equal(place.play(HeteroFL(), place.engine(HeteroFL())), engine.memory.committed["0"])
