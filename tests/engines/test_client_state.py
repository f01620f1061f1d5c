"""Client states: two generations, only those of admitted replies, and no more in memory than the budget."""

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
from fedloom.fleet import Device, Reply, Request
from fedloom.methods import Method
from fedloom.methods.standalone import Standalone
from fedloom.tensors import Parcel


def device(name: str, world: Callable[..., Any]) -> Device:
    return next(one for one in world().fleet.devices(1) if one.name == name)


def note(value: float) -> Parcel:
    return {"note": {"value": torch.tensor(value)}}


def stage(store: ClientStateStore, one: Device, state: Parcel) -> None:
    store.stage(Reply(one, 1, {}, state))


def read(store: ClientStateStore, one: Device) -> float:
    return float(store.read(one)["note"]["value"])


def test_store_device_without_state_gets_initial_state(world: Callable[..., Any]) -> None:
    store = ClientStateStore(lambda one: note(float(one.name)))
    assert [read(store, device(name, world)) for name in "012"] == [0.0, 1.0, 2.0]
    assert store.committed == {}  # looking is not remembering


def test_store_staged_state_counts_from_commit(world: Callable[..., Any]) -> None:
    store, one = ClientStateStore(lambda one: note(0.0)), device("1", world)
    stage(store, one, note(5.0))
    assert store.committed == {}
    assert read(store, one) == 5.0  # a second exchange of the same round sees it
    store.commit()
    store.rollback()
    assert read(store, one) == 5.0
    stage(store, one, note(6.0))
    assert read(store, one) == 6.0


def test_store_rollback_forgets_staged_states(world: Callable[..., Any]) -> None:
    store, one, other = ClientStateStore(lambda one: note(0.0)), device("1", world), device("2", world)
    stage(store, one, note(5.0))
    store.commit()
    stage(store, one, note(6.0))
    stage(store, other, note(7.0))
    store.rollback()
    store.commit()
    assert read(store, one) == 5.0
    assert read(store, other) == 0.0


def storing(value: float, broken: bool) -> Callable[[Client, Parcel], ClientResult]:
    def run(client: Client, inbox: Parcel) -> ClientResult:
        devices = len(client.seen_labels)
        flags = torch.ones(devices, 4)
        if broken:
            flags[1] = torch.nan
        return ClientResult({"flags": {"one": flags}}, {"note": {"value": torch.full((devices,), value)}})

    return run


def test_engine_refused_reply_keeps_old_state(world: Callable[..., Any]) -> None:
    place = world(sizes=(4, 4, 4))
    engine = place.engine(Standalone(), client_states=ClientStateStore(lambda one: note(0.0)))
    for value, broken in ((1.0, False), (2.0, True)):
        task = Task("note", storing(value, broken), {"flags": shaped(one=(("classes",), torch.float32))})
        list(engine.ask(Request(task, {one: {} for one in place.fleet.devices(1)}, 1)))
        engine.commit(1)
    assert [read(engine.client_states, one) for one in place.fleet.devices(1)] == [2.0, 1.0, 2.0]
    assert [refusal.code for refusal in place.refusals] == ["NONFINITE"]


def test_engine_state_of_device_owns_its_memory(world: Callable[..., Any]) -> None:
    """A view of a block's store would keep all of the block alive."""
    place = world(sizes=(4, 4, 4))
    engine = place.engine(Standalone())
    place.play(Standalone(), engine, rounds=1)
    for parcel in engine.client_states.committed.values():
        for tensor in parcel["weights"].values():
            assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def test_engine_round_after_rollback_gives_same_bits(
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
    for name, parcel in once.client_states.committed.items():
        assert parcels_equal(engine.client_states.committed[name], parcel)


@pytest.mark.parametrize("experienced", ["0", "1"])
@pytest.mark.parametrize("block", [1, 16])
def test_engine_states_of_different_layout_stay_apart(block: int, experienced: str, world: Callable[..., Any]) -> None:
    """One has been asked before and one has not: neither loses its store to the other."""
    place = world(sizes=(4, 4))
    engine = place.engine(Standalone(), client_states=ClientStateStore(lambda one: {}), devices_per_block=block)

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
ACTIONS = st.one_of(
    st.tuples(st.just("stage"), DEVICES, PARCELS),
    st.tuples(st.just("read"), DEVICES),
    st.tuples(st.just("commit")),
    st.tuples(st.just("rollback")),
)


@settings(max_examples=150)
@given(actions=st.lists(ACTIONS, max_size=40), budget=st.sampled_from([0, 1, 100, 300, 10_000]))
def test_store_states_in_files_equal_states_in_memory(
    actions: list[Any],
    budget: int,
    world: Callable[..., Any],
    parcels_equal: Callable[..., bool],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    devices, parcels = world(sizes=(4,) * 4).fleet.devices(1), odd_parcels()
    folder = tmp_path_factory.mktemp("store")
    store = ClientStateStore(lambda one: note(float(one.name)), budget, folder)
    committed: dict[str, Parcel] = {}
    staged: dict[str, Parcel] = {}

    def check(one: Device) -> None:
        expected = {**committed, **staged}.get(one.name, note(float(one.name)))
        found = store.read(one)
        assert parcels_equal(found, expected)
        assert names_of(found) == names_of(expected)

    for what, *which in actions:
        match what:
            case "stage":
                one, parcel = devices[which[0]], parcels[which[1]]
                stage(store, one, parcel)
                staged[one.name] = parcel
            case "read":
                check(devices[which[0]])
            case "commit":
                store.commit()
                committed.update(staged)
                staged.clear()
            case "rollback":
                store.rollback()
                staged.clear()
        assert store.resident <= budget
        assert len(list(folder.glob("*/*"))) <= len(committed) + len(staged)
    for one in devices:
        check(one)
    assert store.committed.keys() == committed.keys()
    assert all(parcels_equal(store.committed[name], parcel) for name, parcel in committed.items())
    store.close()
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
def test_store_many_states_hold_no_more_than_budget(world: Callable[..., Any], tmp_path: Path) -> None:
    """Counted from outside, while many devices remember within one round and over several."""
    store = ClientStateStore(lambda one: {}, budget=3 * LARGE, folder=tmp_path)
    for number in range(2):
        for one in world(sizes=(1,) * 6).fleet.devices(1):
            store.read(one)
            stage(store, one, large(number + float(one.name)))
            assert store.resident == alive() <= store.budget
        store.commit()
    assert store.resident > 0
    assert len(list(tmp_path.glob("*/*"))) <= 6  # those of the first round are gone


@pytest.mark.parametrize("view", [lambda block: block[3], lambda block: block.T, lambda block: block[:1].expand(5, 10)])
def test_store_view_is_copied_to_own_memory(
    view: Callable[[torch.Tensor], torch.Tensor], world: Callable[..., Any]
) -> None:
    """Or the budget would count less than is kept alive, and a file would give back another layout."""
    store, one, seen = ClientStateStore(lambda one: {}), device("0", world), view(torch.rand(10, 10))
    stage(store, one, {"weights": {"w": seen}})
    kept = store.read(one)["weights"]["w"]
    assert torch.equal(kept, seen)
    assert kept.is_contiguous()
    assert store.resident == kept.nbytes == kept.untyped_storage().nbytes()


def test_store_over_budget_writes_least_recently_used(world: Callable[..., Any], tmp_path: Path) -> None:
    first, second, third = world().fleet.devices(1)
    store = ClientStateStore(lambda one: {}, budget=2 * LARGE, folder=tmp_path)
    for one in (first, second):
        stage(store, one, large(float(one.name)))
        store.commit()
    assert list(tmp_path.iterdir()) == []  # nothing is made before it is needed
    store.read(first)
    stage(store, third, large(2.0))
    kept = store.read(first)
    assert store.read(first) is kept
    (file,) = tmp_path.glob("*/*")
    assert float(store.read(second)["weights"]["w"][0]) == 1.0
    assert len(list(tmp_path.glob("*/*"))) == 2  # it took the place of another, which was written
    assert file.exists()


def test_store_reading_writes_no_file_twice(world: Callable[..., Any], tmp_path: Path) -> None:
    devices = world().fleet.devices(1)
    store = ClientStateStore(lambda one: {}, budget=LARGE, folder=tmp_path)

    def files() -> dict[Path, int]:
        for one in devices:
            store.read(one)
        return {file: file.stat().st_mtime_ns for file in tmp_path.glob("*/*")}

    for one in devices:
        stage(store, one, large(float(one.name)))
    store.commit()
    before = files()
    assert len(before) == 3
    assert files() == before


def test_store_closed_twice_has_no_files(world: Callable[..., Any], tmp_path: Path) -> None:
    first, second, _ = world().fleet.devices(1)
    store = ClientStateStore(lambda one: {}, budget=LARGE, folder=tmp_path)
    store.close()
    stage(store, first, large(0.0))
    stage(store, second, large(1.0))
    store.commit()
    store.close()
    store.close()
    assert list(tmp_path.iterdir()) == []
    assert float(store.read(second)["weights"]["w"][0]) == 1.0
    with pytest.raises(FileNotFoundError):  # rather than a fresh start that nobody asked for
        store.read(first)


def test_store_closed_keeps_states_in_memory(world: Callable[..., Any], tmp_path: Path) -> None:
    first, second, _ = world().fleet.devices(1)
    store = ClientStateStore(lambda one: {}, budget=LARGE, folder=tmp_path)
    stage(store, first, large(0.0))
    stage(store, second, large(1.0))
    store.read(first)  # from its file, which goes
    store.close()
    stage(store, second, large(2.0))  # makes it go to a new one
    assert float(store.read(first)["weights"]["w"][0]) == 0.0


def test_store_collected_has_no_files(world: Callable[..., Any], tmp_path: Path) -> None:
    store = ClientStateStore(lambda one: {}, budget=0, folder=tmp_path)
    stage(store, device("0", world), large(0.0))
    assert list(tmp_path.iterdir())
    del store
    gc.collect()
    assert list(tmp_path.iterdir()) == []


FORKING = """
import os, sys
from pathlib import Path
from types import SimpleNamespace
import torch
from fedloom.engines import ClientStateStore
from fedloom.fleet import Reply

folder, ending = Path(sys.argv[1]), sys.argv[2]
store, one = ClientStateStore(lambda one: {}, budget=0, folder=folder), SimpleNamespace(name="one", is_server=False)
store.stage(Reply(one, 1, {}, {"note": {"value": torch.tensor(5.0)}}))
store.commit()
child = os.fork()
if not child:
    if ending == "close":
        store.close()
    sys.exit()
assert os.waitpid(child, 0)[1] == 0
assert float(store.read(one)["note"]["value"]) == 5.0
assert len(list(folder.glob("*/*.safetensors"))) == 1
"""


@pytest.mark.parametrize("ending", [pytest.param("close", marks=pytest.mark.slow), "exit"])
def test_store_files_end_with_process_that_made_them(ending: str, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-W", "error", "-c", FORKING, tmp_path, ending], check=True, timeout=60)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_store_any_budget_gives_same_bits(
    method: Method, world_for: Callable[..., Any], parcels_equal: Callable[..., bool]
) -> None:
    place = world_for(method, None, sizes=(8, 5, 9, 8, 12, 7))

    def play(budget: int) -> tuple[Parcel, ClientStateStore]:
        store = ClientStateStore(lambda one: method.init_client(one, place.seed), budget)
        return place.play(method, place.engine(method, client_states=store), rounds=4, participation=0.5), store

    server, roomy = play(10**9)
    other, tight = play(roomy.resident // 2)
    assert parcels_equal(server, other)
    assert roomy.committed.keys() == tight.committed.keys()
    for name, parcel in roomy.committed.items():
        assert parcels_equal(parcel, tight.committed[name])
    assert tight.resident <= roomy.resident // 2
