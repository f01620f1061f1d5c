"""Every method on the fake accelerator "loom": the bits of the CPU, few copies across, and no value read back."""

import sys
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import torch
from torch import Tensor

from fedloom.client import Batch, Client, ClientResult, Schedule, Sgd, Step, fit, label_loss, like, on_device
from fedloom.data import Examples
from fedloom.engines import InProcess, WorkerContext, WorkerPool
from fedloom.engines.in_process import make_blocks, run_block
from fedloom.methods import Method
from fedloom.methods.scaffold import Scaffold
from fedloom.models import StepSeeds
from fedloom.placement import Compute, enter, leave, resident, resolve_device
from fedloom.runs.build import build_task_registry
from fedloom.tensors import Parcel, Tensors, fingerprint, relative_distance
from fedloom.testing import FakeAccelerator, TinyWorld, accelerator, build_client, check_device, tiny_model
from fedloom.testing.accelerator import DevicesMixedError, ReadBackError
from tests.conftest import build_method

SIZES, LABELS = (8, 5, 9, 8), [[0, 1], [1, 2], [0, 1, 2, 3], [3]]
HEADLINERS = ("heterofl", "fedhen", "fedsup", "fedhenn", "fedin")
LOOM = Compute("loom")


@pytest.fixture
def loom() -> Iterator[FakeAccelerator]:
    counted = accelerator()
    counted.reset()
    yield counted
    counted.reset()


def outcome(world: TinyWorld, method: Method, engine: InProcess, rounds: int = 2) -> tuple[str, str, str]:
    """Fingerprints of what server and devices know after some rounds, and all rows of an evaluation."""
    with closing(engine):
        server = world.play(method, engine, rounds)
        rows = world.evaluate(method, server, engine, rounds)
        devices = world.fleet.devices(1)
        states = {f"{d.name} {b}": t for d in devices for b, t in engine.client_states.read(d).items()}
        return fingerprint(server), fingerprint(states), repr(rows)


def send_constants(world: TinyWorld) -> None:
    """What a preparation normalizes with crosses once in a process, at its first use."""
    world.dataset.preparation(world.dataset.train.x[:1].to("loom"))


def on_workers(world: TinyWorld, method: Method, compute: Compute) -> InProcess:
    """An engine with a process for each of two devices."""
    pool = WorkerPool(2)
    engine = world.engine(method, executor=pool, compute=compute)
    evaluator = world.evaluator()
    pool.register(WorkerContext(engine, world.fleet, build_task_registry(method, evaluator)))
    return engine


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in ("fedsup", "fedin") else []) for name in HEADLINERS]
)
def test_headline_method_on_accelerator_keeps_bits_and_copies_little(loom: FakeAccelerator, name: str) -> None:
    method = build_method(name)
    world = TinyWorld.for_method(method, sizes=SIZES, labels=LABELS)
    expected = outcome(world, method, world.engine(method))
    send_constants(world)
    engine = world.engine(method, compute=LOOM)
    server, blocks, executor = method.start(world.fleet, world.seed), 0, engine.executor
    for number in (1, 2):
        loom.reset()
        noted = CountingExecutor()
        engine.executor = noted
        server = method.round(server, world.context(engine, number))
        engine.commit(number)
        blocks = noted.blocks
        assert loom.copies_out == blocks, "uploads and states of a block leave together"
        if number == 2:  # the first round also moves the data set and the models' constants
            assert blocks <= loom.copies_in <= 2 * blocks
        assert loom.copies_in_steps == loom.read_backs == 0
    engine.executor = executor
    assert outcome(world, method, world.engine(method, compute=LOOM)) == expected


class CountingExecutor:
    """Runs blocks here and counts them."""

    def __init__(self) -> None:
        self.blocks = 0

    def run(self, job: Any) -> Any:
        for block in make_blocks([job]):
            self.blocks += 1
            yield block, run_block(block)

    def register(self, simulation: WorkerContext) -> None: ...

    def clock(self) -> float:
        return 0.0

    def close(self) -> None: ...


@pytest.mark.slow
def test_method_on_accelerator_keeps_bits(loom: FakeAccelerator, method: Method, family: str) -> None:
    world = TinyWorld.for_method(method, family, sizes=SIZES[:3], labels=LABELS[:3])
    expected = outcome(world, method, world.engine(method))
    send_constants(world)
    loom.reset()
    assert outcome(world, method, world.engine(method, compute=LOOM)) == expected
    assert loom.copies_in_steps == loom.read_backs == 0


@pytest.mark.slow
def test_method_on_two_accelerators_keeps_bits(loom: FakeAccelerator, method: Method) -> None:
    world = TinyWorld.for_method(method, sizes=SIZES, labels=LABELS)
    expected = outcome(world, method, world.engine(method))
    both = Compute("loom:0", devices=("loom:0", "loom:1"))
    assert outcome(world, method, on_workers(world, method, both)) == expected


def test_workers_on_two_accelerators_keep_bits(loom: FakeAccelerator) -> None:
    method = build_method("heterofl")
    world = TinyWorld.for_method(method, "mlp", sizes=SIZES, labels=LABELS)
    expected = outcome(world, method, world.engine(method))
    both = Compute("loom:0", devices=("loom:0", "loom:1"))
    assert outcome(world, method, on_workers(world, method, both)) == expected
    assert loom.copies_in == loom.copies_out == 0, "only the workers use the accelerators"


def test_data_set_on_accelerator_moves_once(loom: FakeAccelerator) -> None:
    method = build_method("fedavg")
    world = TinyWorld.for_method(method, "mlp", sizes=SIZES, labels=LABELS)
    engine = world.engine(method, compute=LOOM)
    images = world.dataset.train.x
    size = images.numel() * images.element_size()
    world.play(method, engine, rounds=3)
    assert images.dtype == torch.uint8
    assert loom.sizes.count(("in", size)) == 1


def test_block_that_does_not_fit_runs_in_halves(loom: FakeAccelerator, caplog: pytest.LogCaptureFixture) -> None:
    method = build_method("fedavg")
    world = TinyWorld.make("mlp", sizes=(8,) * 8)
    expected = outcome(world, method, world.engine(method))
    engine = world.engine(method, compute=LOOM)
    with loom.memory(largest_tensor=6000):  # the weights of the first layer of eight devices take 6912
        found = outcome(world, method, engine)
    assert loom.refused > 0
    assert found == expected
    assert engine.noted_limits == {("a", "train"): 4}
    assert sum("did not fit" in record.message and "train" in record.message for record in caplog.records) == 1


def test_device_that_does_not_fit_alone_raises(loom: FakeAccelerator) -> None:
    method = build_method("fedavg")
    world = TinyWorld.make("mlp", sizes=(8, 8))
    with loom.memory(largest_tensor=100), pytest.raises(torch.OutOfMemoryError):
        world.play(method, world.engine(method, compute=LOOM), rounds=1)


def test_mixed_devices_raise(loom: FakeAccelerator) -> None:
    here = torch.ones(3)
    there = here.to("loom")
    assert str(there.device) == "loom:0"
    with pytest.raises(DevicesMixedError, match="loom:0"):
        there + here
    with pytest.raises(DevicesMixedError):
        there + here.to("loom:1")
    with pytest.raises(DevicesMixedError):
        here[torch.zeros(1, dtype=torch.int64).to("loom")]
    assert (there + 1).cpu().tolist() == [2, 2, 2]
    assert (loom.copies_in, loom.copies_out) == (3, 1)


class Peeking:
    """A task that looks at a weight."""

    @on_device(sends={"weights": like("weights")})
    def train(self, client: Client, inbox: Parcel) -> ClientResult:
        weights = fit(client, inbox["weights"], label_loss(client))
        if bool(next(iter(weights.values())).sum() > 0):
            return ClientResult(upload={"weights": weights})
        return ClientResult(upload={"weights": inbox["weights"]})


def test_value_read_back_inside_task_raises(loom: FakeAccelerator) -> None:
    method = build_method("fedavg")
    world = TinyWorld.make("mlp", sizes=(8, 8))
    engine = world.engine(method, compute=LOOM)
    weights = world.fleet.global_model.initial_weights(0)
    context = world.context(engine)
    with pytest.raises(ReadBackError, match="_local_scalar_dense"):
        context.ask(Peeking().train, {device: {"weights": weights} for device in context.cohort})


def test_enter_and_leave_keep_every_tensor(loom: FakeAccelerator) -> None:
    tree = {
        "numbers": (torch.arange(5), torch.rand(3, 2), torch.tensor(True), torch.zeros(0, 4)),
        "shared": torch.rand(2, 3).expand(4, 2, 3)[:, 0],
        "text": "kept",
    }
    moved = enter(tree, torch.device("loom"))
    assert loom.copies_in == 1
    assert all(tensor.device.type == "loom" for tensor in moved["numbers"])
    assert moved["shared"].stride(0) == 0
    back = leave(moved)
    assert loom.copies_out == 1
    assert back["text"] == "kept"
    for before, after in zip((*tree["numbers"], tree["shared"]), (*back["numbers"], back["shared"]), strict=True):
        assert before.dtype == after.dtype
        assert torch.equal(before, after)


def test_resident_tensor_moves_once(loom: FakeAccelerator) -> None:
    tensor, device = torch.rand(4), torch.device("loom")
    assert resident(tensor, device) is resident(tensor, device)
    assert loom.copies_in == 1
    assert resident(tensor, torch.device("cpu")) is tensor


@pytest.mark.parametrize("name", ["loom:7", "cuda:99", "no-such-device", "meta"])
def test_resolve_device_unknown_raises(loom: FakeAccelerator, name: str) -> None:
    with pytest.raises(ValueError, match=r"find|knows|computes"):
        resolve_device(name)


def test_resolve_device_auto_is_cpu_without_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedloom.placement.find_devices", list)
    assert resolve_device("auto") == "cpu"
    monkeypatch.setattr("fedloom.placement.find_devices", lambda: ["mps", "cuda:0"])
    assert resolve_device("auto") == "cuda"


def test_dropout_on_accelerator_draws_the_cpu_numbers(loom: FakeAccelerator) -> None:
    method = build_method("fedavg")
    world = TinyWorld.for_method(method, "lstm", sizes=SIZES, labels=LABELS, dropout=0.3)
    for devices_per_block in (1, 16):
        engines = [world.engine(method, devices_per_block, compute=compute) for compute in (Compute(), LOOM)]
        here, there = (fingerprint(world.play(method, engine)) for engine in engines)
        assert here == there


@pytest.mark.parametrize(("precision", "bound"), [("bfloat16", 0.05), ("float16", 0.005)])
def test_precision_rounds_and_keeps_float32_weights(precision: Any, bound: float) -> None:
    method = build_method("heterofl")
    world = TinyWorld.for_method(method, "mlp", sizes=SIZES, labels=LABELS)
    full = world.play(method, world.engine(method))
    half = world.play(method, world.engine(method, compute=Compute(precision=precision)))
    assert {tensor.dtype for tensor in half["weights"].values()} == {torch.float32}
    assert 0 < relative_distance(half, full) < bound
    again = world.play(method, world.engine(method, compute=Compute(precision=precision)))
    assert fingerprint(again) == fingerprint(half)


def test_float16_overflow_skips_the_step_of_that_device_only() -> None:
    def loss(weights: Tensors, batch: Batch) -> Tensor:
        huge = torch.tensor([1.0, 1e36])  # times the scale it is infinite
        return (weights["w"] * huge[:, None]).sum(1)

    model = tiny_model("mlp").computed("float16", compiled=False)
    step = Step(torch.zeros(2, 1, dtype=torch.int64), torch.ones(2), {}, StepSeeds((0, 1)))
    examples = Examples(torch.zeros(1, 1, 6, 6, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64))
    client = build_client(model, examples, (step,) * 3, Sgd(0.1))
    trained = fit(client, {"w": torch.ones(2, 3)}, loss)
    assert torch.allclose(trained["w"][0], torch.full((3,), 0.7))
    assert torch.equal(trained["w"][1], torch.ones(3))


def test_scaffold_in_float16_counts_no_overflow_in_its_control_variates(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first steps overflow and are skipped: their gradients must not reach what devices keep and send."""
    monkeypatch.setattr(sys.modules["fedloom.client.fit"], "FIRST_SCALE", 2.0**24)
    method, schedule = Scaffold(), Schedule(batch_size=4, epochs=12)
    world = TinyWorld.for_method(method, "mlp", sizes=(8, 8), schedule=schedule)
    server = world.play(method, world.engine(method, compute=Compute(precision="float16")), rounds=1)
    full = world.play(method, world.engine(method), rounds=1)
    assert world.refusals == []
    assert 0.1 < relative_distance({"c": server["control"]}, {"c": full["control"]}) < 1  # other steps, as large


@pytest.mark.slow
def test_compiled_model_computes_the_same() -> None:
    method = build_method("fedavg")
    world = TinyWorld.for_method(method, "mlp", sizes=(8, 8))
    plain = world.play(method, world.engine(method), rounds=1)
    compiled = world.play(method, world.engine(method, compute=Compute(compile=True)), rounds=1)
    assert relative_distance(compiled, plain) < 1e-5


def test_check_device_finds_no_difference(loom: FakeAccelerator) -> None:
    with loom.memory(largest_tensor=3_000_000):
        report = check_device("loom", ["fedavg"])
    assert report.passed
    assert report.largest_block == 4
    assert [(one.method, one.family, one.difference, one.repeats_bits) for one in report.methods] == [
        ("fedavg", "convnet", 0.0, True),
        ("fedavg", "mlp", 0.0, True),
    ]
    assert [record["what"] for record in report.records()][2:] == [
        "speed", "largest block", "not deterministic", "took",
    ]  # fmt: skip
