"""Several processes: the same bits as one, whatever becomes of a worker."""

import gc
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fedloom
from fedloom.engines import ProcessPool, worker_pool
from fedloom.engines.serialization import pack, unpack
from fedloom.recipe.load import load
from fedloom.recipe.registry import Registry
from fedloom.runs.build import assemble
from fedloom.runs.folder import read_manifest, read_rows
from fedloom.runs.recorder import recorded
from fedloom.tensors import Parcel
from tests.pickles import pickles_heard

Recipe = Callable[..., dict[str, Any]]


@pytest.mark.parametrize("method", ["heterofl", "standalone"])
def test_one_sha256_for_any_number_of_workers(method: str, recipe: Recipe, tmp_path: Path) -> None:
    document = recipe(method={"name": method})
    runs = [fedloom.run(document, out=tmp_path / str(workers), workers=workers) for workers in (1, 2, 4)]
    assert len({read_manifest(run.folder)["sha256"] for run in runs}) == 1
    first, *others = (list(read_rows(run.folder)) for run in runs)
    assert all(rows == first for rows in others)


@pytest.mark.parametrize("deaths", [3, 40])
def test_a_worker_that_is_killed_changes_nothing(deaths: int, recipe: Recipe, tmp_path: Path) -> None:
    """Nor do workers that are killed again and again: then the work is done where it was asked for."""
    whole = fedloom.run(recipe(), out=tmp_path / "whole")
    experiment = assemble(load(recipe(), Registry()), Registry(), tmp_path, workers=2)
    engine = experiment.engine
    assert isinstance(engine, ProcessPool)
    hand, killed = engine.crew._hand, []

    def hand_and_kill(worker: Any, work: Any) -> None:
        hand(worker, work)
        if len(killed) < deaths:
            killed.append(worker.process.pid)
            os.kill(worker.process.pid, signal.SIGKILL)

    engine.crew._hand = hand_and_kill  # type: ignore[method-assign]
    for _ in recorded(experiment, tmp_path / "killed"):
        pass
    assert len(killed) >= 3
    assert read_manifest(tmp_path / "killed")["sha256"] == read_manifest(whole.folder)["sha256"]


def test_no_worker_outlives_its_run(recipe: Recipe, tmp_path: Path) -> None:
    experiment = assemble(load(recipe(), Registry()), Registry(), tmp_path, workers=2)
    assert isinstance(experiment.engine, ProcessPool)
    hired: list[int] = []
    for _ in recorded(experiment, tmp_path / "run"):
        hired += [worker.process.pid for worker in experiment.engine.crew.pool if worker.process.pid]
    assert len(set(hired)) == 2  # not one a round
    for process in set(hired):
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


class Haunting:
    """Garbage that only the process it belongs to may collect, such as sessions that wait for their threads."""

    def __init__(self, seen: Path):
        self.seen, self.owner, self.itself = seen, os.getpid(), self

    def __del__(self) -> None:
        if os.getpid() != self.owner:
            (self.seen / str(os.getpid())).touch()


def test_workers_do_not_collect_what_their_parent_threw_away(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = tmp_path / "seen"
    seen.mkdir()
    work = worker_pool.run_block

    def tidy(given: Any) -> Any:
        gc.collect()
        (tmp_path / f"tidied {os.getpid()}").touch()
        return work(given)

    monkeypatch.setattr(worker_pool, "run_block", tidy)
    gc.disable()
    try:
        Haunting(seen)
        fedloom.run(recipe(), out=tmp_path / "run", workers=2)
    finally:
        gc.enable()
    assert len(list(tmp_path.glob("tidied *"))) >= 2
    assert list(seen.iterdir()) == []


def test_no_pickle_is_read_while_workers_answer(recipe: Recipe, tmp_path: Path) -> None:
    """What travels is JSON and safetensors."""
    with pickles_heard() as heard:
        fedloom.run(recipe(), out=tmp_path / "run", workers=2)
    assert heard == []


def test_an_error_in_a_task_is_raised_with_its_own_traceback(recipe: Recipe, tmp_path: Path) -> None:
    def build(*, input_shape: tuple[int, ...], classes: int, width: float = 1.0) -> torch.nn.Module:
        class Net(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.classifier = torch.nn.Linear(64, classes)

            def forward(self, x: Tensor) -> Tensor:
                if self.training:
                    raise LookupError("lost in training")
                return self.classifier(x.flatten(1))

        return Net()

    document = recipe(model={"family": "odd"})
    with pytest.raises(LookupError, match="lost in training"):
        fedloom.run(document, models={"odd": build}, out=tmp_path / "run", workers=2)


def parcels() -> list[Parcel]:
    shared = torch.arange(6.0).view(1, 2, 3).expand(4, 2, 3)
    return [
        {},
        {"empty": {}},
        {"weights": {"a/b": torch.randn(2, 3), "": torch.tensor(1.5)}, "labels": {"seen": torch.tensor([True, False])}},
        {"weights": {"shared": shared, "own": torch.randn(4, 2).double()}, "count": {"n": torch.arange(4)}},
        {"weights": {"one": shared[0], "two": shared[0]}},
    ]


@pytest.mark.parametrize("number", range(5))
def test_a_parcel_comes_back_as_it_was(number: int, parcels_equal: Callable[[Parcel, Parcel], bool]) -> None:
    parcel = parcels()[number]
    assert parcels_equal(unpack(pack(parcel), list(parcel)), parcel)


def test_what_all_devices_share_is_sent_once() -> None:
    shared = torch.zeros(1, 1000).expand(16, 1000)
    assert len(pack({"weights": {"w": shared}})) < 2 * 4000
    back = unpack(pack({"weights": {"w": shared}}), ["weights"])["weights"]["w"]
    assert back.shape == (16, 1000) and back.stride(0) == 0


@pytest.mark.slow
@pytest.mark.usefixtures("double")
def test_every_method_learns_the_same_in_other_processes(
    method: Any, family: str, world_for: Callable[..., Any], parcels_equal: Callable[[Parcel, Parcel], bool]
) -> None:
    """To the bit, on every model family: the only difference is where the work was done."""
    place = world_for(method, family, sizes=(8, 5, 9, 8, 5, 7))
    here, there = place.engine(method), place.engine(method)
    pool = ProcessPool(there, place.fleet, lambda address: getattr(method, address[0]), workers=2)
    try:
        assert parcels_equal(place.play(method, here), place.play(method, pool))
    finally:
        pool.close()
    assert here.client_states.committed.keys() == there.client_states.committed.keys()
    for name, memory in here.client_states.committed.items():
        assert parcels_equal(memory, there.client_states.committed[name])
