"""The scenarios: devices per level, steps and batch size are fixed; goals are ratios to the plain loop."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks import plain
from benchmarks.drawing import dropout_cnn, narrow_dropout_cnn, stochastic_depth_resnet
from benchmarks.rounds import BATCH, build_engine
from fedloom.client import Constant, Schedule, Sgd
from fedloom.data import Dataset, Examples, Labels, Partition, Preparation
from fedloom.data.partitions import label_shards
from fedloom.engines import ClientStateStore, InProcess, build_client_data, keep_freed_memory
from fedloom.fleet import Device, Engine, Fleet, Request, RoundContext, make_nested_tiers
from fedloom.footprints import ClientUpdate, coverage_mean
from fedloom.methods.fedavg import FedAvg
from fedloom.methods.heterofl import HeteroFL
from fedloom.models import MODELS, Model, build_model, choose_kernels
from fedloom.recipe.load import load
from fedloom.recipe.registries import Registries
from fedloom.runs.build import assemble
from fedloom.runs.loop import rounds
from fedloom.runs.recorder import record_rounds
from fedloom.studies.tune import SearchTerms, plan_search

LEVELS = {"a": 1.0, "b": 0.5, "c": 0.25, "d": 0.125, "e": 0.0625}
SHAPES = {
    "convnet": (1, 28, 28), "preresnet": (3, 32, 32), "mobilenet": (3, 32, 32), "transformer": (32,), "lstm": (32,)
}  # fmt: skip
TOKENS = {"transformer": 1000, "lstm": 1000}
"""The vocabulary of families that read text. The Transformer predicts the next token, the LSTM a label."""
MNIST_LABELS = (5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949)  # training examples of each label
MNIST_DEVICES = 100
STATISTICS_BATCH = 50


@dataclass(frozen=True)
class Sides:
    """The two sides of a scenario, ready to run; without `theirs`, our own time is reported."""

    ours: Callable[[], None]
    theirs: Callable[[], None] | None
    work: float = 1.0  # of our side, in units of the other's: the ratio of times is divided by it


@dataclass(frozen=True)
class Scenario:
    name: str
    sides: Callable[[int], AbstractContextManager[Sides]]  # given the number of workers
    must: float
    moonshot: float
    scale: float = 1.0  # from seconds to the reported unit, without `theirs`


@dataclass(frozen=True)
class Training:
    """Devices of each level train some steps: HeteroFL's task through the engine, against the plain loop."""

    family: str
    devices: dict[str, int]
    steps: int


@contextmanager
def training(task: Training, workers: int) -> Iterator[Sides]:
    shape, count = SHAPES[task.family], sum(task.devices.values())
    fleet = _fleet(task, shape)
    examples = count * task.steps * BATCH
    dataset = random_text(task.family, examples) if task.family in TOKENS else random_dataset(shape, examples)
    rows = torch.arange(examples).split(task.steps * BATCH)
    method = HeteroFL()
    engine = build_engine(method, fleet, dataset, _partition(rows), workers)
    weights = fleet.global_model.initial_weights(0)
    inboxes = {device: {"weights": device.footprint.read(weights)} for device in fleet.devices(1)}
    try:
        yield Sides(lambda: _ask(engine, method, inboxes), _plain_loop(fleet, dataset, rows, weights))
    finally:
        engine.close()


def _ask(engine: Engine, method: FedAvg | HeteroFL, inboxes: dict[Device, dict[str, dict[str, Tensor]]]) -> None:
    assert len(list(engine.ask(Request(method.train, inboxes, 1)))) == len(inboxes)


def _plain_loop(
    fleet: Fleet, dataset: Dataset, rows: tuple[Tensor, ...], weights: dict[str, Tensor]
) -> Callable[[], None]:
    x, y = dataset.preparation(dataset.train.x), dataset.train.y
    modules = {tier.name: tier.model.module() for tier in fleet.tiers}

    def run() -> None:
        for device, own in zip(fleet.devices(1), rows, strict=True):
            batches = [(x[part], y[part]) for part in own.split(BATCH)]
            plain.train(modules[device.tier], device.footprint.read(weights), batches)

    return run


def _partition(rows: tuple[Tensor, ...]) -> Partition:
    return Partition(tuple(part.numpy() for part in rows), tuple(part[:1].numpy() * 0 for part in rows))


def _fleet(task: Training, shape: tuple[int, ...]) -> Fleet:
    count = sum(task.devices.values())
    models = [(level, build_scenario_model(task.family, level, shape)) for level in task.devices]
    return Fleet(make_nested_tiers(models), tuple(number / count for number in task.devices.values()), count, seed=0)


def build_scenario_model(family: str, level: str, shape: tuple[int, ...]) -> Model:
    tokens, settings = TOKENS.get(family), {"width": LEVELS[level]}
    if family == "transformer":
        model = build_model(family, MODELS[family], {**settings, "causal": True}, shape, TOKENS[family], tokens, shape)
    else:
        model = build_model(family, MODELS[family], settings, shape, 10, tokens)
    return replace(model, kernels=choose_kernels("auto", model))


def random_dataset(shape: tuple[int, ...], examples: int, tests: int = 10) -> Dataset:
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (examples, *shape), dtype=torch.uint8, generator=draw)
    y = torch.arange(examples) % 10
    return Dataset("random", Examples(x, y), Examples(x[:tests], y[:tests]), 10, Preparation())


def random_text(family: str, examples: int) -> Dataset:
    draw, words = torch.Generator().manual_seed(0), TOKENS[family]
    x = torch.randint(0, words, (examples, *SHAPES[family]), generator=draw)
    y = x.roll(-1, 1) if family == "transformer" else torch.arange(examples) % 10
    classes = words if family == "transformer" else 10
    return Dataset("random", Examples(x, y), Examples(x[:10], y[:10]), classes, Preparation(), tokens=words)


@contextmanager
def whole_round(workers: int, devices: int = 20, share: int = 100) -> Iterator[Sides]:
    """A round of HeteroFL a-e: half of the devices train, then statistics of static batch norm over all training
    examples and a test of every level, against the plain loop that does the same."""
    recipe = {
        "rounds": 1,
        "data": {"dataset": "digits", "devices": devices, "partition": {"kind": "iid"}},
        "fleet": {"participation": 0.5, "assignment": "redrawn"},
        "model": {"family": "convnet", "normalization": "static_batch"},
        "tiers": [{"name": name, "share": 1 / len(LEVELS), "width": width} for name, width in LEVELS.items()],
        "training": {"batch_size": BATCH, "optimizer": {"kind": "sgd", "lr": 0.01, "momentum": 0.9, "clip_norm": 1.0}},
        "method": {"name": "heterofl"},
        "evaluation": {"tests": ["global"]},
    }
    dataset, names = random_dataset(SHAPES["convnet"], devices * share, tests=share * devices // 4), Registries()
    experiment = assemble(load(recipe, names), names, Path(), dataset, workers)
    fleet, cohort = experiment.fleet, experiment.faults.cohort(1)
    weights = fleet.global_model.initial_weights(0)
    modules = {tier.name: tier.model.module() for tier in fleet.tiers}
    x, y = dataset.preparation(dataset.train.x), dataset.train.y
    tests = dataset.preparation(dataset.test.x).split(STATISTICS_BATCH)

    def ours() -> None:
        experiment.evaluator.filled.clear()  # statistics of equal weights are not collected again
        (result,) = rounds(experiment)
        assert result.traffic.replied == len(cohort) and result.metrics

    def theirs() -> None:
        for device in cohort:
            own = experiment.simulator.client_data.rows(device)
            batches = [(x[part], y[part]) for part in own.split(BATCH)]
            plain.train(modules[device.tier], device.footprint.read(weights), batches)
        for module in modules.values():
            plain.evaluate(module, x.split(STATISTICS_BATCH), tests)

    try:
        yield Sides(ours, theirs)
    finally:
        experiment.engine.close()


@contextmanager
def aggregation(workers: int) -> Iterator[Sides]:
    """Aggregate ten replies of five levels of PreResNet18: slices in float64, against lists of indices."""
    models = [(level, build_scenario_model("preresnet", level, SHAPES["preresnet"])) for level in LEVELS]
    tiers = make_nested_tiers(models)
    weights = tiers[0].model.initial_weights(0)
    replies = [
        (tier, {name: t.clone() for name, t in tier.footprint.read(weights).items()}) for tier in tiers for _ in "12"
    ]
    yield Sides(
        lambda: discard(
            coverage_mean(weights, [ClientUpdate(tier.footprint, tensors, 1.0) for tier, tensors in replies])
        ),
        lambda: discard(plain.index_list_mean(weights, [tensors for _, tensors in replies])),
    )


@contextmanager
def overhead(workers: int, devices: int = 100) -> Iterator[Sides]:
    """A round of almost no work: one step of one example on a network of a few weights."""
    tiny = build_model("convnet", MODELS["convnet"], {"hidden": (2,)}, (1, 4, 4), 10)
    fleet = Fleet(make_nested_tiers([("a", tiny)]), (1.0,), devices, seed=0)
    partition = _partition(tuple(torch.arange(devices).split(1)))
    client_data = build_client_data(random_dataset((1, 4, 4), devices), partition, fleet)
    engine = InProcess(client_data, ClientStateStore(lambda device: {}), Schedule(1), Sgd(), Constant(), seed=0)
    method, server = HeteroFL(), {"weights": fleet.global_model.initial_weights(0)}
    yield Sides(lambda: discard(method.round(server, RoundContext(1, fleet.devices(1), fleet, engine))), None)


@contextmanager
def drawing(build: Callable[[float], nn.Module], steps: int, workers: int, devices: int = 16) -> Iterator[Sides]:
    """Devices train a net that draws random numbers, against the same net without; each side in one process."""
    shape = SHAPES["convnet"]
    dataset = random_dataset(shape, devices * steps * BATCH)
    partition = _partition(torch.arange(len(dataset.train)).split(steps * BATCH))
    method = FedAvg()

    def side(chance: float) -> Callable[[], None]:
        model = build_model(build.__name__, build, {"chance": chance}, shape, 10)
        fleet = Fleet(make_nested_tiers([("a", model)]), (1.0,), devices, seed=0)
        engine = build_engine(method, fleet, dataset, partition, 1)
        weights = model.initial_weights(0)
        inboxes = {device: {"weights": weights} for device in fleet.devices(1)}

        def run() -> None:
            keep_freed_memory()  # on both sides
            _ask(engine, method, inboxes)

        return run

    yield Sides(side(0.5), side(0.0))


@contextmanager
def unequal_data(levels: dict[str, int], workers: int) -> Iterator[Sides]:
    """Devices with two labels of MNIST each, against as many IID devices, per example; each side in one process."""
    count, method = sum(levels.values()), HeteroFL()
    fleet = _fleet(Training("convnet", levels, 0), SHAPES["convnet"])
    weights = fleet.global_model.initial_weights(0)
    inboxes = {device: {"weights": device.footprint.read(weights)} for device in fleet.devices(1)}

    def side(sizes: list[int]) -> Callable[[], None]:
        dataset = random_dataset(SHAPES["convnet"], sum(sizes))
        rows = torch.arange(sum(sizes)).split(sizes)
        engine = build_engine(method, fleet, dataset, _partition(rows), 1)

        def run() -> None:
            keep_freed_memory()  # on both sides
            _ask(engine, method, inboxes)

        return run

    two_labels, iid = two_label_sizes()[:: MNIST_DEVICES // count], [sum(MNIST_LABELS) // MNIST_DEVICES] * count
    yield Sides(side(two_labels), side(iid), sum(two_labels) / sum(iid))


def two_label_sizes() -> list[int]:
    """How many examples each of 100 devices has of two labels of MNIST, as HeteroFL distributes them."""
    labels = np.repeat(np.arange(10), MNIST_LABELS)
    partition = label_shards(
        Labels(labels, labels[:10], 10), MNIST_DEVICES, np.random.default_rng(0), labels_per_device=2
    )
    return [len(rows) for rows in partition.train]


@contextmanager
def tuning(trials: int, length: int, halving: int, workers: int) -> Iterator[Sides]:
    """Search the learning rate of three tiers of the CNN, against runs one after the other: a quarter of the trials."""
    recipe = {
        "rounds": length,
        "data": {"dataset": "fashion-mini", "devices": 20, "validation": 200},
        "model": {"family": "convnet", "hidden": [16, 32, 64]},
        "tiers": [
            {"name": "large", "share": 0.3}, {"name": "medium", "share": 0.3, "width": 0.5},
            {"name": "small", "share": 0.4, "width": 0.25},
        ],
        "evaluation": {"every": length, "tests": ["global"], "per_device": "never"},
        "method": {"name": "heterofl"},
    }  # fmt: skip
    names = Registries()

    def search() -> None:
        with TemporaryDirectory() as home:
            terms = SearchTerms(trials, halving=halving)
            arms, keys = {"heterofl": load(recipe, names)}, ["training.optimizer.lr"]
            keep_freed_memory()  # on both sides
            discard(list(plan_search(arms, names, Path(home), Path(home), terms, keys).rounds()))

    def one_after_the_other() -> None:
        with TemporaryDirectory() as home:
            keep_freed_memory()
            for number in range(trials // 4):
                changes = [f"training.optimizer.lr={0.01 * 100 ** (4 * number / trials)}"]
                experiment = assemble(load(recipe, names, changes), names, Path(home))
                discard(list(record_rounds(experiment, Path(home) / str(number))))

    yield Sides(search, one_after_the_other, work=trials / (trials // 4))


def discard(_: object) -> None:
    """Drop a result."""


def _training(family: str, devices: dict[str, int], steps: int) -> Callable[[int], AbstractContextManager[Sides]]:
    return partial(training, Training(family, devices, steps))


SCENARIOS = [
    Scenario("CNN d-e", _training("convnet", {"d": 16, "e": 16}, 20), 0.10, 0.05),
    Scenario("CNN c-e", _training("convnet", {"c": 16, "d": 16, "e": 16}, 12), 0.16, 0.12),
    Scenario("CNN a-e mixed", _training("convnet", dict.fromkeys("abcde", 4), 8), 0.35, 0.30),
    Scenario("ResNet e", _training("preresnet", {"e": 16}, 8), 0.11, 0.08),
    Scenario("ResNet a", _training("preresnet", {"a": 2}, 8), 0.48, 0.35),
    Scenario("MobileNet e", _training("mobilenet", {"e": 16}, 8), 0.15, 0.08),
    Scenario("Transformer e", _training("transformer", {"e": 16}, 8), 1.0, 0.3),
    Scenario("LSTM e", _training("lstm", {"e": 16}, 8), 1.0, 0.3),
    Scenario("CNN a-e, whole round with evaluation", whole_round, 0.5, 0.3),
    Scenario("aggregation against index lists", aggregation, 0.025, 1 / 80),
    Scenario("dropout, against none", partial(drawing, dropout_cnn, 10), 1.3, 1.05),
    Scenario("narrow net with dropout, against none", partial(drawing, narrow_dropout_cnn, 20), 1.3, 1.05),
    Scenario("stochastic depth, against none", partial(drawing, stochastic_depth_resnet, 6), 1.3, 1.05),
    Scenario("CNN e, two labels a device, against IID", partial(unequal_data, {"e": 10}), 1.4, 1.1),
    Scenario("CNN d-e, two labels a device, against IID", partial(unequal_data, {"d": 5, "e": 5}), 1.4, 1.1),
    Scenario("16 trials of a search, against 16 runs", partial(tuning, 16, 15, 3), 0.40, 0.20),
    Scenario("overhead, ms a device (not a ratio)", overhead, 5.0, 0.5, scale=1000 / 100),
]
