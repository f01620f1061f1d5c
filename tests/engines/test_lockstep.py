"""Experiments side by side: devices share blocks across them, and every experiment gets the bits it gets alone."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fedloom
from fedloom.client import (
    Adam,
    Batch,
    Client,
    ClientResult,
    Optimizer,
    Schedule,
    Sgd,
    Task,
    UnequalNumbersError,
    dummy_loss,
    gradient,
    join_optimizers,
    joining_key,
    shaped,
)
from fedloom.engines import InProcess, Lockstep, WorkerPool, in_process, worker_pool
from fedloom.engines.in_process import Block, Job, is_block_invariant, make_blocks
from fedloom.fleet import Request
from fedloom.methods import Method
from fedloom.models import Model, StepSeeds
from fedloom.recipe.load import load
from fedloom.recipe.registries import Registries
from fedloom.runs.folder import read_manifest, read_rows
from fedloom.studies.compare import Comparison, plan_comparison
from fedloom.tensors import Parcel
from tests.conftest import with_lanes

CONTROLS = ["standalone", "small-for-all", "all-large"]


def planned(home: Path, document: dict[str, Any], workers: int = 1) -> Comparison:
    return plan_comparison(load(document, Registries()), Registries(), 2, CONTROLS, home, home, workers)


def watched(seen: list[Block], monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep every block that runs."""
    plain = WorkerPool.run_blocks

    def run_blocks(self: WorkerPool, blocks: list[Block], *more: Any) -> Iterator[tuple[Block, ClientResult]]:
        seen.extend(blocks)
        return plain(self, blocks, *more)

    monkeypatch.setattr(WorkerPool, "run_blocks", run_blocks)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    "hidden",
    [pytest.param([16, 32], id="whole vectors"), pytest.param([3, 5], id="odd channels")],
)
def test_arm_in_lockstep_has_bits_of_running_alone(
    hidden: list[int],
    workers: int,
    recipe: Callable[..., dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    document, blocks = recipe(model={"hidden": hidden}), list[Block]()
    watched(blocks, monkeypatch)
    arms = planned(tmp_path / "together", document, workers)
    for _ in arms.rounds():
        pass
    shared = [block for block in blocks if len({id(member.job.engine) for member in block.members}) > 1]
    assert bool(shared) == (hidden == [16, 32])
    for arm, experiments in arms.experiments.items():
        for experiment, folder in zip(experiments, arms.folders(arm), strict=True):
            alone = fedloom.run(experiment.loaded.recipe.document(), out=tmp_path / "alone" / arm / folder.name)
            assert read_manifest(folder)["sha256"] == read_manifest(alone.folder)["sha256"]
            assert list(read_rows(folder)) == alone.rows()


# as wide as this, layers give a device the same bits in other company, so that experiments do share blocks
WIDE: dict[str, dict[str, Any]] = {
    "bottleneck": {"stem": 16, "planes": (16,), "blocks": (1,)},
    "convnet": {"hidden": (16, 32)},
    "preactresnet": {"hidden": (16, 32)},
    "splitnet": {"channels": 16},
}


def assert_bits_of_running_alone(
    method: Method,
    place: Any,
    parcels_equal: Callable[[Parcel, Parcel], bool],
    optimizers: tuple[Optimizer | None, Optimizer | None] = (None, None),
) -> None:
    """Two experiments that differ in their seed: the server's state, and what the devices remember."""

    def played(engine: InProcess, seed: int) -> Iterator[Parcel]:
        server = method.start(place.fleet, seed)
        for number in (1, 2):
            server = method.round(server, place.context(engine, number))
            engine.commit(number)
            kept = {device.name: engine.client_states.read(device) for device in place.fleet.devices(1)}
            yield {**server, **{f"{who} {name}": one for who, parcel in kept.items() for name, one in parcel.items()}}

    lockstep = Lockstep(WorkerPool(1))
    own = [replace(place, optimizer=optimizer or place.optimizer) for optimizer in optimizers]
    engines = [own[seed].engine(method, seed=seed, executor=lockstep) for seed in (0, 1)]
    together = dict(lockstep.steps({str(seed): played(engines[seed], seed) for seed in (0, 1)}))  # the last of each
    for seed in (0, 1):
        *_, alone = played(own[seed].engine(method, seed=seed), seed)
        assert parcels_equal(together[str(seed)], alone)


def test_method_in_lockstep_has_bits_of_running_alone(
    method: Method, world_for: Callable[..., Any], parcels_equal: Callable[[Parcel, Parcel], bool]
) -> None:
    family = world_for(method).fleet.global_model.family
    place = world_for(method, family, sizes=(8, 8, 6, 6, 6), **WIDE[family])
    other = Sgd(0.05, place.optimizer.momentum / 2, place.optimizer.weight_decay)
    assert_bits_of_running_alone(method, place, parcels_equal, (None, other))


@pytest.mark.parametrize("kernels", ["torch", "lanes"])
@pytest.mark.parametrize(("strengths", "shared"), [((0.1, 2.0), True), ((0.1, 0.0), False)])
def test_lockstep_unequal_strengths_share_blocks_and_have_bits_of_running_alone(
    strengths: tuple[float, float], shared: bool, kernels: str, world: Callable[..., Any],
    parcels_equal: Callable[[Parcel, Parcel], bool], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Two experiments of FedProx, each with its own proximal strength; none at all is another computation."""
    blocks, place = list[Block](), world(sizes=(9, 8, 6), hidden=(16, 32))
    if kernels == "lanes":
        pytest.importorskip("numba")
        place = with_lanes(place)
    methods = [Registries().methods["fedprox"](proximal=strength) for strength in strengths]

    def played(method: Method, executor: Any = None) -> Iterator[Parcel]:
        engine = place.engine(method, **({"executor": executor} if executor else {}))
        yield place.play(method, engine)

    watched(blocks, monkeypatch)
    lockstep = Lockstep(WorkerPool(1))
    together = dict(lockstep.steps({str(n): played(method, lockstep) for n, method in enumerate(methods)}))
    assert any(len({id(member.job.engine) for member in block.members}) > 1 for block in blocks) == shared
    alone = [next(played(method)) for method in methods]
    assert all(parcels_equal(together[str(n)], one) for n, one in enumerate(alone))
    assert not parcels_equal(*alone)


@pytest.mark.slow
def test_method_in_lanes_in_lockstep_has_bits_of_running_alone(
    method: Method, world_for: Callable[..., Any], parcels_equal: Callable[[Parcel, Parcel], bool]
) -> None:
    """With channels that do not fill vectors too: a lane does not depend on the others."""
    pytest.importorskip("numba")
    place = with_lanes(world_for(method, sizes=(8, 8, 6, 6, 6)))
    other = Sgd(0.05, place.optimizer.momentum / 2, place.optimizer.weight_decay)
    assert_bits_of_running_alone(method, place, parcels_equal, (None, other))


@pytest.mark.parametrize(
    "optimizers",
    [
        (Sgd(0.1, 0.9, 1e-3, 1.0), Sgd(0.02, 0.5, 1e-2, 0.5)),
        (Sgd(0.1, 0.9, 1e-3), Sgd(0.1, 0.9, 1e-3, 0.5)),
        (Adam(0.1, weight_decay=1e-3), Adam(0.03, weight_decay=1e-2)),
        (Adam(0.1, clip_norm=1.0), Adam(0.03, clip_norm=0.1)),
    ],
)
@pytest.mark.parametrize("kernels", ["torch", "lanes"])
def test_lockstep_unequal_optimizers_have_bits_of_running_alone(
    kernels: str,
    optimizers: tuple[Optimizer, Optimizer],
    world: Callable[..., Any],
    parcels_equal: Callable[[Parcel, Parcel], bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Devices of several experiments share a block, each with its own numbers."""
    blocks = list[Block]()
    watched(blocks, monkeypatch)
    method, hidden = Registries().methods["fedavg"](), (16, 32) if kernels == "torch" else (3, 5)
    place = world(sizes=(9, 8, 6), hidden=hidden, schedule=Schedule(4))
    if kernels == "lanes":
        pytest.importorskip("numba")
        place = with_lanes(place)
        assert all(tier.model.trains_interleaved() for tier in place.fleet.tiers)
    assert_bits_of_running_alone(method, place, parcels_equal, optimizers)
    shared = any(len({id(member.job.engine) for member in block.members}) > 1 for block in blocks)
    assert shared == (joining_key(optimizers[0]) == joining_key(optimizers[1]))


def test_lockstep_task_that_reads_one_learning_rate_gets_its_own(world: Callable[..., Any], lockstep: Lockstep) -> None:
    """Devices of unequal rates run apart if a task takes the rate for one number; each has its own upload and state."""
    place, seen = world(sizes=(8, 8, 8), hidden=(16, 32)), list[float]()

    def run(client: Client, inbox: Parcel) -> ClientResult:
        rates = torch.full((len(client.seen_labels), 1), client.optimizer.lr)
        assert client.learning_rates.tolist() == pytest.approx(rates[:, 0].tolist())
        seen.append(client.optimizer.lr)
        return ClientResult({"rates": {"lr": rates}}, {"own": {"lr": 2 * rates}})

    task = Task("reads", run, {"rates": shaped(lr=((1,), torch.float32))}, batch_key="one")
    rates, found, kept = {"a": 0.5, "b": 0.25}, {}, {}

    def asks(name: str) -> Iterator[int]:
        engine = place.engine(Registries().methods["fedavg"](), executor=lockstep, optimizer=Sgd(rates[name]))
        devices = place.fleet.devices(1)[: 1 if name == "a" else 3]
        replies = list(engine.ask(Request(task, {device: {} for device in devices}, 1)))
        engine.commit(1)
        found[name] = [float(reply.upload["rates"]["lr"]) for reply in replies]
        kept[name] = [float(engine.client_states.read(device)["own"]["lr"]) for device in devices]
        yield 1

    list(lockstep.steps({name: asks(name) for name in rates}))
    assert sorted(seen) == [0.25, 0.5]
    assert found == {"a": [0.5], "b": [0.25] * 3}
    assert kept == {"a": [1.0], "b": [0.5] * 3}


def test_joined_optimizer_has_no_single_learning_rate() -> None:
    joined = join_optimizers([Sgd(0.1), Sgd(0.2)])
    with pytest.raises(UnequalNumbersError, match=r"client\.learning_rates"):
        _ = joined.lr
    assert join_optimizers([Sgd(0.1), Sgd(0.1)]) == Sgd(0.1)
    assert join_optimizers([Sgd(0.1, 0.5), Sgd(0.1, 0.9)]).lr == 0.1


@pytest.mark.parametrize("batch", [2, 4, 20])
def test_lockstep_any_batch_size_has_bits_of_running_alone(
    batch: int, world: Callable[..., Any], parcels_equal: Callable[[Parcel, Parcel], bool]
) -> None:
    """With batches of two, devices with this net keep their bits in any company; with more, in none."""
    method = Registries().methods["standalone"]()
    place = world("mlp", hidden=(30,), sizes=(20,) * 3, schedule=Schedule(batch_size=batch))
    assert_bits_of_running_alone(method, place, parcels_equal)


def test_make_blocks_other_optimizer_or_task_is_kept_apart(world: Callable[..., Any]) -> None:
    place, heterofl = world(sizes=(8, 8), hidden=(16, 32)), Registries().methods["heterofl"]

    def job(seed: int = 0, optimizer: Optimizer | None = None, **settings: Any) -> Job:
        method = heterofl(**settings)
        engine = place.engine(method, seed=seed, optimizer=optimizer or place.optimizer)
        inboxes = {
            device: {"weights": place.fleet.global_model.initial_weights(0)} for device in place.fleet.devices(1)
        }
        return Job(engine, Request(method.train, inboxes, 1))  # type: ignore[attr-defined]

    def blocks(*jobs: Job) -> int:
        return len(make_blocks(jobs))

    assert blocks(job(), job(seed=1)) == 1
    assert blocks(job(), job(mask_unseen_labels=False)) == 2
    assert blocks(job(), job(optimizer=replace(place.optimizer, lr=0.2))) == 1
    assert blocks(job(), job(optimizer=replace(place.optimizer, clip_value=1.0))) == 2
    assert blocks(job(), job(optimizer=Adam(0.2))) == 2


def test_make_blocks_single_job_skips_invariance_trial(
    world: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer is dear, and a net that one device drew for one round will hardly ever have company."""
    asked: list[Model] = []
    monkeypatch.setattr(in_process, "is_block_invariant", lambda model, batch: asked.append(model) or True)
    place, method = world(sizes=(8, 8), hidden=(16, 32)), Registries().methods["fedavg"]()

    def job(seed: int) -> Job:
        inboxes = {
            device: {"weights": place.fleet.global_model.initial_weights(0)} for device in place.fleet.devices(1)
        }
        return Job(place.engine(method, seed=seed), Request(method.train, inboxes, 1))  # type: ignore[attr-defined]

    assert len(make_blocks([job(0)])) == 1
    assert asked == []
    assert len(make_blocks([job(0), job(1)])) == 1
    assert set(asked) == {place.fleet.global_model}


@pytest.mark.parametrize(
    ("family", "settings", "batch", "in_any_company"),
    [
        ("convnet", {"hidden": (16, 32)}, 2, True),
        ("convnet", {"hidden": (8, 16)}, 2, False),
        ("convnet", {"hidden": (3, 5)}, 2, False),
        ("mlp", {"hidden": (30,)}, 2, True),
        ("mlp", {"hidden": (30,)}, 20, None),
        ("preactresnet", {"hidden": (8, 32), "blocks": (1, 1), "exit_after": 1}, 2, True),
        ("mobilenet", {"stem": 32, "widths": (32,), "depths": (1,), "kernels": (3,)}, 2, True),
        ("mobilenet", {"stem": 8, "widths": (8,), "depths": (1,), "kernels": (3,)}, 2, False),
    ],
)
def test_is_block_invariant_by_layer_width_and_batch(
    family: str,
    settings: Any,
    batch: int,
    in_any_company: bool | None,
    tiny_model: Callable[..., Model],
    block_weights: Callable[..., dict[str, Tensor]],
) -> None:
    """As this project's kernels add up. None: it depends on the processor; True must then hold for other weights."""
    model = tiny_model(family, input_shape=(1, 8, 8), **settings)
    weights = {name: tensor.float() for name, tensor in block_weights(model, 8).items()}
    x, y = torch.randn(8, batch, 1, 8, 8), torch.zeros(8, batch, dtype=torch.int64)

    def gradients(count: int) -> dict[str, Tensor]:
        block = {name: tensor[:count] for name, tensor in weights.items()}
        return dict(gradient(dummy_loss(model), block, Batch(x[:count], y[:count], StepSeeds(tuple(range(count))))))

    if in_any_company is None:
        pair = gradients(2)
        agrees = all(
            torch.equal(slopes[:2], pair[name]) for count in range(3, 9) for name, slopes in gradients(count).items()
        )
        assert agrees or not is_block_invariant(model, batch)
        return
    assert is_block_invariant(model, batch) == in_any_company


@pytest.fixture
def lockstep() -> Lockstep:
    return Lockstep(WorkerPool(1))


@pytest.fixture
def engine(world: Callable[..., Any], lockstep: Lockstep) -> Callable[[], InProcess]:
    return lambda: world().engine(Registries().methods["fedavg"](), executor=lockstep)


class TestLockstep:
    def test_steps_of_two_experiments_come_in_turn(self, lockstep: Lockstep) -> None:
        steps = lockstep.steps({"a": iter([1, 2]), "b": iter([3])})
        assert list(steps) == [("a", 1), ("a", 2), ("b", 3)]

    def test_error_of_one_experiment_ends_all(self, lockstep: Lockstep, engine: Callable[[], InProcess]) -> None:
        ended = []

        def fails() -> Iterator[int]:
            yield 1
            raise LookupError("gone")

        def asks(one: InProcess) -> Iterator[int]:
            try:
                yield 2
                list(one.ask(Request(Registries().methods["fedavg"]().train, {}, 1)))  # type: ignore[attr-defined]
                yield 3
            finally:
                ended.append(True)

        steps = lockstep.steps({"asks": asks(engine()), "fails": fails()})
        with pytest.raises(LookupError, match="gone"):
            list(steps)
        assert ended == [True]

    def test_closed_iterator_ends_all(self, lockstep: Lockstep) -> None:
        ended = []

        def goes_on() -> Iterator[int]:
            try:
                while True:
                    yield 1
            finally:
                ended.append(True)

        steps = lockstep.steps({"a": goes_on(), "b": goes_on()})
        assert next(steps) == ("a", 1)
        steps.close()  # type: ignore[attr-defined]
        assert ended  # the other never began


@pytest.mark.parametrize("order", [(1, 2), (2, 1), (1, 3, 2)])
def test_steps_experiments_with_unequal_requests_train_together(
    order: tuple[int, ...], world: Callable[..., Any], lockstep: Lockstep, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One asks once a round, others two or three times: what all ask first in a round still runs together."""
    place, method = world(sizes=(8, 8), hidden=(16, 32)), Registries().methods["fedavg"]()
    calls: list[set[tuple[int, int]]] = []
    plain = WorkerPool.run_blocks

    def run_blocks(self: WorkerPool, blocks: list[Block], *more: Any) -> Iterator[tuple[Block, ClientResult]]:
        requests = [(id(member.job.engine), member.job.request) for block in blocks for member in block.members]
        calls.append({(engine, request.round_number) for engine, request in requests if not request.repeat})
        return plain(self, blocks, *more)

    monkeypatch.setattr(WorkerPool, "run_blocks", run_blocks)
    inboxes = {device: {"weights": place.fleet.global_model.initial_weights(0)} for device in place.fleet.devices(1)}

    def asks(engine: InProcess, times: int) -> Iterator[int]:
        for number in (1, 2, 3):
            for repeat in range(times):
                list(engine.ask(Request(method.train, inboxes, number, repeat)))  # type: ignore[attr-defined]
            yield number

    engines = [place.engine(method, seed=seed, executor=lockstep) for seed in range(len(order))]
    experiments = {str(seed): asks(engines[seed], times) for seed, times in enumerate(order)}
    assert len(list(lockstep.steps(experiments))) == 3 * len(order)
    firsts = [call for call in calls if call]
    assert firsts == [{(id(engine), number) for engine in engines} for number in (1, 2, 3)]


def test_rounds_in_lockstep_have_their_own_seconds(
    recipe: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock is advanced by hand: ten seconds for a block of the largest model, one for others."""
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    plain = in_process.run_block

    def slow(block: Block) -> ClientResult:
        now[0] += 10.0 if is_large(block.model) else 1.0
        return plain(block)

    monkeypatch.setattr(worker_pool, "run_block", slow)
    arms = planned(tmp_path / "together", recipe())
    sizes = {name: each[0].fleet.largest.model for name, each in arms.experiments.items()}
    large = max(sum(shape.numel() for shape in model.shapes().values()) for model in sizes.values())

    def is_large(model: Model) -> bool:
        return sum(shape.numel() for shape in model.shapes().values()) == large

    seconds: dict[str, float] = {}
    for name, result in arms.rounds():
        seconds[name] = seconds.get(name, 0.0) + result.seconds
    assert sum(seconds.values()) == pytest.approx(now[0])  # no second is counted twice
    assert seconds["all-large seed 0"] > 2 * seconds["small-for-all seed 0"]
