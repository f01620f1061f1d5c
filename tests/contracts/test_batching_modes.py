"""Whichever way devices are run, every method learns the same with every model family.

Compared in double precision, where rounding is far below what any mistake would show.
"""

import multiprocessing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import pytest
from torch import Tensor, nn

from fedloom.client import Schedule
from fedloom.engines import ProcessPool
from fedloom.methods import Method
from fedloom.methods.fedavg import FedAvg
from fedloom.models import build_model
from fedloom.models.batching import (
    BatchingMode,
    BlockForward,
    BlockOutput,
    FunctionalModule,
    fold_devices,
    loop_over_devices,
    vmap_devices,
)
from fedloom.tensors import Parcel, layout

SIZES = (8, 5, 9, 8, 12, 7)  # unequal, so that some devices are done before others of their block
LABELS = [[0, 1], [1, 2], [0, 1, 2, 3], [3], [0, 2], [1, 3]]
ROUNDS = 2

inside = import_module("fedloom.models.batching")


@dataclass(frozen=True)
class Demand:
    steps: int  # of the optimizer, at least, on every device
    tolerance: float

    @property
    def schedule(self) -> Schedule:
        return Schedule(batch_size=4, epochs=self.steps // (2 * ROUNDS), last="wrap")  # 5 examples make 2 batches


ORDINARY = Demand(20, 1e-10)
CHAOTIC = {
    "mobilenet": Demand(12, 1e-8),
    "splitnet": Demand(12, 1e-8),
}  # families where differences of rounding grow from step to step


def demand(family: str) -> Demand:
    return CHAOTIC.get(family, ORDINARY)


@dataclass(frozen=True)
class Learned:
    server: Parcel
    memories: Mapping[str, Parcel]
    company: bool  # whether any device was asked that can share a block


@dataclass
class Watched:
    """A way to run a block, and how many steps of training it was used for with several devices at once."""

    way: BatchingMode
    steps: int = 0

    def __call__(self, module: FunctionalModule) -> BlockForward:
        block = self.way(module)

        def run(weights: Mapping[str, Tensor], x: Tensor) -> BlockOutput:
            self.steps += module.module.training and len(x) > 1
            return block(weights, x)

        return run


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[BatchingMode], Watched]]:
    """Have every block run one way, right or wrong: no slower one steps in."""
    caches = (
        inside._functional_module,
        inside._single_device_forward,
        inside._multi_device_forward,
        inside.batching_mode,
    )

    def forget() -> None:
        for cache in caches:
            cache.cache_clear()

    def force(way: BatchingMode) -> Watched:
        watched = Watched(way)
        monkeypatch.setattr(inside, "batching_mode", lambda model, training, tracking: (watched, ()))
        forget()
        return watched

    yield force
    forget()


@pytest.fixture
def place(method: Method, family: str, world_for: Callable[..., Any], double: None) -> Any:
    return world_for(method, family, sizes=SIZES, labels=LABELS, schedule=demand(family).schedule)


@pytest.fixture
def learn(method: Method, place: Any, meddling: Callable[..., Any]) -> Callable[..., Learned]:
    def play(block: int, workers: int = 1) -> Learned:
        alone = place.engine(method, devices_per_block=block)
        pool = ProcessPool(alone, place.fleet, lambda address: method.find(*address), workers)
        engine = pool if workers > 1 else alone
        listening, others = meddling(engine, list), set(multiprocessing.active_children())
        try:
            server = place.play(method, listening, ROUNDS)
            memories = dict(alone.client_states.committed)
            hired = set(multiprocessing.active_children()) - others
        finally:
            engine.close()
        company = any(not reply.device.pooled_from for reply in listening.delivered)
        assert len(hired) == (workers if workers > 1 and company else 0)
        assert place.refusals == []
        return Learned(server, memories, company)

    return play


@pytest.fixture(scope="module")
def known() -> dict[tuple[Method, str], Learned]:
    """What was learned device by device."""
    return {}


@pytest.fixture
def expected(method: Method, family: str, learn: Callable[..., Learned], known: dict[Any, Learned]) -> Learned:
    if (method, family) not in known:
        known[method, family] = learn(block=1)
    return known[method, family]


@pytest.fixture
def agree(family: str, expected: Learned, difference: Callable[[Parcel, Parcel], float]) -> Callable[[Learned], None]:
    def check(found: Learned) -> None:
        assert difference(found.server, expected.server) <= demand(family).tolerance
        assert found.memories.keys() == expected.memories.keys()
        for name, parcel in found.memories.items():
            assert difference(parcel, expected.memories[name]) <= demand(family).tolerance

    return check


@pytest.mark.parametrize(
    "way", [fold_devices, *(pytest.param(way, marks=pytest.mark.slow) for way in (vmap_devices, loop_over_devices))]
)
def test_batched_devices_learn_as_alone(
    way: BatchingMode,
    family: str,
    place: Any,
    learn: Callable[..., Learned],
    agree: Callable[[Learned], None],
    forced: Callable[[BatchingMode], Watched],
) -> None:
    watched = forced(way)
    unfit = way is fold_devices and not place.fleet.global_model.is_foldable()
    try:
        found = learn(block=len(SIZES))
    except RuntimeError:
        assert unfit
        return
    assert not (unfit and found.company)
    agree(found)
    # a device that gathers others is alone, and one that draws random numbers trains alone
    shared = found.company and not any(inside.is_stochastic(tier.model) for tier in place.fleet.tiers)
    assert watched.steps >= demand(family).steps if shared else watched.steps == 0


@pytest.mark.slow  # tests/engines/test_worker_pool.py tries every method
def test_worker_processes_learn_as_alone(learn: Callable[..., Learned], agree: Callable[[Learned], None]) -> None:
    agree(learn(block=2, workers=2))


def test_training_changes_compared_state(
    method: Method, place: Any, expected: Learned, difference: Callable[[Parcel, Parcel], float]
) -> None:
    """Training has moved what is compared by far more than it may differ."""
    first = method.start(place.fleet, place.seed)
    moved = [difference(first, expected.server)] if layout(first) == layout(expected.server) else []
    for device in place.fleet.devices(1):
        first, last = method.init_client(device, place.seed), expected.memories.get(device.name, {})
        if layout(first) == layout(last):
            moved.append(difference(first, last))
    assert max(moved) > 1e-3


class Undecided(nn.Module):
    """What it does depends on its numbers, which no device can ask for in a vmap."""

    def __init__(self) -> None:
        super().__init__()
        self.classifier = nn.Linear(36, 4)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.classifier(x.flatten(1))
        return made if x.sum() > 0 else -made


def test_forced_batching_mode_has_no_fallback(world: Callable[..., Any], forced: Any) -> None:
    """Or the comparisons above could compare a way with itself."""
    place = world(models=[("a", build_model("undecided", Undecided, {}, (1, 6, 6), 4))])
    forced(vmap_devices)
    with pytest.raises(RuntimeError, match="vmap"):
        place.play(FedAvg(), place.engine(FedAvg()))
