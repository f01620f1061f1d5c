"""Devices that are late, busy, gone, broken or new are reported, and busy ones get no further request."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Message

from fedloom.engines import Compression, ServerEnd
from fedloom.engines.compression import HalfPrecision, float16
from fedloom.fleet import Channel, Request, RoundContext
from fedloom.flower.engine import LEAST_LINGER, Flower, _Asking
from fedloom.methods.heterofl import HeteroFL
from fedloom.methods.standalone import Standalone
from fedloom.tensors import fingerprint
from tests.in_memory_grid import FIRST_NODE, connect, grid_of
from tests.still_clock import Clock, stop_clock

SIZES = (8, 5, 9, 8)
METHOD = HeteroFL()


@pytest.fixture
def tiny_world(world: Callable[..., Any]) -> Any:
    return world(widths=(1.0, 0.5), sizes=SIZES)


@pytest.fixture
def engine(tiny_world: Any, tmp_path: Path) -> Flower:
    engine = connect(tiny_world, METHOD, tmp_path)
    assert list(engine.nodes.update()) == []
    return engine


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return stop_clock(monkeypatch)


def run_round(tiny_world: Any, engine: Any, number: int, **limits: Any) -> RoundContext:
    context: RoundContext = replace(tiny_world.context(engine, number), **limits)
    METHOD.round(METHOD.start(tiny_world.fleet, 0), context)
    engine.commit(number)
    return context


def take_refusals(tiny_world: Any) -> list[tuple[str, str]]:
    refusals = [(refusal.device, refusal.code) for refusal in tiny_world.refusals]
    tiny_world.refusals.clear()
    return refusals


def requested_nodes(engine: Flower) -> list[int]:
    return [sent.metadata.dst_node_id for sent in grid_of(engine).pushed if sent.metadata.message_type == "train"]


def test_ask_late_device_is_busy_until_its_reply_arrives(tiny_world: Any, engine: Flower, clock: Clock) -> None:
    grid = grid_of(engine)
    grid.slow = {FIRST_NODE + 1}
    first = run_round(tiny_world, engine, 1, deadline=5.0, started=clock.now)
    assert clock.now == 5.0
    assert take_refusals(tiny_world) == [("1", "LATE")]
    assert [device.name for device in first.responses.answered()] == ["0", "2", "3"]
    run_round(tiny_world, engine, 2, deadline=5.0, started=clock.now)
    assert take_refusals(tiny_world) == [("1", "BUSY")]
    assert requested_nodes(engine).count(FIRST_NODE + 1) == 1
    grid.slow = set()
    last = run_round(tiny_world, engine, 3)
    assert take_refusals(tiny_world) == [("1", "STALE")]
    assert len(last.responses.answered()) == len(SIZES)
    assert requested_nodes(engine).count(FIRST_NODE + 1) == 2


def test_ask_superlink_restart_repeats_lost_requests(tiny_world: Any, engine: Flower, tmp_path: Path) -> None:
    grid, restarts, lost = grid_of(engine), [0], []
    pull = grid.pull_messages

    def pull_with_restart(names: Iterable[str]) -> Iterator[Message]:
        if not lost:  # one request is lost, another reply is on its way, and the SuperLink restarts
            lost.append(next(key for key, sent in grid._waiting.items() if sent.metadata.dst_node_id == FIRST_NODE + 1))
            del grid._waiting[lost[0]]
            restarts[0] += 1
            return iter(())
        return pull(names)

    grid.pull_messages = pull_with_restart  # type: ignore[method-assign]
    engine.client.restarts = lambda: restarts[0]
    context = run_round(tiny_world, engine, 1)
    assert take_refusals(tiny_world) == [] and len(context.responses.answered()) == len(SIZES)
    assert requested_nodes(engine).count(FIRST_NODE + 1) == 2
    run_round(tiny_world, engine, 2)
    assert take_refusals(tiny_world) == [] and requested_nodes(engine).count(FIRST_NODE + 1) == 3
    assert engine.client.pending == {}


def test_node_registry_slow_newcomer_does_not_delay_the_round(tiny_world: Any, engine: Flower) -> None:
    grid = grid_of(engine)
    app = grid.apps.pop(FIRST_NODE + 3)
    run_round(tiny_world, engine, 1)
    grid.apps[FIRST_NODE + 7], grid.slow = app, {FIRST_NODE + 7}
    run_round(tiny_world, engine, 2)
    run_round(tiny_world, engine, 3)
    assert take_refusals(tiny_world) == [("3", "ABSENT")] * 3
    grid.slow = set()
    run_round(tiny_world, engine, 4)
    assert take_refusals(tiny_world) == []
    assert engine.nodes.node_ids["3"] == FIRST_NODE + 7
    queries = [sent for sent in grid.pushed if sent.metadata.message_type == "query"]
    assert len(queries) == len(SIZES) + 1


def test_node_registry_absent_device_does_not_keep_the_others_out(
    tiny_world: Any, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes are asked while the server waits for the missing one; an answer takes two seconds."""
    engine = connect(tiny_world, METHOD, tmp_path)
    grid, registry = grid_of(engine), engine.nodes
    pull, asked = grid.pull_messages, list[float]()
    push = grid.push_messages
    monkeypatch.setattr(grid, "push_messages", lambda sent: asked.append(clock.now) or push(sent))
    monkeypatch.setattr(grid, "pull_messages", lambda ids: pull(ids) if clock.now >= max(asked) + 2 else iter(()))
    registry.expected, registry.timeout = len(SIZES) + 1, 10.0
    assert sorted(registry.meet()) == ["0", "1", "2", "3"]
    assert clock.now == 10.0 and max(asked) == 0.0


def test_ask_enough_replies_does_not_wait_for_the_rest(tiny_world: Any, engine: Flower) -> None:
    grid_of(engine).slow = {FIRST_NODE + 2}
    context = run_round(tiny_world, engine, 1, needed=0.75)
    assert take_refusals(tiny_world) == [("2", "NOT_NEEDED")]
    assert len(context.responses.answered()) == 3


def test_time_to_live_with_deadline_exceeds_it_and_is_finite(engine: Flower) -> None:
    """A late reply must arrive, so that its device is known to be free."""

    def time_to_live(**limits: float) -> float | None:
        request = Request(METHOD.train, {}, 1, **limits)
        return _Asking(engine, request, Channel(request), (1, 0))._time_to_live()

    assert time_to_live() is None
    assert time_to_live(deadline=1) == LEAST_LINGER
    assert time_to_live(deadline=100) == pytest.approx(200, abs=1)


def test_ask_device_that_left_is_reported_absent(tiny_world: Any, engine: Flower) -> None:
    grid = grid_of(engine)
    run_round(tiny_world, engine, 1)
    grid.gone = {FIRST_NODE + 3}
    run_round(tiny_world, engine, 2)
    assert take_refusals(tiny_world) == [("3", "ABSENT")]
    grid.gone = set()
    run_round(tiny_world, engine, 3)
    assert take_refusals(tiny_world) == []


def test_ask_device_that_leaves_during_the_round_is_reported_gone(tiny_world: Any, engine: Flower) -> None:
    grid, push = grid_of(engine), grid_of(engine).push_messages
    run_round(tiny_world, engine, 1)

    def push_and_lose(messages: Any) -> list[str]:
        grid.gone = {FIRST_NODE + 3}
        return push(messages)

    grid.push_messages = push_and_lose  # type: ignore[method-assign]
    run_round(tiny_world, engine, 2)
    assert take_refusals(tiny_world) == [("3", "GONE")]


def test_ask_device_that_raises_is_reported_with_its_error(tiny_world: Any, tmp_path: Path) -> None:
    engine = connect(tiny_world, METHOD, tmp_path)
    (tmp_path / "2").mkdir()
    (tmp_path / "2" / "first").touch()  # a file in place of a folder

    class Remembering(Standalone):
        pass

    method = Remembering()
    engine = connect(tiny_world, method, tmp_path)
    method.round({}, tiny_world.context(engine))
    (refusal,) = tiny_world.refusals
    assert (refusal.device, refusal.code) == ("2", "RAISED")
    assert "Error" in refusal.reason


def test_ask_several_requests_to_one_device_are_sent_one_by_one(tiny_world: Any, engine: Flower) -> None:
    """For example when every device evaluates every tier's model."""
    grid, tiers = grid_of(engine), tiny_world.fleet.tiers
    in_flight: list[int] = []
    pull = grid.pull_messages

    def watch(names: Any) -> Any:
        nodes = [message.metadata.dst_node_id for message in grid._waiting.values()]
        in_flight.append(max((nodes.count(node) for node in nodes), default=0))
        return list(pull(names))

    grid.pull_messages = watch  # type: ignore[method-assign]
    weights = METHOD.start(tiny_world.fleet, 0)["weights"]
    inboxes = {
        device.with_model(tier.model, tiny_world.fleet.global_model, tier.name): {
            "weights": tier.footprint.read(weights)
        }
        for tier in tiers
        for device in tiny_world.fleet.devices(1)
    }
    replies = list(engine.ask(Request(METHOD.train, inboxes, 1)))
    assert len(replies) == len(tiers) * len(SIZES)
    assert max(in_flight) == 1


def test_ask_server_device_runs_in_process(tiny_world: Any, engine: Flower) -> None:
    weights = METHOD.start(tiny_world.fleet, 0)["weights"]
    pool = tiny_world.fleet.pooled_device(tiny_world.fleet.largest)
    (reply,) = engine.ask(Request(METHOD.train, {pool: {"weights": weights}}, 1))
    assert reply.device is pool
    assert requested_nodes(engine) == []


def test_ask_compressed_inboxes_are_encoded_once_per_tier(
    tiny_world: Any, engine: Flower, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded, encode = [], HalfPrecision.encode

    def count(compressor: HalfPrecision, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        encoded.append(tuple(tensor.shape))
        return encode(compressor, tensor)

    monkeypatch.setattr(HalfPrecision, "encode", count)
    run_round(tiny_world, engine, 1, transports=(ServerEnd(Compression(downlink=float16())),))
    weights = [message.content["0"] for message in grid_of(engine).pushed if message.metadata.message_type == "train"]
    assert len(weights) == len(SIZES) and len({id(record) for record in weights}) == len(tiny_world.fleet.tiers)
    assert {array.dtype for array in weights[0].values()} == {"float16", "float32"}  # vectors are not compressed
    matrices = [tensor for tier in tiny_world.fleet.tiers for tensor in tier.model.shapes().values() if len(tensor) > 1]
    assert sorted(encoded) == sorted(tuple(shape) for shape in matrices)


class Stateful(Standalone):
    """Standalone, whose client state is tested here."""


@pytest.fixture
def stateful(tiny_world: Any, tmp_path: Path) -> Flower:
    return connect(tiny_world, Stateful(), tmp_path)


def list_state_files(folder: Path, name: str) -> list[str]:
    return sorted(path.name for path in (folder / name / "first" / name).glob("*"))


def run_standalone_round(tiny_world: Any, engine: Flower, number: int, commit: bool = True) -> None:
    Stateful().round({}, tiny_world.context(engine, number))
    if commit:
        engine.commit(number)


def test_client_state_files_keep_uncommitted_beside_committed(
    tiny_world: Any, stateful: Flower, tmp_path: Path
) -> None:
    for number in (1, 2, 3, 4):
        run_standalone_round(tiny_world, stateful, number)
    assert list_state_files(tmp_path, "0") == [f"00000{number}-0000.state" for number in (2, 3, 4)]
    assert stateful.client_states.newest("0") == (4, 0)


def test_client_state_abandoned_round_leaves_state_unchanged(tiny_world: Any, stateful: Flower, tmp_path: Path) -> None:
    """Nor does a round in which the server was killed."""
    from fedloom.flower.client_state import ClientStateFiles

    def read_state(version: tuple[int, int]) -> str:
        saved = ClientStateFiles(tmp_path / "0" / "first" / "0").read(version)
        assert saved is not None and saved.task is not None
        return fingerprint(saved.task)

    run_standalone_round(tiny_world, stateful, 1)
    run_standalone_round(tiny_world, stateful, 2, commit=False)
    first = read_state((2, 0))
    stateful.client_states.rollback()
    assert stateful.client_states.newest("0") == (1, 0)
    stateful._last = (1, 0)
    run_standalone_round(tiny_world, stateful, 2)
    assert read_state((2, 0)) == first


def test_client_state_lost_is_reported_and_starts_again(tiny_world: Any, stateful: Flower, tmp_path: Path) -> None:
    run_standalone_round(tiny_world, stateful, 1)
    for path in (tmp_path / "1" / "first" / "1").iterdir():
        path.unlink()
    (damaged,) = (tmp_path / "3" / "first" / "3").iterdir()
    damaged.write_bytes(damaged.read_bytes()[:-1])
    run_standalone_round(tiny_world, stateful, 2)
    assert sorted(take_refusals(tiny_world)) == [("1", "STATE_LOST"), ("3", "STATE_LOST")]
    assert stateful.client_states.newest("1") is None
    run_standalone_round(tiny_world, stateful, 3)
    assert take_refusals(tiny_world) == []
    assert stateful.client_states.newest("1") == (3, 0)


def test_state_versions_restored_from_parcels_are_the_same(tiny_world: Any, stateful: Flower) -> None:
    run_standalone_round(tiny_world, stateful, 1)
    before = stateful.client_states.committed
    run_standalone_round(tiny_world, stateful, 2)
    assert stateful.client_states.versions != {}
    stateful.client_states.committed = before
    assert stateful.client_states.newest("0") == (1, 0)


@pytest.mark.parametrize("name", ["..", "a/b", "", ".hidden", "a\x00"])
def test_open_state_files_name_outside_the_folder_raises(name: str, tmp_path: Path) -> None:
    from fedloom.flower.client_state import open_state_files

    with pytest.raises(ValueError, match="cannot name"):
        open_state_files(tmp_path, name, "0")
