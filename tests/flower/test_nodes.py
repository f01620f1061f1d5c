"""Nodes say which device they are: lost queries are repeated, and nodes that never reply are waited for once."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Error, Message

from fedloom.engines import Refusal
from fedloom.flower.engine import Flower
from fedloom.flower.nodes import CONNECT_TIMEOUT, LATER_TIMEOUT, REPLY_TIMEOUT
from fedloom.flower.queries import FIRST_REPEAT
from fedloom.methods.heterofl import HeteroFL
from tests.in_memory_grid import FIRST_NODE, InMemoryGrid, connect, grid_of
from tests.still_clock import Clock, stop_clock

SIZES = (8, 5, 9, 8)
METHOD = HeteroFL()
BAD = FIRST_NODE + 1


@pytest.fixture
def tiny_world(world: Callable[..., Any]) -> Any:
    return world(sizes=SIZES)


@pytest.fixture
def engine(tiny_world: Any, tmp_path: Path) -> Flower:
    """Its registry expects all devices and has not asked any."""
    engine = connect(tiny_world, METHOD, tmp_path)
    engine.nodes.expected = len(SIZES)
    return engine


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return stop_clock(monkeypatch)


def queries_to(grid: InMemoryGrid, node: int) -> int:
    kinds = [sent.metadata.message_type for sent in grid.pushed if sent.metadata.dst_node_id == node]
    return kinds.count("query")


def update(engine: Flower) -> list[tuple[str, str]]:
    return [(refusal.device, refusal.code) for refusal in engine.nodes.update()]


def lose(grid: InMemoryGrid, count: int, code: int | None) -> None:
    """Lose the first replies of the bad node; with a code Flower reports the loss."""
    lost = list[str]()

    def transit(message: Message) -> Iterable[Message]:
        if message.metadata.src_node_id != BAD or len(lost) == count:
            return [message]
        lost.append(message.metadata.message_id)
        if code is None:
            return []
        error = Message(Error(code, "lost"), reply_to=message)
        error.metadata.__dict__["_reply_to_message_id"] = message.metadata.reply_to_message_id
        return [error]

    grid.transit = transit


@pytest.mark.parametrize("code", [3, 4, 5, 8, None])
def test_update_lost_query_is_repeated_and_the_device_takes_part(
    code: int | None, tiny_world: Any, engine: Flower, clock: Clock
) -> None:
    lose(grid_of(engine), 1, code)
    context = tiny_world.context(engine, 1)
    METHOD.round(METHOD.start(tiny_world.fleet, 0), context)
    assert len(context.responses.answered()) == len(SIZES) and tiny_world.refusals == []
    assert clock.now == FIRST_REPEAT
    assert [queries_to(grid_of(engine), FIRST_NODE + number) for number in range(4)] == [1, 2, 1, 1]


def test_update_queries_are_repeated_ever_more_rarely(engine: Flower, clock: Clock) -> None:
    lose(grid_of(engine), 3, None)
    assert update(engine) == []
    assert clock.now == FIRST_REPEAT * (1 + 2 + 4) and clock.now < REPLY_TIMEOUT
    assert "1" in engine.nodes.node_ids and queries_to(grid_of(engine), BAD) == 4


def test_update_late_reply_to_the_first_query_counts(engine: Flower, clock: Clock) -> None:
    """A device may first have to finish what it was asked before the server was restarted."""
    grid = grid_of(engine)
    pull = grid.pull_messages

    def pull_later(message_ids: Iterable[str]) -> Iterable[Message]:
        grid.slow = {BAD} if clock.now < REPLY_TIMEOUT / 2 else set()
        return pull(message_ids)

    grid.pull_messages = pull_later  # type: ignore[method-assign, assignment]
    assert update(engine) == [] and clock.now == REPLY_TIMEOUT / 2 > CONNECT_TIMEOUT
    assert "1" in engine.nodes.node_ids
    asked = queries_to(grid, BAD)
    clock.now += 10 * REPLY_TIMEOUT
    assert update(engine) == [] and queries_to(grid, BAD) == asked


def test_update_mute_node_is_waited_for_and_reported_once(engine: Flower, clock: Clock) -> None:
    grid = grid_of(engine)
    grid.slow = {BAD}
    assert update(engine) == [("", "LATE")]
    assert clock.now == REPLY_TIMEOUT and sorted(engine.nodes.node_ids) == ["0", "2", "3"]
    asked = queries_to(grid, BAD)
    for _ in range(10):
        clock.now += REPLY_TIMEOUT
        began = clock.now
        assert update(engine) == [] and clock.now == began
    assert asked < queries_to(grid, BAD) < asked + 10
    grid.slow = set()
    assert update(engine) == [] and "1" in engine.nodes.node_ids


def test_update_mute_stranger_beside_a_complete_fleet_is_not_waited_for(engine: Flower, clock: Clock) -> None:
    grid = grid_of(engine)
    grid.apps[FIRST_NODE + 9], grid.slow = grid.apps[BAD], {FIRST_NODE + 9}
    assert update(engine) == [] and clock.now == 0.0
    assert update(engine) == [] and clock.now == 0.0


def test_update_newcomer_takes_part_in_the_round_in_which_it_joins(engine: Flower, clock: Clock) -> None:
    grid = grid_of(engine)
    grid.gone = {BAD}
    assert update(engine) == [] and clock.now == CONNECT_TIMEOUT
    grid.gone = set()
    lose(grid, 1, 3)
    assert update(engine) == [] and clock.now == CONNECT_TIMEOUT + FIRST_REPEAT
    assert "1" in engine.nodes.node_ids


def test_update_mute_newcomer_delays_one_round_even_if_it_returns(engine: Flower, clock: Clock) -> None:
    grid = grid_of(engine)
    grid.gone, grid.slow = {BAD}, {BAD}
    assert update(engine) == [] and clock.now == CONNECT_TIMEOUT
    grid.gone = set()
    assert update(engine) == [("", "LATE")] and clock.now == CONNECT_TIMEOUT + LATER_TIMEOUT
    for gone in ({BAD}, set[int](), set[int]()):
        grid.gone = gone
        assert update(engine) == [] and clock.now == CONNECT_TIMEOUT + LATER_TIMEOUT


def test_update_superlink_restart_repeats_queries_at_once(engine: Flower, clock: Clock) -> None:
    engine.client.restarts = lambda: int(clock.now >= 3)
    lose(grid_of(engine), 1, None)
    assert update(engine) == [] and clock.now == 3.0
    assert "1" in engine.nodes.node_ids


def test_update_device_that_fails_is_asked_again_without_delay(engine: Flower, clock: Clock) -> None:
    """An error is a reply: each update asks such a device once and waits for none."""
    grid = grid_of(engine)
    app = grid.apps[BAD]

    def fail(*_: Any) -> Message:
        raise OSError

    grid.apps[BAD] = fail  # type: ignore[assignment]
    assert update(engine) == [("", "RAISED")] and clock.now == 0.0
    assert update(engine) == [("", "RAISED")] and clock.now == 0.0
    grid.slow = {BAD}
    assert update(engine) == [] and clock.now == 0.0
    grid.apps[BAD], grid.slow = app, set()
    assert update(engine) == [] and "1" in engine.nodes.node_ids


def test_report_late_names_the_node_and_the_last_error(engine: Flower, clock: Clock) -> None:
    lose(grid_of(engine), 10, 8)
    (refusal,) = engine.nodes.update()
    reason = f'node {BAD} has not reported which device it is: "Flower\'s error 8: lost"'
    assert refusal == Refusal("", "LATE", reason)
