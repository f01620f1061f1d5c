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
from fedloom.engines import WorkerContext, WorkerPool, worker_pool
from fedloom.methods.standalone import Standalone
from fedloom.recipe.load import load
from fedloom.recipe.registries import Registries
from fedloom.runs.build import assemble
from fedloom.runs.folder import read_manifest, read_rows
from fedloom.runs.recorder import record_rounds
from fedloom.tensors import Parcel, pack, unpack
from tests.conftest import methods_and_families
from tests.pickles import pickles_heard

Recipe = Callable[..., dict[str, Any]]


def with_kernels(kernels: str) -> dict[str, Any]:
    if kernels == "lanes":
        pytest.importorskip("numba")
    return {"engine": {"kernels": kernels}}


@pytest.mark.parametrize(
    ("method", "kernels"),
    [("heterofl", "torch"), ("standalone", "torch"), pytest.param("heterofl", "lanes", marks=pytest.mark.slow)],
)
def test_run_any_number_of_workers_gives_one_sha256(method: str, kernels: str, recipe: Recipe, tmp_path: Path) -> None:
    document = recipe(method={"name": method}, **with_kernels(kernels))
    runs = [fedloom.run(document, out=tmp_path / str(workers), workers=workers) for workers in (1, 2, 4)]
    assert set(read_manifest(runs[0].folder)["kernels"].values()) == {kernels}
    assert len({read_manifest(run.folder)["sha256"] for run in runs}) == 1
    first, *others = (list(read_rows(run.folder)) for run in runs)
    assert all(rows == first for rows in others)


@pytest.mark.parametrize(
    ("deaths", "kernels"),
    [
        (3, "torch"),
        (3, "lanes"),
        *(pytest.param(40, kernels, marks=pytest.mark.slow) for kernels in ("torch", "lanes")),
    ],
)
def test_pool_killed_workers_change_no_bits(deaths: int, kernels: str, recipe: Recipe, tmp_path: Path) -> None:
    """Nor do workers that are killed again and again: their blocks then run in the parent."""
    document = recipe(**with_kernels(kernels))
    whole = fedloom.run(document, out=tmp_path / "whole")
    experiment = assemble(load(document, Registries()), Registries(), tmp_path, workers=2)
    pool = experiment.simulator.executor
    assert isinstance(pool, WorkerPool)
    send, killed = pool._send, []

    def send_and_kill(worker: Any, block: Any) -> None:
        send(worker, block)
        if len(killed) < deaths:
            killed.append(worker.process.pid)
            os.kill(worker.process.pid, signal.SIGKILL)

    pool._send = send_and_kill  # type: ignore[method-assign]
    for _ in record_rounds(experiment, tmp_path / "killed"):
        pass
    assert len(killed) >= 3
    assert read_manifest(tmp_path / "killed")["sha256"] == read_manifest(whole.folder)["sha256"]


def test_pool_closed_with_run_leaves_no_process(recipe: Recipe, tmp_path: Path) -> None:
    experiment = assemble(load(recipe(), Registries()), Registries(), tmp_path, workers=2)
    pool = experiment.simulator.executor
    assert isinstance(pool, WorkerPool)
    spawned: list[int] = []
    for _ in record_rounds(experiment, tmp_path / "run"):
        spawned += [worker.process.pid for worker in pool.pool if worker.process.pid]
    assert len(set(spawned)) == 2  # not one a round
    for process in set(spawned):
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


def test_pool_hands_out_next_block_before_a_result(recipe: Recipe, tmp_path: Path) -> None:
    """No worker waits for what becomes of a result."""
    document = recipe(engine={"devices_per_block": 1})
    experiment = assemble(load(document, Registries()), Registries(), tmp_path, workers=2)
    pool = experiment.simulator.executor
    assert isinstance(pool, WorkerPool)
    run, busy = pool.run_blocks, []

    def watch(blocks: list[Any], *others: Any) -> Any:
        for number, found in enumerate(run(blocks, *others), 1):
            left = len(blocks) - number
            busy.append((sum(worker.block is not None for worker in pool.pool), min(2, left)))
            yield found

    pool.run_blocks = watch  # type: ignore[method-assign]
    for _ in record_rounds(experiment, tmp_path / "run"):
        pass
    assert any(expected == 2 for _, expected in busy)
    assert all(found == expected for found, expected in busy)


class Haunting:
    """Garbage that only the process it belongs to may collect, such as sessions that wait for their threads."""

    def __init__(self, seen: Path):
        self.seen, self.owner, self.itself = seen, os.getpid(), self

    def __del__(self) -> None:
        if os.getpid() != self.owner:
            (self.seen / str(os.getpid())).touch()


def test_worker_garbage_of_parent_is_not_collected(
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


def test_pool_run_reads_no_pickle(recipe: Recipe, tmp_path: Path) -> None:
    """What travels is JSON and safetensors."""
    with pickles_heard() as heard:
        fedloom.run(recipe(), out=tmp_path / "run", workers=2)
    assert heard == []


def test_pool_error_in_task_is_raised_in_parent(recipe: Recipe, tmp_path: Path) -> None:
    def build(*, input_shape: tuple[int, ...], classes: int, width: float = 1.0) -> torch.nn.Module:
        class Net(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.classifier = torch.nn.Linear(64, classes)

            def forward(self, x: Tensor) -> Tensor:
                if self.training and len(x) > 2:  # a recipe's check tries a small batch
                    raise LookupError("lost in training")
                return self.classifier(x.flatten(1))

        return Net()

    document = recipe(model={"family": "odd"})
    with pytest.raises(LookupError, match="lost in training"):
        registries = Registries().with_names(models={"odd": build})
        fedloom.run(document, registries=registries, out=tmp_path / "run", workers=2)


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
def test_unpack_packed_parcel_is_equal(number: int, parcels_equal: Callable[[Parcel, Parcel], bool]) -> None:
    parcel = parcels()[number]
    assert parcels_equal(unpack(pack(parcel), list(parcel)), parcel)


def test_pack_shared_tensor_is_written_once() -> None:
    shared = torch.zeros(1, 1000).expand(16, 1000)
    assert len(pack({"weights": {"w": shared}})) < 2 * 4000
    back = unpack(pack({"weights": {"w": shared}}), ["weights"])["weights"]["w"]
    assert back.shape == (16, 1000) and back.stride(0) == 0


@pytest.mark.slow
@pytest.mark.usefixtures("double")
@pytest.mark.parametrize(
    ("method", "family"),
    [pair for pair in methods_and_families() if not pair.marks or isinstance(pair.values[0], Standalone)],
)
def test_pool_every_method_gives_same_bits(
    method: Any, family: str, world_for: Callable[..., Any], parcels_equal: Callable[[Parcel, Parcel], bool]
) -> None:
    """To the bit, every method on its family and one on all: the only difference is where the work was done."""
    place = world_for(method, family, sizes=(8, 5, 9, 8, 5, 7))
    pool = WorkerPool(2)
    here, there = place.engine(method), place.engine(method, executor=pool)
    pool.register(WorkerContext(there, place.fleet, lambda ref: getattr(method, ref[0])))
    try:
        assert parcels_equal(place.play(method, here), place.play(method, there))
    finally:
        pool.close()
    assert here.client_states.committed.keys() == there.client_states.committed.keys()
    for name, memory in here.client_states.committed.items():
        assert parcels_equal(memory, there.client_states.committed[name])
