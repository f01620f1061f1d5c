"""Every method learns the same with every model family in every batching mode.

Compared in double precision, where rounding is far below the effect of any mistake.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.client import Schedule
from fedloom.engines import InlineExecutor, WorkerContext, WorkerPool
from fedloom.methods import Method
from fedloom.methods.fedavg import FedAvg
from fedloom.methods.heterofl import HeteroFL
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
from fedloom.tensors import Parcel
from fedloom.testing import TinyWorld
from fedloom.testing.methods import largest_change
from tests.conftest import methods_and_families, with_lanes

SIZES = (8, 5, 9, 8, 12, 7)  # unequal, so that some devices finish before others of their block
LABELS = [[0, 1], [1, 2], [0, 1, 2, 3], [3], [0, 2], [1, 3]]
ROUNDS = 2

inside = import_module("fedloom.models.batching")


@dataclass(frozen=True)
class Tolerance:
    steps: int  # the least number of optimizer steps on every device
    tolerance: float

    @property
    def schedule(self) -> Schedule:
        return Schedule(batch_size=4, epochs=self.steps // (2 * ROUNDS), last="wrap")  # 5 examples make 2 batches


ORDINARY = Tolerance(20, 1e-10)
CHAOTIC = {
    "mobilenet": Tolerance(12, 1e-8),
    "splitnet": Tolerance(12, 1e-8),
}  # families in which rounding differences grow from step to step


GROWING = {"fedkd": Tolerance(8, 1e-10)}  # methods in which they do: its losses are divided by others that get small


# its gradient after a step doubles what a family does: from 4 to 8 to 12 steps 1e-13, 5e-12 and 2e-8 in lanes
BOTH = {("splitnet", "perfedavg"): Tolerance(8, 1e-10)}


def tolerance_of(family: str, method: Method) -> Tolerance:
    name = type(method).__name__.lower()
    return BOTH.get((family, name)) or CHAOTIC.get(family) or GROWING.get(name, ORDINARY)


@dataclass(frozen=True)
class Result:
    server: Parcel
    device_states: Mapping[str, Parcel]
    batched: bool  # whether any asked device can share a block


@dataclass
class CountingMode:
    """A batching mode that counts the training steps it runs for several devices at once."""

    way: BatchingMode
    steps: int = 0

    def __call__(self, module: FunctionalModule) -> BlockForward:
        block = self.way(module)

        def run(weights: Mapping[str, Tensor], x: Tensor, seeds: Sequence[int] | None = None) -> BlockOutput:
            self.steps += module.module.training and len(x) > 1
            return block(weights, x, seeds)

        return run


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[BatchingMode], CountingMode]]:
    """Force one batching mode for every block, without a fallback."""
    caches = (
        inside._functional_module,
        inside._single_device_forward,
        inside._multi_device_forward,
        inside.batching_mode,
    )

    def forget() -> None:
        for cache in caches:
            cache.cache_clear()

    def force(way: BatchingMode) -> CountingMode:
        counting = CountingMode(way)
        monkeypatch.setattr(inside, "batching_mode", lambda model, training, tracking: (counting, ()))
        forget()
        return counting

    yield force
    forget()


@pytest.fixture
def sim(method: Method, family: str, world_for: Callable[..., Any], double: None) -> Any:
    return world_for(method, family, sizes=SIZES, labels=LABELS, schedule=tolerance_of(family, method).schedule)


@pytest.fixture
def learn(method: Method, sim: Any, meddling: Callable[..., Any]) -> Callable[..., Result]:
    def play(block: int, sim: TinyWorld = sim) -> Result:
        engine = sim.engine(method, devices_per_block=block)
        recorder = meddling(engine, list)
        try:
            server = sim.play(method, recorder, ROUNDS)
            device_states = dict(engine.client_states.committed)
        finally:
            engine.close()
        batched = any(not reply.device.pooled_from for reply in recorder.delivered)
        assert sim.refusals == []
        return Result(server, device_states, batched)

    return play


@pytest.fixture(scope="module")
def known() -> dict[tuple[Method, str], Result]:
    """Results of running device by device."""
    return {}


@pytest.fixture
def expected(method: Method, family: str, learn: Callable[..., Result], known: dict[Any, Result]) -> Result:
    if (method, family) not in known:
        known[method, family] = learn(block=1)
    return known[method, family]


@pytest.fixture
def agree(
    method: Method, family: str, expected: Result, difference: Callable[[Parcel, Parcel], float]
) -> Callable[[Result], None]:
    def check(found: Result) -> None:
        assert difference(found.server, expected.server) <= tolerance_of(family, method).tolerance
        assert found.device_states.keys() == expected.device_states.keys()
        for name, parcel in found.device_states.items():
            assert difference(parcel, expected.device_states[name]) <= tolerance_of(family, method).tolerance

    return check


@pytest.fixture
def agrees_in_mode(
    method: Method, family: str, sim: Any, learn: Callable[..., Result], agree: Callable[[Result], None],
    forced: Callable[[BatchingMode], CountingMode],
) -> Callable[[BatchingMode], None]:  # fmt: skip
    def check(way: BatchingMode) -> None:
        counting = forced(way)
        unfit = way is fold_devices and not sim.fleet.global_model.is_foldable()
        try:
            found = learn(block=len(SIZES))
        except RuntimeError:
            assert unfit
            return
        assert not (unfit and found.batched)
        agree(found)
        # a pooled device runs alone
        assert counting.steps >= tolerance_of(family, method).steps if found.batched else counting.steps == 0

    return check


@pytest.mark.parametrize(
    "way", [fold_devices, pytest.param(vmap_devices, marks=pytest.mark.slow)], ids=["folded", "vmapped"]
)
def test_batched_devices_learn_as_alone(
    way: BatchingMode, agrees_in_mode: Callable[[BatchingMode], None], method: Method, family: str
) -> None:
    agrees_in_mode(way)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "family"), [pair for pair in methods_and_families() if not pair.marks])
def test_looped_devices_learn_as_alone(
    agrees_in_mode: Callable[[BatchingMode], None], method: Method, family: str
) -> None:
    """With the families that methods were made for: this mode calls a net as it is, whatever it consists of."""
    agrees_in_mode(loop_over_devices)


@pytest.mark.slow  # tests/client/test_lane_optimizers.py tries a method in every run of the tests
def test_devices_in_lanes_learn_as_alone(
    sim: TinyWorld, learn: Callable[..., Result], agree: Callable[[Result], None]
) -> None:
    """With lane kernels wherever the family has them; the reference is torch's kernels, device by device."""
    pytest.importorskip("numba")
    lanes = with_lanes(sim)
    if not any(tier.model.trains_interleaved() for tier in lanes.fleet.tiers):
        assert all(tier.model.fallback_reasons() for tier in lanes.fleet.tiers)
        return
    agree(learn(block=len(SIZES), sim=lanes))


MODES = {"folded": fold_devices, "vmapped": vmap_devices, "looped": loop_over_devices}


@pytest.mark.parametrize(
    ("way", "family"),
    [*((way, "convnet") for way in MODES), *(("lanes", family) for family in ("convnet", "mobilenet", "mlp"))],
)
def test_diverged_device_is_refused_and_changes_no_other(
    way: str, family: str, world: Callable[..., TinyWorld], meddling: Callable[..., Any],
    forced: Callable[[BatchingMode], CountingMode],
) -> None:  # fmt: skip
    """One of six devices that share a block trains on inputs that are not numbers, in single precision."""
    if way == "lanes":
        pytest.importorskip("numba")
    uploads, refused = [], []
    for broken in (False, True):
        sim = world(family, sizes=(8,) * 6)
        train = sim.dataset.train
        x = train.x.float() / 255
        sim = replace(sim, dataset=replace(sim.dataset, train=replace(train, x=x)))
        x[16:24] *= torch.nan if broken else 1  # of the third device, after the data set has been checked
        if way == "lanes":
            sim = with_lanes(sim)
            assert all(tier.model.trains_interleaved() for tier in sim.fleet.tiers)
        else:
            counting = forced(MODES[way])
        recorder = meddling(sim.engine(FedAvg(), devices_per_block=6), list)
        server = sim.play(FedAvg(), recorder, rounds=1)
        assert way == "lanes" or counting.steps > 0
        assert all(bool(torch.isfinite(weight).all()) for weight in server["weights"].values())
        uploads.append({reply.device.name: reply.upload["weights"] for reply in recorder.delivered})
        refused.append([(refusal.device, refusal.code) for refusal in sim.refusals])
    diverged = sorted(uploads[0])[2]
    assert refused == [[], [(diverged, "NONFINITE")]]
    assert uploads[1].keys() == uploads[0].keys() - {diverged}
    for name, weights in uploads[1].items():
        assert all(torch.equal(weight, uploads[0][name][key]) for key, weight in weights.items()), name


def test_training_changes_compared_state(method: Method, sim: Any, expected: Result) -> None:
    """Training changes the compared state by far more than the tolerance."""
    assert largest_change(method, sim, expected.server, expected.device_states) > 1e-3


class ValueDependent(nn.Module):
    """Its control flow depends on tensor values, which vmap does not allow."""

    def __init__(self) -> None:
        super().__init__()
        self.classifier = nn.Linear(36, 4)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.classifier(x.flatten(1))
        return made if x.sum() > 0 else -made


class Regularized(nn.Module):
    """A convolutional net of a user's: dropout of maps and numbers, and whole examples dropped in a branch."""

    def __init__(self, width: float):
        super().__init__()
        channels = int(8 * width)
        self.first, self.second = nn.Conv2d(1, channels, 3), nn.Conv2d(channels, channels, 3, padding=1)
        self.branch, self.drop, self.classifier = DropPath(), nn.Dropout(0.2), nn.Linear(16 * channels, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout2d(self.first(x).relu(), 0.2, self.training)
        x = x + self.branch(self.second(x))
        made: Tensor = self.classifier(self.drop(x.flatten(1)))
        return made


class DropPath(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.empty(len(x), 1, 1, 1, dtype=x.dtype).bernoulli_(0.7) / 0.7 if self.training else x


@pytest.mark.parametrize("method", [FedAvg(), HeteroFL()], ids=lambda method: type(method).__name__)
def test_net_with_dropout_learns_the_same_in_any_block_and_process(
    method: Method, double: None, world: Callable[..., Any], difference: Callable[[Parcel, Parcel], float]
) -> None:
    """Devices draw the same masks alone, in blocks of two and of all, and in worker processes."""
    widths = (1.0,) if isinstance(method, FedAvg) else (1.0, 0.5)
    sizes = [(f"w{width}", build_model("regularized", Regularized, {"width": width}, (1, 6, 6), 4)) for width in widths]
    sim = world(models=sizes, sizes=SIZES, labels=LABELS, schedule=ORDINARY.schedule)
    assert all(model.fallback_reasons() == () and inside.is_stochastic(model) for _, model in sizes)
    found = []
    for block, workers in ((1, 1), (2, 1), (len(SIZES), 1), (2, 2)):
        executor = WorkerPool(workers) if workers > 1 else InlineExecutor()
        engine = sim.engine(method, devices_per_block=block, executor=executor)
        executor.register(WorkerContext(engine, sim.fleet, lambda ref: method.find(*ref)))
        try:
            found.append(sim.play(method, engine, ROUNDS))
        finally:
            engine.close()
    assert all(difference(result, found[0]) <= ORDINARY.tolerance for result in found[1:])
    assert difference(found[3], found[1]) == 0  # another number of processes changes no bit
    assert largest_change(method, sim, found[0], {}) > 1e-3


def test_slow_tier_is_named_once_with_its_reason(world: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    sim = world(models=[("small", build_model("slow", ValueDependent, {}, (1, 6, 6), 4))])
    for _ in range(2):
        sim.play(FedAvg(), sim.engine(FedAvg()))
    assert [(record.levelname, record.getMessage()) for record in caplog.records if "slower" in record.msg] == [
        (
            "WARNING",
            "tier small trains one device at a time, which is slower: "
            "ValueDependent branches on the values of a tensor",
        )
    ]


class AlwaysDropping(nn.Module):
    """Forgets to pass `training`, so that it also drops units in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.classifier = nn.Linear(36, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.classifier(F.dropout(self.body(x.flatten(1)), 0.5))
        return made


def test_tier_that_draws_in_evaluation_is_named_once(
    world: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    sim = world(models=[("small", build_model("always", AlwaysDropping, {}, (1, 6, 6), 4))])
    for block in (16, 1, 16):
        sim.play(FedAvg(), sim.engine(FedAvg(), devices_per_block=block))
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        "tier small is evaluated at random: AlwaysDropping draws in evaluation too; "
        "pass training=self.training to dropout"
    ]


def test_forced_batching_mode_has_no_fallback(world: Callable[..., Any], forced: Any) -> None:
    """Otherwise the comparisons above could compare a mode with itself."""
    sim = world(models=[("a", build_model("value_dependent", ValueDependent, {}, (1, 6, 6), 4))])
    forced(vmap_devices)
    with pytest.raises(RuntimeError, match="vmap"):
        sim.play(FedAvg(), sim.engine(FedAvg()))
