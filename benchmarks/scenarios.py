"""What is measured: devices per level, steps and batch size are fixed per scenario; the goals are ratios to plain."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from benchmarks import plain
from fedloom.data import Dataset, Examples, Partition, Preparation
from fedloom.engines import InProcess, Memory, ProcessPool, shelf
from fedloom.fleet import Device, Engine, Fleet, nested
from fedloom.footprints import Contribution, coverage_mean
from fedloom.methods.heterofl import HeteroFL
from fedloom.models import MODELS, Model, model
from fedloom.training import Constant, Schedule, Sgd

LEVELS = {"a": 1.0, "b": 0.5, "c": 0.25, "d": 0.125, "e": 0.0625}
SHAPES = {"convnet": (1, 28, 28), "preresnet": (3, 32, 32)}
BATCH = 10


@dataclass(frozen=True)
class Training:
    """Some devices of each level train some steps: HeteroFL's task through the engine, against the ordinary loop."""

    name: str
    family: str
    devices: dict[str, int]
    steps: int
    must: float
    moonshot: float
    settings: dict[str, object] = field(default_factory=dict)


TRAININGS = [
    Training("CNN d-e", "convnet", {"d": 16, "e": 16}, 20, 0.20, 0.05),
    Training("CNN c-e", "convnet", {"c": 16, "d": 16, "e": 16}, 12, 0.30, 0.12),
    Training("CNN a-e mixed", "convnet", {"a": 4, "b": 4, "c": 4, "d": 4, "e": 4}, 8, 0.50, 0.30),
    Training("ResNet e", "preresnet", {"e": 16}, 8, 0.22, 0.08),
    Training("ResNet a", "preresnet", {"a": 2}, 8, 0.60, 0.35),
]


@dataclass(frozen=True)
class Bench:
    """The two sides of a training scenario, ready to run."""

    ours: Callable[[], None]
    theirs: Callable[[], None]


@contextmanager
def bench(scenario: Training, workers: int) -> Iterator[Bench]:
    shape, count = SHAPES[scenario.family], sum(scenario.devices.values())
    fleet = _fleet(scenario, shape)
    dataset = _dataset(shape, count * scenario.steps * BATCH)
    rows = torch.arange(len(dataset.train)).split(scenario.steps * BATCH)
    partition = Partition(tuple(part.numpy() for part in rows), tuple(part[:1].numpy() * 0 for part in rows))
    method = HeteroFL()
    alone = InProcess(
        shelf(dataset, partition, fleet), Memory(lambda device: {}), Schedule(BATCH),
        Sgd(0.01, 0.9, 5e-4, 1.0), Constant(), seed=0,
    )  # fmt: skip
    engine: Engine = ProcessPool(alone, fleet, lambda address: method.train, workers) if workers > 1 else alone
    whole = fleet.whole.initial(0)
    inboxes = {device: {"weights": device.footprint.read(whole)} for device in fleet.devices(1)}
    try:
        yield Bench(lambda: _ask(engine, method, inboxes), _ordinary(fleet, dataset, rows, whole))
    finally:
        engine.close()


def _ask(engine: Engine, method: HeteroFL, inboxes: dict[Device, dict[str, dict[str, Tensor]]]) -> None:
    assert len(list(engine.ask(method.train, inboxes, 1))) == len(inboxes)


def _ordinary(fleet: Fleet, dataset: Dataset, rows: tuple[Tensor, ...], whole: dict[str, Tensor]) -> Callable[[], None]:
    x, y = dataset.preparation(dataset.train.x), dataset.train.y
    modules = {tier.name: tier.model.module() for tier in fleet.tiers}

    def run() -> None:
        for device, own in zip(fleet.devices(1), rows, strict=True):
            batches = [(x[part], y[part]) for part in own.split(BATCH)]
            plain.train(modules[device.tier], device.footprint.read(whole), batches)

    return run


def _fleet(scenario: Training, shape: tuple[int, ...]) -> Fleet:
    count = sum(scenario.devices.values())
    models = [(level, _model(scenario.family, level, shape)) for level in scenario.devices]
    return Fleet(nested(models), tuple(number / count for number in scenario.devices.values()), count, seed=0)


def _model(family: str, level: str, shape: tuple[int, ...]) -> Model:
    return model(family, MODELS[family], {"width": LEVELS[level]}, shape, 10)


def _dataset(shape: tuple[int, ...], examples: int) -> Dataset:
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (examples, *shape), dtype=torch.uint8, generator=draw)
    y = torch.arange(examples) % 10
    return Dataset("made up", Examples(x, y), Examples(x[:10], y[:10]), 10, Preparation())


def aggregation() -> tuple[Callable[[], None], Callable[[], None]]:
    """Ten replies of five levels of PreResNet18: slices in float64, against lists of indices."""
    tiers = nested([(level, _model("preresnet", level, SHAPES["preresnet"])) for level in LEVELS])
    whole = tiers[0].model.initial(0)
    said = [(tier, {name: t.clone() for name, t in tier.footprint.read(whole).items()}) for tier in tiers for _ in "12"]
    return (
        lambda: void(coverage_mean(whole, [Contribution(tier.footprint, tensors, 1.0) for tier, tensors in said])),
        lambda: void(plain.index_list_mean(whole, [tensors for _, tensors in said])),
    )


def overhead(devices: int = 100) -> float:
    """Milliseconds a device for a round of hardly any work: one step of one example on a net of a few weights."""
    tiny = model("convnet", MODELS["convnet"], {"hidden": (2,)}, (1, 4, 4), 10)
    fleet = Fleet(nested([("a", tiny)]), (1.0,), devices, seed=0)
    dataset = _dataset((1, 4, 4), devices)
    rows = tuple(torch.arange(devices).split(1))
    partition = Partition(tuple(part.numpy() for part in rows), tuple(part.numpy() * 0 for part in rows))
    method = HeteroFL()
    engine = InProcess(
        shelf(dataset, partition, fleet), Memory(lambda device: {}), Schedule(1), Sgd(), Constant(), seed=0
    )
    server = {"weights": fleet.whole.initial(0)}

    def one_round() -> None:
        from fedloom.fleet import Turn

        method.round(server, Turn(1, fleet.devices(1), fleet, engine))

    one_round()
    began = time.perf_counter()
    one_round()
    return (time.perf_counter() - began) * 1000 / devices


def void(_: object) -> None:
    """Throw a result away."""
