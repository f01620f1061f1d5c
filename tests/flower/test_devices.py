"""Real devices are late, busy, gone, broken or new: each is told of, and nobody is written to who owes an answer."""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Message

from fedloom.engines import faults
from fedloom.engines.faults import LEAST_LINGER, DeadlineEngine, Wait
from fedloom.flower import engine as engine_module
from fedloom.flower import messages, nodes
from fedloom.flower.engine import Flower
from fedloom.methods.heterofl import HeteroFL
from fedloom.methods.standalone import Standalone
from fedloom.tensors import fingerprint
from tests.desk import FIRST, connect, desk_of

SIZES = (8, 5, 9, 8)
METHOD = HeteroFL()


@pytest.fixture
def place(world: Callable[..., Any]) -> Any:
    return world(widths=(1.0, 0.5), sizes=SIZES)


@pytest.fixture
def engine(place: Any, tmp_path: Path) -> Flower:
    made = connect(place, METHOD, tmp_path)
    assert list(made.nodes.update()) == []
    return made


@dataclass
class Clock:
    """Goes on only while the server rests, so that no test depends on how fast the machine is."""

    now: float = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += 1.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    for module in (faults, messages, nodes, engine_module):
        monkeypatch.setattr(module, "time", made)
    return made


def play(place: Any, engine: Any, number: int, **patience: Any) -> DeadlineEngine:
    patient = DeadlineEngine(engine, **patience)
    METHOD.round(METHOD.start(place.fleet, 0), place.context(patient, number))
    patient.commit(number)
    return patient


def told(place: Any) -> list[tuple[str, str]]:
    found = [(one.device, one.code) for one in place.refusals]
    place.refusals.clear()
    return found


def asked(engine: Flower) -> list[int]:
    return [one.metadata.dst_node_id for one in desk_of(engine).pushed if one.metadata.message_type == "train"]


def test_who_is_late_is_busy_until_its_answer_comes(place: Any, engine: Flower, clock: Clock) -> None:
    desk = desk_of(engine)
    desk.slow = {FIRST + 1}
    first = play(place, engine, 1, deadline=5.0)
    assert clock.now == first.hearing.waited == 5.0
    assert told(place) == [("1", "LATE")]
    assert [device.name for device in first.hearing.answered()] == ["0", "2", "3"]
    play(place, engine, 2, deadline=5.0)
    assert told(place) == [("1", "BUSY")]
    assert asked(engine).count(FIRST + 1) == 1
    desk.slow = set()
    last = play(place, engine, 3)
    assert told(place) == [("1", "STALE")]
    assert len(last.hearing.answered()) == len(SIZES)
    assert asked(engine).count(FIRST + 1) == 2


def test_what_a_broken_line_has_swallowed_is_asked_again(place: Any, engine: Flower, tmp_path: Path) -> None:
    desk, breaks, swallowed = desk_of(engine), [0], []
    pull = desk.pull_messages

    def with_a_break(names: Iterable[str]) -> Iterator[Message]:
        if not swallowed:  # one question is lost, another answer is on its way, and the line breaks
            swallowed.append(next(one for one, sent in desk._waiting.items() if sent.metadata.dst_node_id == FIRST + 1))
            del desk._waiting[swallowed[0]]
            breaks[0] += 1
            return iter(())
        return pull(names)

    desk.pull_messages = with_a_break  # type: ignore[method-assign]
    engine.client.restarts = lambda: breaks[0]
    patient = play(place, engine, 1)
    assert told(place) == [] and len(patient.hearing.answered()) == len(SIZES)
    assert asked(engine).count(FIRST + 1) == 2
    play(place, engine, 2)
    assert told(place) == [] and asked(engine).count(FIRST + 1) == 3
    assert engine.client.pending == {}


def test_a_newcomer_that_is_slow_to_say_who_it_is_holds_up_nobody(place: Any, engine: Flower) -> None:
    desk = desk_of(engine)
    app = desk.apps.pop(FIRST + 3)
    play(place, engine, 1)
    desk.apps[FIRST + 7], desk.slow = app, {FIRST + 7}
    play(place, engine, 2)
    play(place, engine, 3)
    assert told(place) == [("3", "ABSENT")] * 3
    desk.slow = set()
    play(place, engine, 4)
    assert told(place) == []
    assert engine.nodes.node_ids["3"] == FIRST + 7
    queries = [one for one in desk.pushed if one.metadata.message_type == "query"]
    assert len(queries) == len(SIZES) + 1


def test_who_is_not_needed_is_not_waited_for(place: Any, engine: Flower) -> None:
    desk_of(engine).slow = {FIRST + 2}
    patient = play(place, engine, 1, needed=0.75)
    assert told(place) == [("2", "NOT_NEEDED")]
    assert len(patient.hearing.answered()) == 3


def test_messages_outlive_the_deadline_but_not_for_ever() -> None:
    """So that a late answer is seen, and with it that its device is free."""
    assert Wait().ttl() is None
    assert Wait(time.monotonic() + 1).ttl() == LEAST_LINGER
    assert Wait(time.monotonic() + 100).ttl() == pytest.approx(200, abs=1)


def test_who_leaves_is_told_of(place: Any, engine: Flower) -> None:
    desk = desk_of(engine)
    play(place, engine, 1)
    desk.gone = {FIRST + 3}
    play(place, engine, 2)
    assert told(place) == [("3", "ABSENT")]
    desk.gone = set()
    play(place, engine, 3)
    assert told(place) == []


def test_who_leaves_in_mid_round_is_told_of(place: Any, engine: Flower) -> None:
    desk, push = desk_of(engine), desk_of(engine).push_messages
    play(place, engine, 1)

    def push_and_lose(messages: Any) -> list[str]:
        desk.gone = {FIRST + 3}
        return push(messages)

    desk.push_messages = push_and_lose  # type: ignore[method-assign]
    play(place, engine, 2)
    assert told(place) == [("3", "GONE")]


def test_who_raises_is_told_of_with_what_it_said(place: Any, tmp_path: Path) -> None:
    engine = connect(place, METHOD, tmp_path)
    (tmp_path / "2").mkdir()
    (tmp_path / "2" / "first").touch()  # where a folder should be

    class Remembering(Standalone):
        pass

    method = Remembering()
    engine = connect(place, method, tmp_path)
    method.round({}, place.context(engine))
    (refusal,) = place.refusals
    assert (refusal.device, refusal.code) == ("2", "RAISED")
    assert "Error" in refusal.reason


def test_a_device_that_is_asked_for_several_things_gets_them_one_by_one(place: Any, engine: Flower) -> None:
    """As where every device tries every tier's model."""
    desk, tiers = desk_of(engine), place.fleet.tiers
    at_once: list[int] = []
    pull = desk.pull_messages

    def watch(names: Any) -> Any:
        nodes = [message.metadata.dst_node_id for message in desk._waiting.values()]
        at_once.append(max((nodes.count(node) for node in nodes), default=0))
        return list(pull(names))

    desk.pull_messages = watch  # type: ignore[method-assign]
    weights = METHOD.start(place.fleet, 0)["weights"]
    inboxes = {
        device.with_model(tier.model, place.fleet.global_model, tier.name): {"weights": tier.footprint.read(weights)}
        for tier in tiers
        for device in place.fleet.devices(1)
    }
    replies = list(engine.ask(METHOD.train, inboxes, 1))
    assert len(replies) == len(tiers) * len(SIZES)
    assert max(at_once) == 1


def test_questions_to_the_server_itself_do_not_travel(place: Any, engine: Flower) -> None:
    weights = METHOD.start(place.fleet, 0)["weights"]
    pool = place.fleet.pooled_device(place.fleet.largest)
    (reply,) = engine.ask(METHOD.train, {pool: {"weights": weights}}, 1)
    assert reply.device is pool
    assert asked(engine) == []


class Keeping(Standalone):
    """As it is; only its memories are of interest here."""


@pytest.fixture
def keeping(place: Any, tmp_path: Path) -> Flower:
    return connect(place, Keeping(), tmp_path)


def files(folder: Path, name: str) -> list[str]:
    return sorted(path.name for path in (folder / name / "first" / name).glob("*"))


def go_round(place: Any, engine: Flower, number: int, commit: bool = True) -> None:
    Keeping().round({}, place.context(engine, number))
    if commit:
        engine.commit(number)


def test_what_does_not_count_yet_is_kept_beside_what_does(place: Any, keeping: Flower, tmp_path: Path) -> None:
    for number in (1, 2, 3, 4):
        go_round(place, keeping, number)
    assert files(tmp_path, "0") == [f"00000{number}-0000.memory" for number in (2, 3, 4)]
    assert keeping.memory.newest("0") == (4, 0)


def test_a_round_that_comes_to_nothing_leaves_no_trace(place: Any, keeping: Flower, tmp_path: Path) -> None:
    """Nor does one whose server has died in it."""
    from fedloom.flower.client_state import ClientStateFiles

    def memory(stamp: tuple[int, int]) -> str:
        entry = ClientStateFiles(tmp_path / "0" / "first" / "0").read(stamp)
        assert entry is not None and entry.task is not None
        return fingerprint(entry.task)

    go_round(place, keeping, 1)
    go_round(place, keeping, 2, commit=False)
    once = memory((2, 0))
    keeping.memory.abandon()
    assert keeping.memory.newest("0") == (1, 0)
    keeping._last = (1, 0)
    go_round(place, keeping, 2)
    assert memory((2, 0)) == once


def test_who_has_lost_its_memory_is_told_of_and_begins_anew(place: Any, keeping: Flower, tmp_path: Path) -> None:
    go_round(place, keeping, 1)
    for path in (tmp_path / "1" / "first" / "1").iterdir():
        path.unlink()
    (damaged,) = (tmp_path / "3" / "first" / "3").iterdir()
    damaged.write_bytes(damaged.read_bytes()[:-1])
    go_round(place, keeping, 2)
    assert sorted(told(place)) == [("1", "MEMORY_LOST"), ("3", "MEMORY_LOST")]
    assert keeping.memory.newest("1") is None
    go_round(place, keeping, 3)
    assert told(place) == []
    assert keeping.memory.newest("1") == (3, 0)


def test_stamps_survive_as_parcels(place: Any, keeping: Flower) -> None:
    go_round(place, keeping, 1)
    before = keeping.memory.committed
    go_round(place, keeping, 2)
    assert keeping.memory.stamps != {}
    keeping.memory.committed = before
    assert keeping.memory.newest("0") == (1, 0)


@pytest.mark.parametrize("name", ["..", "a/b", "", ".hidden", "a\x00"])
def test_a_server_cannot_name_other_places(name: str, tmp_path: Path) -> None:
    from fedloom.flower.client_state import open_state_files

    with pytest.raises(ValueError, match="cannot name"):
        open_state_files(tmp_path, name, "0")
