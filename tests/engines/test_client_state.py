"""What devices keep: two generations, only what was admitted, and no more in memory than the budget."""

import gc
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.client import Client, ClientResult, Task, shaped
from fedloom.engines import ClientStateStore
from fedloom.fleet import Device, Request
from fedloom.methods import Method
from fedloom.methods.standalone import Standalone
from fedloom.tensors import Parcel


def device(name: str, world: Callable[..., Any]) -> Device:
    return next(one for one in world().fleet.devices(1) if one.name == name)


def note(value: float) -> Parcel:
    return {"note": {"value": torch.tensor(value)}}


def read(memory: ClientStateStore, one: Device) -> float:
    return float(memory.recall(one)["note"]["value"])


def test_the_first_memory_is_prepared_for_each_device(world: Callable[..., Any]) -> None:
    memory = ClientStateStore(lambda one: note(float(one.name)))
    assert [read(memory, device(name, world)) for name in "012"] == [0.0, 1.0, 2.0]
    assert memory.committed == {}  # looking is not remembering


def test_what_is_remembered_counts_from_its_commit_on(world: Callable[..., Any]) -> None:
    memory, one = ClientStateStore(lambda one: note(0.0)), device("1", world)
    memory.remember(one, note(5.0))
    assert memory.committed == {}
    assert read(memory, one) == 5.0  # a second exchange of the same round sees it
    memory.commit()
    memory.rollback()
    assert read(memory, one) == 5.0
    memory.remember(one, note(6.0))
    assert read(memory, one) == 6.0


def test_an_abandoned_round_leaves_no_trace(world: Callable[..., Any]) -> None:
    memory, one, other = ClientStateStore(lambda one: note(0.0)), device("1", world), device("2", world)
    memory.remember(one, note(5.0))
    memory.commit()
    memory.remember(one, note(6.0))
    memory.remember(other, note(7.0))
    memory.rollback()
    memory.commit()
    assert read(memory, one) == 5.0
    assert read(memory, other) == 0.0


def remembering(value: float, broken: bool) -> Callable[[Client, Parcel], ClientResult]:
    def run(client: Client, inbox: Parcel) -> ClientResult:
        devices = len(client.seen_labels)
        flags = torch.ones(devices, 4)
        if broken:
            flags[1] = torch.nan
        return ClientResult({"flags": {"one": flags}}, {"note": {"value": torch.full((devices,), value)}})

    return run


def test_a_refused_device_keeps_its_old_memory(world: Callable[..., Any]) -> None:
    place = world(sizes=(4, 4, 4))
    engine = place.engine(Standalone(), memory=ClientStateStore(lambda one: note(0.0)))
    for value, broken in ((1.0, False), (2.0, True)):
        task = Task("note", remembering(value, broken), {"flags": shaped(one=(("classes",), torch.float32))})
        list(engine.ask(Request(task, {one: {} for one in place.fleet.devices(1)}, 1)))
        engine.commit(1)
    assert [read(engine.client_states, one) for one in place.fleet.devices(1)] == [2.0, 1.0, 2.0]
    assert [refusal.code for refusal in place.refusals] == ["NONFINITE"]


def test_memory_belongs_to_the_device_and_not_to_its_block(world: Callable[..., Any]) -> None:
    """A view of a block's memory would keep all of the block alive."""
    place = world(sizes=(4, 4, 4))
    engine = place.engine(Standalone())
    place.play(Standalone(), engine, rounds=1)
    for parcel in engine.client_states.committed.values():
        for tensor in parcel["weights"].values():
            assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def test_an_engine_that_does_not_commit_repeats_the_round(
    world: Callable[..., Any], parcels_equal: Callable[..., bool]
) -> None:
    """A server that dies after its devices trained resumes to the same bits."""
    place, method = world(sizes=(6, 9, 4)), Standalone()
    engine = place.engine(method)
    method.round({}, place.context(engine, 1))
    engine.client_states.rollback()
    method.round({}, place.context(engine, 1))
    engine.commit(1)
    once = place.engine(method)
    place.play(method, once, rounds=1)
    assert engine.client_states.committed.keys() == {"0", "1", "2"}
    for name, parcel in once.memory.committed.items():
        assert parcels_equal(engine.client_states.committed[name], parcel)


@pytest.mark.parametrize("experienced", ["0", "1"])
@pytest.mark.parametrize("block", [1, 16])
def test_devices_that_remember_different_things_are_kept_apart(
    block: int, experienced: str, world: Callable[..., Any]
) -> None:
    """One has been asked before and one has not: neither loses its memory to the other."""
    place = world(sizes=(4, 4))
    engine = place.engine(Standalone(), memory=ClientStateStore(lambda one: {}), devices_per_block=block)

    def count(client: Client, inbox: Parcel) -> ClientResult:
        before = client.state["note"]["value"] if "note" in client.state else torch.zeros(len(client.seen_labels))
        return ClientResult({}, {"note": {"value": before + 1}})

    task = Task("count", count, {})
    for number, names in ((1, experienced), (2, "01")):
        list(engine.ask(Request(task, {one: {} for one in place.fleet.devices(1) if one.name in names}, number)))
        engine.commit(number)
    found = {one.name: read(engine.client_states, one) for one in place.fleet.devices(1)}
    assert found == {name: 2.0 if name == experienced else 1.0 for name in "01"}


def odd_parcels() -> list[Parcel]:
    """Whatever a method might keep: a file must give it back to the bit."""
    block = torch.arange(60.0).view(3, 4, 5)
    numbers = torch.tensor([0.0, -0.0, torch.nan, torch.inf, 1e-42])
    return [
        {},
        {"empty": {}, "note": {"value": torch.tensor(-0.0)}},
        {"z": {"b": numbers, "a": numbers.double()}, "a": {"b": numbers.half(), "a": numbers.bfloat16()}},
        {
            "seen": {"labels": torch.tensor([True, False]), "count": torch.arange(3)},
            "none": {"of it": torch.zeros(2, 0)},
        },
        {
            "views": {
                "part": block[1],
                "turned": block.mT,
                "spread": block[0, :1].expand(4, 5),
                "scalar": block[0, 0, 0],
            }
        },
        {"twice": {"one": block, "other": block}},
    ]


def names_of(parcel: Parcel) -> list[tuple[str, list[str]]]:
    return [(bundle, list(tensors)) for bundle, tensors in parcel.items()]


DEVICES, PARCELS = st.integers(0, 3), st.integers(0, len(odd_parcels()) - 1)
DEEDS = st.one_of(
    st.tuples(st.just("remember"), DEVICES, PARCELS),
    st.tuples(st.just("recall"), DEVICES),
    st.tuples(st.just("commit")),
    st.tuples(st.just("abandon")),
)


@settings(max_examples=150)
@given(deeds=st.lists(DEEDS, max_size=40), budget=st.sampled_from([0, 1, 100, 300, 10_000]))
def test_what_is_in_files_is_remembered_like_the_rest(
    deeds: list[Any],
    budget: int,
    world: Callable[..., Any],
    parcels_equal: Callable[..., bool],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    devices, parcels = world(sizes=(4,) * 4).fleet.devices(1), odd_parcels()
    folder = tmp_path_factory.mktemp("memory")
    memory = ClientStateStore(lambda one: note(float(one.name)), budget, folder)
    committed: dict[str, Parcel] = {}
    staged: dict[str, Parcel] = {}

    def check(one: Device) -> None:
        expected = {**committed, **staged}.get(one.name, note(float(one.name)))
        found = memory.recall(one)
        assert parcels_equal(found, expected)
        assert names_of(found) == names_of(expected)

    for what, *whom in deeds:
        match what:
            case "remember":
                one, parcel = devices[whom[0]], parcels[whom[1]]
                memory.remember(one, parcel)
                staged[one.name] = parcel
            case "recall":
                check(devices[whom[0]])
            case "commit":
                memory.commit()
                committed.update(staged)
                staged.clear()
            case "abandon":
                memory.rollback()
                staged.clear()
        assert memory.resident <= budget
        assert len(list(folder.glob("*/*"))) <= len(committed) + len(staged)
    for one in devices:
        check(one)
    assert memory.committed.keys() == committed.keys()
    assert all(parcels_equal(memory.committed[name], parcel) for name, parcel in committed.items())
    memory.close()
    assert list(folder.iterdir()) == []


def large(value: float) -> Parcel:
    return {"weights": {"w": torch.full((1009,), value)}}


LARGE = 4 * 1009  # bytes of it


def alive() -> int:
    """Bytes of all large tensors that anybody holds."""
    gc.collect()
    found = [one for one in gc.get_objects() if type(one) is torch.Tensor and one.shape == (1009,)]
    return sum({one.data_ptr(): one.untyped_storage().nbytes() for one in found}.values())


@pytest.mark.slow
def test_no_more_is_alive_than_the_budget(world: Callable[..., Any], tmp_path: Path) -> None:
    """Counted from outside, while many devices remember within one round and over several."""
    memory = ClientStateStore(lambda one: {}, budget=3 * LARGE, folder=tmp_path)
    for number in range(2):
        for one in world(sizes=(1,) * 6).fleet.devices(1):
            memory.recall(one)
            memory.remember(one, large(number + float(one.name)))
            assert memory.resident == alive() <= memory.budget
        memory.commit()
    assert memory.resident > 0
    assert len(list(tmp_path.glob("*/*"))) <= 6  # those of the first round are gone


@pytest.mark.parametrize("view", [lambda block: block[3], lambda block: block.T, lambda block: block[:1].expand(5, 10)])
def test_what_is_remembered_is_plain_memory_of_its_own(
    view: Callable[[torch.Tensor], torch.Tensor], world: Callable[..., Any]
) -> None:
    """Or the budget would count less than is kept alive, and a file would give back another layout."""
    memory, one, seen = ClientStateStore(lambda one: {}), device("0", world), view(torch.rand(10, 10))
    memory.remember(one, {"weights": {"w": seen}})
    kept = memory.recall(one)["weights"]["w"]
    assert torch.equal(kept, seen)
    assert kept.is_contiguous()
    assert memory.resident == kept.nbytes == kept.untyped_storage().nbytes()


def test_the_least_recently_used_go_to_files(world: Callable[..., Any], tmp_path: Path) -> None:
    first, second, third = world().fleet.devices(1)
    memory = ClientStateStore(lambda one: {}, budget=2 * LARGE, folder=tmp_path)
    for one in (first, second):
        memory.remember(one, large(float(one.name)))
        memory.commit()
    assert list(tmp_path.iterdir()) == []  # nothing is made before it is needed
    memory.recall(first)
    memory.remember(third, large(2.0))
    kept = memory.recall(first)
    assert memory.recall(first) is kept
    (file,) = tmp_path.glob("*/*")
    assert float(memory.recall(second)["weights"]["w"][0]) == 1.0
    assert len(list(tmp_path.glob("*/*"))) == 2  # it took the place of another, which was written
    assert file.exists()


def test_looking_writes_nothing_twice(world: Callable[..., Any], tmp_path: Path) -> None:
    devices = world().fleet.devices(1)
    memory = ClientStateStore(lambda one: {}, budget=LARGE, folder=tmp_path)

    def files() -> dict[Path, int]:
        for one in devices:
            memory.recall(one)
        return {file: file.stat().st_mtime_ns for file in tmp_path.glob("*/*")}

    for one in devices:
        memory.remember(one, large(float(one.name)))
    memory.commit()
    before = files()
    assert len(before) == 3
    assert files() == before


def test_a_closed_memory_has_no_files_and_is_closed_again_in_peace(world: Callable[..., Any], tmp_path: Path) -> None:
    first, second, _ = world().fleet.devices(1)
    memory = ClientStateStore(lambda one: {}, budget=LARGE, folder=tmp_path)
    memory.close()
    memory.remember(first, large(0.0))
    memory.remember(second, large(1.0))
    memory.commit()
    memory.close()
    memory.close()
    assert list(tmp_path.iterdir()) == []
    assert float(memory.recall(second)["weights"]["w"][0]) == 1.0
    with pytest.raises(FileNotFoundError):  # rather than a fresh start that nobody asked for
        memory.recall(first)


def test_a_closed_memory_still_knows_what_it_holds(world: Callable[..., Any], tmp_path: Path) -> None:
    first, second, _ = world().fleet.devices(1)
    memory = ClientStateStore(lambda one: {}, budget=LARGE, folder=tmp_path)
    memory.remember(first, large(0.0))
    memory.remember(second, large(1.0))
    memory.recall(first)  # from its file, which goes
    memory.close()
    memory.remember(second, large(2.0))  # makes it go to a new one
    assert float(memory.recall(first)["weights"]["w"][0]) == 0.0


def test_a_memory_nobody_holds_any_more_has_no_files(world: Callable[..., Any], tmp_path: Path) -> None:
    memory = ClientStateStore(lambda one: {}, budget=0, folder=tmp_path)
    memory.remember(device("0", world), large(0.0))
    assert list(tmp_path.iterdir())
    del memory
    gc.collect()
    assert list(tmp_path.iterdir()) == []


FORKING = """
import os, sys
from pathlib import Path
from types import SimpleNamespace
import torch
from fedloom.engines import Memory

folder, ending = Path(sys.argv[1]), sys.argv[2]
memory, one = Memory(lambda one: {}, budget=0, folder=folder), SimpleNamespace(name="one", here=False)
memory.remember(one, {"note": {"value": torch.tensor(5.0)}})
memory.commit()
child = os.fork()
if not child:
    if ending == "close":
        memory.close()
    sys.exit()
assert os.waitpid(child, 0)[1] == 0
assert float(memory.recall(one)["note"]["value"]) == 5.0
assert len(list(folder.glob("*/*.safetensors"))) == 1
"""


@pytest.mark.parametrize("ending", [pytest.param("close", marks=pytest.mark.slow), "exit"])
def test_files_end_with_the_process_that_made_them_and_not_with_a_forked_one(ending: str, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-W", "error", "-c", FORKING, tmp_path, ending], check=True, timeout=60)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_budget_changes_nothing_that_is_learned(
    method: Method, world_for: Callable[..., Any], parcels_equal: Callable[..., bool]
) -> None:
    place = world_for(method, None, sizes=(8, 5, 9, 8, 12, 7))

    def play(budget: int) -> tuple[Parcel, ClientStateStore]:
        memory = ClientStateStore(lambda one: method.init_client(one, place.seed), budget)
        return place.play(method, place.engine(method, memory=memory), rounds=4, participation=0.5), memory

    server, roomy = play(10**9)
    other, tight = play(roomy.resident // 2)
    assert parcels_equal(server, other)
    assert roomy.committed.keys() == tight.committed.keys()
    for name, parcel in roomy.committed.items():
        assert parcels_equal(parcel, tight.committed[name])
    assert tight.resident <= roomy.resident // 2
