"""The simulation behind a codec: devices get rounded parcels, keep what they leave out, and nobody else notices."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from fedloom.client import Client, ClientResult, Task, like
from fedloom.engines import (
    BytesTransport,
    ClientStateStore,
    Compression,
    InProcess,
    NormScreening,
    WorkerContext,
    WorkerPool,
)
from fedloom.engines.compression import HalfPrecision, Int8, TopK
from fedloom.engines.faults import FaultPlan
from fedloom.fleet import UNCOMPRESSED, Device, Request
from fedloom.methods import Method
from fedloom.methods.fedavg import FedAvg
from fedloom.methods.heterofl import HeteroFL
from fedloom.methods.standalone import Standalone
from fedloom.tensors import Parcel, fingerprint
from fedloom.testing import with_compression, with_transports
from tests.conftest import inject_faults

TOP, BOTH = Compression(TopK(0.1)), Compression(TopK(0.1), Int8())
SIZES = (8, 5, 9, 8, 12, 7)


def watching(seen: list[Client]) -> Task:
    """Changes all that it was given, remembers nothing, and shows what it saw."""

    def run(client: Client, inbox: Parcel) -> ClientResult:
        seen.append(client)
        return ClientResult(upload={"weights": {name: tensor * 1.5 + 0.1 for name, tensor in inbox["weights"].items()}})

    return Task("watch", run, {"weights": like("weights")})


@pytest.fixture
def place(world: Callable[..., Any]) -> Any:
    return world(widths=(1.0, 0.5), sizes=SIZES)


def inboxes(place: Any) -> dict[Device, Parcel]:
    weights = place.fleet.global_model.initial_weights(0)
    return {one: {"weights": one.footprint.read(weights)} for one in place.fleet.devices(1)}


def left(engine: InProcess, place: Any) -> dict[str, Parcel]:
    return {
        one.name: engine.client_states.residual(one)
        for one in place.fleet.devices(1)
        if engine.client_states.residual(one)
    }


def print_of(engine: InProcess, server: Parcel) -> tuple[str, ...]:
    held = engine.client_states.committed
    return fingerprint(server), *(f"{name} {fingerprint(held[name])}" for name in sorted(held))


def test_device_end_residual_is_hidden_from_tasks(place: Any) -> None:
    seen: list[Client] = []
    engine = place.engine(FedAvg())
    for number in (1, 2):
        assert len(list(with_compression(engine, TOP).ask(Request(watching(seen), inboxes(place), number)))) == len(
            SIZES
        )
        engine.commit(number)
    assert all(client.state == {} for client in seen)
    assert left(engine, place).keys() == {one.name for one in place.fleet.devices(1)}


def test_device_end_residual_does_not_split_blocks(world: Callable[..., Any]) -> None:
    place = world(sizes=(8, 8, 8, 8))
    seen: list[Client] = []
    engine = place.engine(FedAvg())
    some = dict(list(inboxes(place).items())[:2])
    list(with_compression(engine, TOP).ask(Request(watching(seen), some, 1)))
    list(with_compression(engine, TOP).ask(Request(watching(seen), inboxes(place), 1)))
    assert [len(client.seen_labels) for client in seen] == [2, 4]


def test_device_end_residual_counts_from_commit(place: Any) -> None:
    engine = place.engine(FedAvg())
    list(with_compression(engine, TOP).ask(Request(watching([]), inboxes(place), 1)))
    assert left(engine, place)
    engine.client_states.rollback()
    assert not left(engine, place)
    list(with_compression(engine, TOP).ask(Request(watching([]), inboxes(place), 1)))
    engine.commit(1)
    engine.client_states.rollback()
    assert left(engine, place)


def test_device_end_lost_reply_keeps_old_residual(place: Any) -> None:
    engine = place.engine(FedAvg())
    plan = FaultPlan(silent=frozenset({"1"}), corrupt={"2": "nan", "3": "shape"})
    faulty = with_compression(engine, TOP, inject_faults(engine, plan))
    heard = {reply.device.name for reply in faulty.ask(Request(watching([]), inboxes(place), 1))}
    assert heard == left(engine, place).keys() == {"0", "4", "5"}
    assert sorted((one.device, one.code) for one in place.refusals) == [("2", "NONFINITE"), ("3", "SHAPE")]


@pytest.mark.parametrize(
    "codec", [Compression(HalfPrecision(torch.float16), HalfPrecision(torch.float16)), Compression(Int8()), TOP, BOTH]
)
@pytest.mark.parametrize("how", ["nan", "inf", "huge", "shape"])
def test_server_end_corrupt_reply_is_refused(codec: Compression, how: Any, place: Any) -> None:
    engine = place.engine(FedAvg())
    faulty = with_compression(engine, codec, inject_faults(engine, FaultPlan(corrupt={"2": how})))
    assert {one.device.name for one in faulty.ask(Request(watching([]), inboxes(place), 1))} == {
        "0",
        "1",
        "3",
        "4",
        "5",
    }
    assert [one.device for one in place.refusals] == ["2"]


def test_fault_injector_seconds_follow_compressed_bytes(place: Any) -> None:
    moved: dict[str, dict[str, int]] = {}
    for name, wire in (("plain", UNCOMPRESSED), ("coded", BOTH)):
        engine, found = place.engine(FedAvg()), moved.setdefault(name, {})

        def seconds(device: Device, size: int, examples: int, found: dict[str, int] = found) -> float:
            found[device.name] = size
            return 1.0

        faulty = with_transports(engine, inject_faults(engine, FaultPlan(), seconds, wire=wire))
        list(faulty.ask(Request(watching([]), inboxes(place), 1)))
    assert all(moved["coded"][name] < moved["plain"][name] / 2 for name in moved["plain"])


def test_norm_screening_ignores_rounding_of_downlink(place: Any) -> None:
    """Nobody moves anything, and so no update has a length, however coarse the way down is."""
    still = Task("still", lambda client, inbox: ClientResult(upload=inbox), {"weights": like("weights")})
    screening, engine = NormScreening(1.0), place.engine(FedAvg())
    compressed = with_compression(engine, Compression(Int8(), Int8()))
    screened = replace(compressed, transports=(screening, *compressed.transports))
    list(screened.ask(Request(still, inboxes(place), 1)))
    screening.commit()
    assert {norm for norms in screening.history().values() for norm in norms} == {0.0}


def test_device_end_shared_inbox_stays_shared(world: Callable[..., Any]) -> None:
    place = world(sizes=(8, 8))
    shared = place.fleet.global_model.initial_weights(0)
    got: list[Parcel] = []

    def run(client: Client, inbox: Parcel) -> ClientResult:
        got.append(inbox)
        return ClientResult(upload={"weights": inbox["weights"]})

    task, codec = Task("look", run, {"weights": like("weights")}), Compression(None, HalfPrecision(torch.float16))
    boxes = {device: {"weights": shared} for device in place.fleet.devices(1)}
    replies = list(with_compression(place.engine(FedAvg()), codec).ask(Request(task, boxes, 1)))
    for name, tensor in got[0]["weights"].items():
        assert tensor.stride(0) == 0
        assert torch.equal(tensor[0], shared[name].half().float() if shared[name].dim() > 1 else shared[name])
    assert all(fingerprint({"w": one.upload["weights"]}) == fingerprint({"w": shared}) for one in replies)


def test_compression_server_task_is_unchanged(place: Any) -> None:
    here = {device.on_server(): inbox for device, inbox in inboxes(place).items()}
    engine = place.engine(FedAvg())
    coded, plain = (
        {one.device.name: fingerprint(one.upload) for one in made.ask(Request(watching([]), here, 1))}
        for made in (with_compression(engine, BOTH), engine)
    )
    assert coded == plain
    assert not left(engine, place)


@pytest.mark.parametrize("workers", [2, 4])
def test_compression_workers_change_no_bits(workers: int, place: Any) -> None:
    method: Method = HeteroFL()
    pool = WorkerPool(workers)
    alone, many = place.engine(method), place.engine(method, executor=pool)
    pool.register(WorkerContext(many, place.fleet, lambda ref: method.find(*ref)))
    try:
        servers = [place.play(method, with_compression(engine, BOTH), rounds=3) for engine in (alone, many)]
    finally:
        pool.close()
    assert print_of(alone, servers[0]) == print_of(many, servers[1])


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("codec", [BOTH, Compression(Int8(), HalfPrecision(torch.float16))])
def test_compression_blocks_equal_single_devices(
    codec: Compression, world: Callable[..., Any], difference: Any
) -> None:
    place = world(widths=(1.0, 0.5), sizes=SIZES)
    engines = [place.engine(HeteroFL(), devices_per_block=block) for block in (1, 16)]
    servers = [place.play(HeteroFL(), with_compression(engine, codec), rounds=3) for engine in engines]
    assert difference(*servers) <= 1e-8
    held = [engine.client_states.committed for engine in engines]
    assert held[0].keys() == held[1].keys()
    assert all(difference(held[0][name], held[1][name]) <= 1e-8 for name in held[0])


def test_bytes_transport_compressed_replies_change_no_bits(place: Any) -> None:
    plain, posted = place.engine(HeteroFL()), place.engine(HeteroFL())
    servers = [
        place.play(HeteroFL(), with_compression(plain, BOTH)),
        place.play(HeteroFL(), with_compression(posted, BOTH, BytesTransport(encoded_task=BOTH.encoded_task))),
    ]
    assert place.refusals == []
    assert print_of(plain, servers[0]) == print_of(posted, servers[1])


def test_residual_in_files_equals_residual_in_memory(place: Any) -> None:
    def played(budget: int) -> tuple[str, ...]:
        engine = place.engine(HeteroFL(), client_states=ClientStateStore(lambda device: {}, budget=budget))
        found = print_of(engine, place.play(HeteroFL(), with_compression(engine, TOP), rounds=3))
        engine.close()
        return found

    assert played(0) == played(2**30)


def test_device_end_empty_upload_has_no_residual(place: Any) -> None:
    engine = place.engine(Standalone())
    place.play(Standalone(), with_compression(engine, TOP))
    assert not left(engine, place)
    assert engine.client_states.committed.keys() == {one.name for one in place.fleet.devices(1)}


def test_top_k_error_feedback_sends_small_changes_later(world: Callable[..., Any]) -> None:
    """A device that always wants the same small change gets it through in the end, or never does."""
    place = world(sizes=(8,))
    (device,) = place.fleet.devices(1)

    def run(client: Client, inbox: Parcel) -> ClientResult:
        step = torch.ones(4, 5) * 0.01
        step[0] = 1.0
        return ClientResult(upload={"weights": {"w": inbox["weights"]["w"] + step}})

    task = Task("push", run, {"weights": like("weights")})
    moved = {}
    for error_feedback in (True, False):
        engine, weights = place.engine(FedAvg()), torch.zeros(4, 5)
        coded = with_compression(engine, Compression(TopK(0.3, error_feedback)))
        for number in range(1, 6):
            (reply,) = coded.ask(Request(task, {device: {"weights": {"w": weights}}}, number))
            engine.commit(number)
            weights = reply.upload["weights"]["w"]
        moved[error_feedback] = int((weights[1:] > 0).sum())
    assert moved[True] > moved[False]


def test_device_end_second_request_uses_first_residual(place: Any) -> None:
    """Two questions of one task in a round: the second begins with what the first has left out."""
    engine = place.engine(FedAvg())
    coded = with_compression(engine, TOP)
    first, second = (list(coded.ask(Request(watching([]), inboxes(place), 1, repeat))) for repeat in (0, 1))
    both = {reply.device.name: fingerprint(reply.upload) for reply in second}
    assert any(both[reply.device.name] != fingerprint(reply.upload) for reply in first)
