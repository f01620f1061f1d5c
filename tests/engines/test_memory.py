"""What devices keep: two generations, and only what was admitted."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fedloom.engines import Memory
from fedloom.fleet import Device
from fedloom.methods.standalone import Standalone
from fedloom.tensors import Parcel
from fedloom.training import Client, Outcome, Task, shaped


def device(name: str, world: Callable[..., Any]) -> Device:
    return next(one for one in world().fleet.devices(1) if one.name == name)


def note(value: float) -> Parcel:
    return {"note": {"value": torch.tensor(value)}}


def read(memory: Memory, one: Device) -> float:
    return float(memory.recall(one)["note"]["value"])


def test_the_first_memory_is_prepared_for_each_device(world: Callable[..., Any]) -> None:
    memory = Memory(lambda one: note(float(one.name)))
    assert [read(memory, device(name, world)) for name in "012"] == [0.0, 1.0, 2.0]
    assert memory.committed == {}  # looking is not remembering


def test_what_is_remembered_counts_from_its_commit_on(world: Callable[..., Any]) -> None:
    memory, one = Memory(lambda one: note(0.0)), device("1", world)
    memory.remember(one, note(5.0))
    assert memory.committed == {}
    assert read(memory, one) == 5.0  # a second exchange of the same round sees it
    memory.commit()
    memory.abandon()
    assert read(memory, one) == 5.0
    memory.remember(one, note(6.0))
    assert read(memory, one) == 6.0


def test_an_abandoned_round_leaves_no_trace(world: Callable[..., Any]) -> None:
    memory, one, other = Memory(lambda one: note(0.0)), device("1", world), device("2", world)
    memory.remember(one, note(5.0))
    memory.commit()
    memory.remember(one, note(6.0))
    memory.remember(other, note(7.0))
    memory.abandon()
    memory.commit()
    assert read(memory, one) == 5.0
    assert read(memory, other) == 0.0


def remembering(value: float, broken: bool) -> Callable[[Client, Parcel], Outcome]:
    def run(client: Client, inbox: Parcel) -> Outcome:
        devices = len(client.seen_labels)
        flags = torch.ones(devices, 4)
        if broken:
            flags[1] = torch.nan
        return Outcome({"flags": {"one": flags}}, {"note": {"value": torch.full((devices,), value)}})

    return run


def test_a_refused_device_keeps_its_old_memory(world: Callable[..., Any]) -> None:
    place = world(sizes=(4, 4, 4))
    engine = place.engine(Standalone(), memory=Memory(lambda one: note(0.0)))
    for value, broken in ((1.0, False), (2.0, True)):
        task = Task("note", remembering(value, broken), {"flags": shaped(one=(("classes",), torch.float32))})
        list(engine.ask(task, {one: {} for one in place.fleet.devices(1)}, 1))
        engine.commit(1)
    assert [read(engine.memory, one) for one in place.fleet.devices(1)] == [2.0, 1.0, 2.0]
    assert [refusal.code for refusal in place.refusals] == ["NONFINITE"]


def test_memory_belongs_to_the_device_and_not_to_its_block(world: Callable[..., Any]) -> None:
    """A view of a block's memory would keep all of the block alive."""
    place = world(sizes=(4, 4, 4))
    engine = place.engine(Standalone())
    place.play(Standalone(), engine, rounds=1)
    for parcel in engine.memory.committed.values():
        for tensor in parcel["weights"].values():
            assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def test_an_engine_that_does_not_commit_repeats_the_round(
    world: Callable[..., Any], parcels_equal: Callable[..., bool]
) -> None:
    """A server that dies after its devices trained resumes to the same bits."""
    place, method = world(sizes=(6, 9, 4)), Standalone()
    engine = place.engine(method)
    method.round({}, place.turn(engine, 1))
    engine.memory.abandon()
    method.round({}, place.turn(engine, 1))
    engine.commit(1)
    once = place.engine(method)
    place.play(method, once, rounds=1)
    assert engine.memory.committed.keys() == {"0", "1", "2"}
    for name, parcel in once.memory.committed.items():
        assert parcels_equal(engine.memory.committed[name], parcel)


@pytest.mark.parametrize("experienced", ["0", "1"])
@pytest.mark.parametrize("block", [1, 16])
def test_devices_that_remember_different_things_are_kept_apart(
    block: int, experienced: str, world: Callable[..., Any]
) -> None:
    """One has been asked before and one has not: neither loses its memory to the other."""
    place = world(sizes=(4, 4))
    engine = place.engine(Standalone(), memory=Memory(lambda one: {}), block=block)

    def count(client: Client, inbox: Parcel) -> Outcome:
        before = client.memory["note"]["value"] if "note" in client.memory else torch.zeros(len(client.seen_labels))
        return Outcome({}, {"note": {"value": before + 1}})

    task = Task("count", count, {})
    for number, names in ((1, experienced), (2, "01")):
        list(engine.ask(task, {one: {} for one in place.fleet.devices(1) if one.name in names}, number))
        engine.commit(number)
    found = {one.name: read(engine.memory, one) for one in place.fleet.devices(1)}
    assert found == {name: 2.0 if name == experienced else 1.0 for name in "01"}
