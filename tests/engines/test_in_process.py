"""The simulating engine: what a task gets to see, and how devices share blocks."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fedloom.client import Client, ClientResult, Milestones, Schedule, Task, like
from fedloom.engines import build_client_data, devices_at_once
from fedloom.fleet import Device, Reply, Request
from fedloom.methods.fedavg import FedAvg
from fedloom.methods.heterofl import HeteroFL
from fedloom.models import MODELS, build_model
from fedloom.tensors import Parcel


def watching(seen: list[Client]) -> Task:
    """Sends back what it was given, and shows what it saw."""

    def run(client: Client, inbox: Parcel) -> ClientResult:
        seen.append(client)
        return ClientResult(upload={"weights": inbox["weights"]})

    return Task("watch", run, {"weights": like("weights")})


def inboxes(place: Any, devices: list[Device] | None = None) -> Mapping[Device, Parcel]:
    weights = place.fleet.global_model.initial_weights(0)
    return {one: {"weights": one.footprint.read(weights)} for one in devices or place.fleet.devices(1)}


def ask(place: Any, task: Task, devices: list[Device] | None = None, **changes: Any) -> list[Reply]:
    return list(place.engine(FedAvg(), **changes).ask(Request(task, inboxes(place, devices), 1)))


@pytest.mark.parametrize(
    ("last", "block", "expected"),
    [
        ("keep", 16, [5]),
        ("wrap", 16, [5]),
        ("drop", 16, [5]),
        ("wrap", 2, [2, 2, 2]),
        ("keep", 1, [1, 1, 1, 1, 1]),
    ],
)
def test_make_blocks_equal_first_batches_share_a_block(
    world: Callable[..., Any], last: Any, block: int, expected: list[int]
) -> None:
    place = world(sizes=(8, 5, 9, 8, 5), schedule=Schedule(4, 1, last))
    seen: list[Client] = []
    replies = ask(place, watching(seen), devices_per_block=block)
    assert sorted(len(client.seen_labels) for client in seen) == expected
    assert sorted(reply.device.name for reply in replies) == ["0", "1", "2", "3", "4"]


@pytest.mark.parametrize("sizes", [(8, 8), (8, 9)], ids=["equal data", "unequal data"])
def test_engine_larger_request_changes_no_bits(sizes: tuple[int, ...], world: Callable[..., Any]) -> None:
    """In single precision too: a lone device runs the same kernels as in company, whatever the others' data."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        place = world(sizes=(*sizes, 8), schedule=Schedule(4), hidden=(16, 32))  # wide enough to be block-invariant
        first = {d: {"weights": place.fleet.global_model.initial_weights(0)} for d in place.fleet.devices(1)[:1]}
        both = {d: {"weights": place.fleet.global_model.initial_weights(0)} for d in place.fleet.devices(1)[:2]}
        alone, company = (
            list(place.engine(FedAvg()).ask(Request(FedAvg().train, inboxes, 1))) for inboxes in (first, both)
        )
    finally:
        torch.set_default_dtype(before)
    own = {reply.device.name: reply.upload["weights"] for reply in company}["0"]
    assert all(torch.equal(tensor, own[name]) for name, tensor in alone[0].upload["weights"].items())


@pytest.mark.parametrize(("width", "at_once"), [(1.0, 1), (0.5, 4), (0.25, 8), (0.125, 8), (0.0625, 8)])
def test_devices_at_once_depends_on_model_only(width: float, at_once: int) -> None:
    assert devices_at_once(build_model("convnet", MODELS["convnet"], {"width": width}, (1, 28, 28), 10)) == at_once


@pytest.mark.parametrize(("kernels", "units", "at_once"), [("lanes", 512, 1), ("lanes", 32, 8), ("torch", 512, 8)])
def test_devices_at_once_large_linear_layers_run_alone_in_lanes(kernels: Any, units: int, at_once: int) -> None:
    """Elsewhere the size of blocks decides which kernels run, and so the bits."""
    pytest.importorskip("numba")
    net = build_model("lenet", MODELS["lenet"], {"convs": (8, 16), "hidden": (units, units)}, (1, 28, 28), 10)
    assert devices_at_once(replace(net, kernels=kernels)) == at_once


def test_devices_per_block_can_differ_per_tier(world: Callable[..., Any]) -> None:
    place = world(widths=(1.0, 0.5), sizes=(8,) * 8)
    seen: list[Client] = []
    ask(place, watching(seen), devices_per_block={place.fleet.tiers[0].name: 1})
    assert sorted(len(client.seen_labels) for client in seen) == [1, 1, 1, 1, 4]


def test_make_blocks_tiers_are_kept_apart(world: Callable[..., Any]) -> None:
    place = world(widths=(1.0, 0.5), sizes=(8,) * 6)
    seen: list[Client] = []
    ask(place, watching(seen))
    assert sorted(len(client.seen_labels) for client in seen) == [3, 3]
    assert len({client.model for client in seen}) == 2


def test_make_blocks_tiers_of_one_model_share_a_block(world: Callable[..., Any]) -> None:
    place = world(widths=(1.0, 0.5), sizes=(8,) * 6)
    seen: list[Client] = []
    largest = place.fleet.global_model
    devices = [device.with_model(largest, largest) for device in place.fleet.devices(1)]
    replies = ask(place, watching(seen), devices)
    assert [len(client.seen_labels) for client in seen] == [6]
    assert {reply.device.tier for reply in replies} == {tier.name for tier in place.fleet.tiers}


def test_make_blocks_tiers_of_one_model_keep_their_own_block_sizes(world: Callable[..., Any]) -> None:
    place = world(widths=(1.0, 0.5), sizes=(8,) * 6)
    seen: list[Client] = []
    largest, (first, second) = place.fleet.global_model, [tier.name for tier in place.fleet.tiers]
    devices = [device.with_model(largest, largest) for device in place.fleet.devices(1)]
    ask(place, watching(seen), devices, devices_per_block={first: 3, second: 2})
    assert sorted(len(client.seen_labels) for client in seen) == [2, 2, 3]


def test_make_blocks_longest_plans_come_first(world: Callable[..., Any]) -> None:
    """A device that has finished still costs its computation."""
    place = world(sizes=(4, 40, 8, 36), schedule=Schedule(4, 1, "wrap"))
    seen: list[Client] = []
    ask(place, watching(seen), devices_per_block=2)
    assert [len(client.plan) for client in seen] == [10, 2]


def test_make_blocks_any_order_of_devices_is_equal(world: Callable[..., Any]) -> None:
    place = world(sizes=(8, 4, 12, 8), schedule=Schedule(4, 1, "wrap"))
    found = []
    for devices in (place.fleet.devices(1), place.fleet.devices(1)[::-1]):
        seen: list[Client] = []
        ask(place, watching(seen), devices, devices_per_block=2)
        found.append([[step.rows.tolist() for step in client.plan] for client in seen])
    assert found[0] == found[1]


def test_client_sees_only_its_own_examples(world: Callable[..., Any]) -> None:
    labels = [[0, 1], [2], [1, 3]]
    place = world(sizes=(8, 4, 6), labels=labels)
    seen: list[Client] = []
    replies = ask(place, watching(seen), devices_per_block=1)
    for client, reply in zip(seen, replies, strict=True):
        number = int(reply.device.name)
        rows = {row for step in client.plan for row in step.rows.flatten().tolist()}
        assert rows == set(place.partition.train[number].tolist())
        assert client.seen_labels.tolist() == [[label in labels[number] for label in range(4)]]
        assert reply.examples == len(place.partition.train[number])
        assert client.test_indices.rows[client.test_indices.real].tolist() == place.partition.test[number].tolist()


def test_client_test_indices_are_padded(world: Callable[..., Any]) -> None:
    place = world(sizes=(4, 4), test_sizes=(3, 1))
    seen: list[Client] = []
    ask(place, watching(seen))
    (client,) = seen
    assert client.test_indices.rows.tolist() == [[0, 1, 2], [3, 3, 3]]
    assert client.test_indices.real.tolist() == [[True, True, True], [True, False, False]]


def test_pooled_device_holds_data_of_its_devices(world: Callable[..., Any]) -> None:
    place = world(sizes=(3, 5, 4), labels=[[0], [1, 2], [3]])
    held = build_client_data(place.dataset, place.partition, place.fleet)
    pool = place.fleet.pooled_device(place.fleet.largest, 0.67)
    assert held.rows(pool).tolist() == list(range(8))
    assert held.seen_labels(pool).tolist() == [True, True, True, False]


def batches(place: Any, number: int = 1, repeat: int = 0, stream: str = "watch", seed: int = 0) -> list[Any]:
    seen: list[Client] = []
    engine = place.engine(FedAvg(), seed=seed)
    list(engine.ask(Request(replace(watching(seen), stream=stream), inboxes(place), number, repeat)))
    return [[step.rows.tolist() for step in client.plan] for client in seen]


def test_plan_depends_on_seed_round_stream_and_repeat(world: Callable[..., Any]) -> None:
    place = world(sizes=(12, 12))
    first = batches(place)
    assert batches(place) == first
    others = [
        batches(place, number=2),
        batches(place, repeat=1),
        batches(place, stream="other"),
        batches(place, seed=1),
    ]
    assert all(other != first for other in others)


def test_plan_differs_between_devices(world: Callable[..., Any]) -> None:
    place = world(sizes=(12, 12))
    (steps,) = batches(place)
    first, second = ([row for step in steps for row in step[device]] for device in (0, 1))
    assert sorted(first) == list(range(12))
    assert [row + 12 for row in first] != second


def test_plan_uses_schedule_of_task(world: Callable[..., Any]) -> None:
    place = world(sizes=(12, 12), schedule=Schedule(4, 3))
    seen: list[Client] = []
    ask(place, replace(watching(seen), schedule=Schedule(6)))
    assert [tuple(step.rows.shape) for step in seen[0].plan] == [(2, 6), (2, 6)]


def test_optimizer_learning_rate_follows_round(world: Callable[..., Any]) -> None:
    place = world(sizes=(4,))
    engine = place.engine(FedAvg(), lr_schedule=Milestones((2,), 0.5))
    rates = []
    for number in (1, 2, 3):
        seen: list[Client] = []
        list(engine.ask(Request(watching(seen), inboxes(place), number)))
        rates.append(seen[0].optimizer.lr)
    assert rates == [0.1, 0.1, 0.05]


def test_block_shared_inbox_is_not_copied(world: Callable[..., Any]) -> None:
    place = world(sizes=(4, 4, 4))
    weights, found = place.fleet.global_model.initial_weights(0), []

    def run(client: Client, inbox: Parcel) -> ClientResult:
        found.append(inbox["weights"]["classifier.weight"])
        return ClientResult({"weights": inbox["weights"]})

    task = Task("watch", run, {"weights": like("weights")})
    list(place.engine(FedAvg()).ask(Request(task, {one: {"weights": weights} for one in place.fleet.devices(1)}, 1)))
    assert tuple(found[0].shape) == (3, *weights["classifier.weight"].shape)
    assert found[0].untyped_storage().data_ptr() == weights["classifier.weight"].untyped_storage().data_ptr()


def test_reply_owns_its_memory(world: Callable[..., Any]) -> None:
    """The server may keep a reply; a block's tensor behind it would be kept too."""
    for reply in ask(world(sizes=(4, 4, 4)), watching([])):
        for tensor in reply.upload["weights"].values():
            assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def as_floats(data: Any, broken_rows: Any = ()) -> Any:
    """Bytes cannot hold what is not a number."""
    x = data.train.x.float() / 255
    x[torch.as_tensor(broken_rows, dtype=torch.int64)] = torch.nan
    return replace(data, train=replace(data.train, x=x))


@pytest.mark.parametrize("block", [1, 16])
def test_engine_nonfinite_data_refuses_one_device(
    block: int, world: Callable[..., Any], meddling: Callable[..., Any], parcels_equal: Callable[..., bool]
) -> None:
    """To the bit what comes of a round in which that device trained well but its reply was lost."""
    place, method = world(widths=(1.0, 0.5), sizes=(8,) * 6), HeteroFL()
    broken = replace(place, dataset=as_floats(place.dataset, place.partition.train[1]), refusals=[])
    place = replace(place, dataset=as_floats(place.dataset))
    with_nan = broken.play(method, broken.engine(method, devices_per_block=block))
    lost = meddling(
        place.engine(method, devices_per_block=block),
        lambda replies: [one for one in replies if one.device.name != "1"],
    )
    assert parcels_equal(with_nan, place.play(method, lost))
    assert [(one.device, one.code) for one in broken.refusals] == [("1", "NONFINITE")] * 2


def test_engine_device_without_examples_is_refused(
    world: Callable[..., Any], parcels_equal: Callable[..., bool]
) -> None:
    place, method = world(sizes=(8, 0, 8), test_sizes=(2, 2, 2)), HeteroFL()
    with_empty = place.play(method, place.engine(method), rounds=1)
    assert [(refusal.device, refusal.code) for refusal in place.refusals] == [("1", "VALUE")]
    context = place.context(place.engine(method))
    without = replace(context, cohort=[one for one in context.cohort if one.name != "1"])
    assert parcels_equal(with_empty, method.round(method.start(place.fleet, 0), without))


@pytest.mark.parametrize("block", [1, 16])
@pytest.mark.parametrize("sizes", [(5, 8), (5, 5), (1, 8)])
def test_engine_batch_of_one_example_trains(
    sizes: tuple[int, ...], block: int, world: Callable[..., Any], meddling: Callable[..., Any]
) -> None:
    """Where the last map is one pixel, batch norm has one number per channel to go by."""
    place, method = world(input_shape=(1, 2, 2), sizes=sizes, schedule=Schedule(4)), HeteroFL()
    engine = meddling(place.engine(method, devices_per_block=block), lambda replies: replies)
    server = place.play(method, engine, rounds=1)["weights"]
    first = method.start(place.fleet, 0)["weights"]
    assert len(engine.delivered) == 2
    assert all(bool(tensor.isfinite().all()) for tensor in server.values())
    assert any(not torch.equal(server[name], tensor) for name, tensor in first.items())


def test_engine_inbox_is_not_modified(
    method: Any, world_for: Callable[..., Any], bits_equal: Callable[..., bool]
) -> None:
    place = world_for(method, None, sizes=(8, 8, 6))
    server = method.start(place.fleet, 0)
    kept: dict[str, dict[str, Tensor]] = {
        bundle: {name: tensor.clone() for name, tensor in tensors.items()} for bundle, tensors in server.items()
    }
    method.round(server, place.context(place.engine(method)))
    for bundle, tensors in kept.items():
        assert all(bits_equal(server[bundle][name], tensor) for name, tensor in tensors.items())
