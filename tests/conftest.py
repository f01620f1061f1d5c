"""Tiny models, data, fleets and engines that the tests of many rooms share."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import signature
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from torch import Tensor

from fedloom.client import Client, Constant, Optimizer, PaddedIndices, Schedule, Sgd, Step
from fedloom.data import Dataset, Examples, Partition, Preparation
from fedloom.engines import (
    ClientStateStore,
    Compression,
    DeviceEnd,
    FaultInjector,
    FaultPlan,
    Gate,
    InProcess,
    Refusal,
    ServerEnd,
    build_client_data,
)
from fedloom.evaluation import BatchNormStatistics, Evaluator
from fedloom.fleet import (
    UNCOMPRESSED,
    ByteCounter,
    Device,
    Engine,
    Fleet,
    Reply,
    Request,
    Responses,
    RoundContext,
    Transport,
    draw_cohort,
    make_tiers,
)
from fedloom.methods import METHODS, Method, fleet_problem
from fedloom.models import MODELS, Model, build_model
from fedloom.tensors import Parcel, Tensors

# as every run has it; sums come out otherwise with more, also where make did not start the tests
torch.set_num_threads(1)

# drawing takes longer than these runs; whoever tests reports asks for them
os.environ.setdefault("FEDLOOM_REPORT", "off")

# every run tries the same cases, so a failure seen once is seen again
settings.register_profile("fedloom", deadline=None, max_examples=40, derandomize=True, database=None)
settings.load_profile("fedloom")

TINY: dict[str, dict[str, Any]] = {
    "bottleneck": {"stem": 4, "planes": (3, 4), "blocks": (1, 2)},
    "convnet": {"hidden": (4, 6)},
    "lenet": {"convs": (4,), "kernels": (5,), "hidden": (6,)},
    "lstm": {"embedding": 5, "hidden": 4, "features": 6, "dropout": 0.0},
    "mlp": {"hidden": (6, 5)},
    "mobilenet": {"stem": 3, "widths": (4, 6), "depths": (1, 2), "kernels": (5, 5)},
    "preactresnet": {"hidden": (4, 6), "blocks": (1, 1), "exit_after": 1},
    "preresnet": {"hidden": (3, 4), "blocks": (1, 1)},
    # with fewer channels or more blocks, on maps of one pixel, differences of rounding grow from step to step
    "splitnet": {"channels": 4, "extra": (1, 0), "conv_bias": False},
    "transformer": {"embedding": 4, "heads": 2, "hidden": 6, "layers": 2, "exit_after": 1, "dropout": 0.0},
}

# the families that read rows of tokens
TOKENS = tuple(name for name, build in MODELS.items() if "tokens" in signature(build).parameters)

# what else is smaller in the lesser tiers of a family that is not only sliced in width
LESSER: dict[str, dict[str, Any]] = {
    "mobilenet": {"depths": (1, 1), "kernels": (5, 3)},
    "preactresnet": {"stages": 1},
    "splitnet": {"extra": (0, 0)},
    "transformer": {"depth": 1},
}


def build_tiny(
    family: str, input_shape: tuple[int, ...] = (1, 6, 6), classes: int = 4, width: float = 1.0, **changes: Any
) -> Model:
    assert family in TINY, f"give {family} a tiny size in tests/conftest.py, so that every contract runs on it"
    settings = {**TINY[family], "width": width, **changes}
    if "normalization" not in signature(MODELS[family]).parameters:  # such a family has none, whatever is asked for
        settings.pop("normalization", None)
    if family in TOKENS:  # one id more than there are classes, for the mask
        return build_model(family, MODELS[family], settings, (5,), classes, classes + 1)
    return build_model(family, MODELS[family], settings, input_shape, classes)


def spread_labels(sizes: Sequence[int], labels: Sequence[Sequence[int]]) -> Tensor:
    """Device after device, its own labels in turn."""
    return torch.cat(
        [torch.tensor(own)[torch.arange(size) % len(own)] for size, own in zip(sizes, labels, strict=True)]
    )


def rows_in_turn(sizes: Sequence[int]) -> tuple[np.ndarray, ...]:
    ends = np.cumsum([0, *sizes])
    return tuple(np.arange(start, end) for start, end in pairwise(ends))


def noisy_images(labels: Tensor, shape: tuple[int, ...], seed: int) -> Tensor:
    """A pattern for each label under noise, as bytes."""
    draw = torch.Generator().manual_seed(seed)
    patterns = torch.randint(0, 128, (int(labels.max()) + 1, *shape), generator=torch.Generator().manual_seed(99))
    return (patterns[labels] + torch.randint(0, 128, (len(labels), *shape), generator=draw)).to(torch.uint8)


def pictured(shape: tuple[int, ...], labels: Sequence[Sequence[int]], sizes: Sequence[int], seed: int) -> Examples:
    answers = spread_labels(sizes, labels)
    return Examples(noisy_images(answers, shape, seed), answers)


def written(net: Model, labels: Sequence[Sequence[int]], sizes: Sequence[int], seed: int) -> Examples:
    """Rows of tokens: of a device's own words, each its own answer, where every token is one; else one label a row."""
    draw = torch.Generator().manual_seed(seed)
    if net.family == "transformer":
        rows = [
            torch.tensor(list(own))[torch.randint(0, len(own), (size, *net.input_shape), generator=draw)]
            for size, own in zip(sizes, labels, strict=True)
        ]
        return Examples(torch.cat(rows), torch.cat(rows))
    answers = spread_labels(sizes, labels)
    noise = torch.randint(0, 2, (len(answers), *net.input_shape), generator=draw)
    return Examples((answers.unsqueeze(1) + noise) % net.classes, answers)


@dataclass(frozen=True)
class World:
    """A fleet, its data and how it trains: all that a method needs to be played."""

    fleet: Fleet
    dataset: Dataset
    partition: Partition
    schedule: Schedule
    optimizer: Optimizer
    seed: int = 0
    refusals: list[Refusal] = field(default_factory=list)

    def engine(self, method: Method, devices_per_block: int = 16, **changes: Any) -> InProcess:
        made = InProcess(
            client_data=build_client_data(self.dataset, self.partition, self.fleet),
            client_states=ClientStateStore(lambda device: method.init_client(device, self.seed)),
            schedule=self.schedule,
            optimizer=self.optimizer,
            lr_schedule=Constant(),
            seed=self.seed,
            devices_per_block=devices_per_block,
            gate=Gate(lambda round_number, refusal: self.refusals.append(refusal)),
        )
        return replace(made, **changes)

    @property
    def public(self) -> Tensor:
        """What the server has: examples like the devices', but none of theirs."""
        shape = tuple(self.dataset.train.x.shape[1:])
        if self.dataset.tokens:
            return torch.randint(0, self.dataset.tokens, (12, *shape), generator=torch.Generator().manual_seed(7))
        return noisy_images(torch.arange(12) % self.dataset.classes, shape, seed=7)

    def context(self, engine: Engine, number: int = 1, participation: float = 1.0) -> RoundContext:
        cohort = draw_cohort(self.fleet, participation, number)
        return RoundContext(number, cohort, self.fleet, engine, public=self.public)

    def play(self, method: Method, engine: Engine, rounds: int = 2, participation: float = 1.0) -> Parcel:
        """The rounds of a run, without judging."""
        server = method.start(self.fleet, self.seed)
        for number in range(1, rounds + 1):
            server = method.round(server, self.context(engine, number, participation))
            engine.commit(number)
        return server

    def evaluator(self, statistics: BatchNormStatistics | None = None, **changes: Any) -> Evaluator:
        held = build_client_data(self.dataset, self.partition, self.fleet)
        made = Evaluator(
            dataset=self.dataset,
            local_tests=[torch.from_numpy(rows) for rows in self.partition.test],
            seen_labels=torch.stack([held.seen_labels(device) for device in self.fleet.devices(1)]),
            statistics=statistics or BatchNormStatistics(batch_size=5),
        )
        return replace(made, **changes)


def build_world(
    family: str = "convnet",
    widths: Sequence[float] = (1.0,),
    sizes: Sequence[int] = (8, 8, 8),
    labels: Sequence[Sequence[int]] | None = None,
    test_sizes: Sequence[int] | None = None,
    shares: Sequence[float] | None = None,
    schedule: Schedule | None = None,
    optimizer: Optimizer | None = None,
    input_shape: tuple[int, ...] = (1, 6, 6),
    classes: int = 4,
    preparation: Preparation | None = None,
    models: Sequence[tuple[str, Model]] | None = None,
    **model_settings: Any,
) -> World:
    """Tiers are named a, b, … in the order of their widths; every device has all labels unless told otherwise."""
    labels = labels or [range(classes)] * len(sizes)
    test_sizes = test_sizes or [size // 2 + 1 for size in sizes]
    models = models or [
        (name, build_tiny(family, input_shape, classes, width, **{"widest": max(widths), **lesser, **model_settings}))
        for name, width in zip("abcdef", widths, strict=False)
        for lesser in [LESSER.get(family, {}) if width < max(widths) else {}]
    ]
    tokens = models[0][1].tokens
    made = partial(written, models[0][1], labels) if tokens else partial(pictured, input_shape, labels)
    seen = Preparation(mask_chance=0.2, mask_token=classes) if tokens else Preparation((0.4,), (0.3,))
    parts = [made(held, seed) for seed, held in enumerate((sizes, test_sizes))]
    return World(
        fleet=Fleet(make_tiers(models), tuple(shares or [1 / len(models)] * len(models)), len(sizes), seed=0),
        dataset=Dataset("toy", *parts, classes, preparation or seen, tokens),
        partition=Partition(rows_in_turn(sizes), rows_in_turn(test_sizes)),
        schedule=schedule or Schedule(batch_size=4),
        optimizer=optimizer or Sgd(0.1, momentum=0.9, weight_decay=5e-4, clip_norm=1.0),
    )


def build_world_for(method: Method, family: str | None = None, **changes: Any) -> World:
    """Two tiers if the method takes them, else one; of its first family, if none is said."""
    family = family or home_of(method)
    several = build_world(family, widths=(1.0, 0.5), **changes)
    if (
        fleet_problem(method, several.fleet) is not None and family in LESSER
    ):  # nothing narrower, but something less deep
        input_shape, classes = several.dataset.input_shape, several.dataset.classes
        sizes = [
            (name, build_tiny(family, input_shape, classes, **less))
            for name, less in (("a", {}), ("b", LESSER[family]))
        ]
        several = build_world(models=sizes, **changes)
    made = several if fleet_problem(method, several.fleet) is None else build_world(family, **changes)
    assert fleet_problem(method, made.fleet) is None
    return made


# settings without which a method's tiny runs would not be tiny, or would not show what it does
SMALL: dict[str, dict[str, Any]] = {
    "fedgkt": {"server_epochs": 1, "server_batch": 8, "server_planes": (2,), "server_blocks": (1,)},
    "fedhenn": {"strength": 0.5, "growth": "none", "probe_size": 6},
    "fedin": {"pairs": 4, "batch": 6},
    "mixed": {
        "strength": 0.5,
        "growth": "none",
        "probe_size": 6,
        "parts": (
            {"tiers": ("a",), "method": "heterofl"},
            {"tiers": ("b",), "method": "fedhenn", "align": True, "probe_size": 5, "strength": 0.2, "growth": "none"},
        ),
    },
}


def build_method(name: str, **settings: Any) -> Method:
    """A method as it is by default, but for what makes it small."""
    made: Method = METHODS[name].from_settings({**SMALL.get(name, {}), **settings}, METHODS)
    return made


def admits(method: Method, family: str) -> bool:
    return any(fleet_problem(method, build_world(family, widths).fleet) is None for widths in ((1.0,), (1.0, 0.5)))


def home_of(method: Method) -> str:
    """The family that a method's tests use, where they do not go through all."""
    return next(family for family in ("convnet", "splitnet", *sorted(MODELS)) if admits(method, family))


# besides a family that many methods admit, those that methods were made for; every other pair is slow
MADE_FOR_EACH_OTHER = {
    ("heterofl", "transformer"), ("fedhen", "preactresnet"), ("fedhenn", "lstm"), ("standalone", "lenet"),
}  # fmt: skip


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every family in turn, every method, or every method with every family that it admits."""
    wanted = {"method", "family"} & set(metafunc.fixturenames) - explicit_parameters(metafunc)
    of_images = sorted(set(MODELS) - set(TOKENS))
    if wanted == {"family"}:
        metafunc.parametrize("family", of_images)
    if "method" not in wanted:
        return
    methods = {name: build_method(name) for name in sorted(METHODS)}
    if "family" not in wanted:
        metafunc.parametrize("method", methods.values(), ids=methods)
        return
    pairs = []
    for name, method in methods.items():
        for family in sorted(MODELS):
            if admits(method, family):
                quick = family == home_of(method) or (name, family) in MADE_FOR_EACH_OTHER
                marks = [] if quick else [pytest.mark.slow]
                pairs.append(pytest.param(method, family, id=f"{name}-{family}", marks=marks))
    metafunc.parametrize(("method", "family"), pairs)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The one test that takes as long as all others together begins first, so that nobody waits for it alone."""
    items.sort(key=lambda item: item.path.name != "test_superlink.py")


def explicit_parameters(metafunc: pytest.Metafunc) -> set[str]:
    """What the test names itself."""
    marks = metafunc.definition.iter_markers("parametrize")
    named = [mark.args[0] for mark in marks]
    return {one.strip() for names in named for one in (names.split(",") if isinstance(names, str) else names)}


@dataclass
class ScriptedEngine:
    """Devices that answer what the test wrote for them; it keeps what they were asked."""

    answer: Callable[[Device, Parcel], Reply | None]
    asked: list[tuple[str, Mapping[Device, Parcel]]] = field(default_factory=list)
    committed: list[int] = field(default_factory=list)

    def ask(self, request: Request) -> Iterator[Reply]:
        self.asked.append((request.task.name, request.inboxes))
        for device, inbox in request.inboxes.items():
            reply = self.answer(device, inbox)
            if reply is not None:
                yield reply

    def commit(self, round_number: int) -> None:
        self.committed.append(round_number)

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class TransportedEngine:
    """An engine whose requests pass some more transports."""

    engine: Engine
    transports: tuple[Transport, ...]

    def ask(self, request: Request) -> Iterable[Reply]:
        return self.engine.ask(replace(request, transports=(*request.transports, *self.transports)))

    def commit(self, round_number: int) -> None:
        self.engine.commit(round_number)

    def close(self) -> None:
        self.engine.close()


def with_transports(engine: Engine, *transports: Transport) -> TransportedEngine:
    return TransportedEngine(engine, transports)


def with_compression(engine: InProcess, compression: Compression, *network: Transport) -> TransportedEngine:
    """Both ends of compression, and what happens between them."""
    gate = engine.gate
    server = ServerEnd(compression, gate.report, gate.max_examples)
    return TransportedEngine(engine, (server, *network, DeviceEnd(compression, engine.client_states.residual)))


def inject_faults(
    engine: InProcess, plan: FaultPlan, seconds: Any = None, report: Callable[[Refusal], None] = lambda refusal: None,
    wire: ByteCounter = UNCOMPRESSED,
) -> FaultInjector:  # fmt: skip
    return FaultInjector(plan, seconds, engine.client_data.count, wire, Responses(), report)


@dataclass
class MeddlingEngine:
    """Another engine's replies, changed on their way to the server; it keeps what the server got."""

    engine: Engine
    meddle: Callable[[list[Reply]], Iterable[Reply]]
    delivered: list[Reply] = field(default_factory=list)

    def ask(self, request: Request) -> list[Reply]:
        replies = list(self.meddle(list(self.engine.ask(request))))
        self.delivered += replies
        return replies

    def commit(self, round_number: int) -> None:
        self.engine.commit(round_number)

    def close(self) -> None:
        self.engine.close()


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Equal as stored, so that a zero of the other sign differs and a NaN equals itself."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    bytes_of = [tensor.detach().contiguous().flatten().view(torch.uint8) for tensor in (left, right)]
    return torch.equal(*bytes_of)


def same_parcel(left: Parcel, right: Parcel) -> bool:
    """Equal to the bit, bundle by bundle."""
    return left.keys() == right.keys() and all(
        left[bundle].keys() == right[bundle].keys()
        and all(same_bits(tensor, right[bundle][name]) for name, tensor in tensors.items())
        for bundle, tensors in left.items()
    )


def largest_difference(left: Parcel, right: Parcel) -> float:
    """Over all numbers of two parcels of the same names."""
    assert left.keys() == right.keys()
    differences = [0.0]
    for bundle, tensors in left.items():
        assert tensors.keys() == right[bundle].keys()
        differences += [float((t.double() - right[bundle][name].double()).abs().max()) for name, t in tensors.items()]
    return max(differences)


def random_block(model: Model, devices: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> dict[str, Tensor]:
    """Different random weights for every device of a block."""
    draw = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(devices, *shape, generator=draw, dtype=torch.float64).mul(0.5).to(dtype)
        for name, shape in model.shapes().items()
    }


def build_client(
    model: Model, examples: Examples, plan: Sequence[Step], optimizer: Optimizer | None = None, **changes: Any
) -> Client:
    """A block of devices that share a store of examples."""
    devices = len(plan[0].rows)
    made = Client(
        model=model,
        optimizer=optimizer or Sgd(0.1),
        examples=examples,
        tests=examples,
        test_indices=PaddedIndices(
            torch.zeros(devices, 1, dtype=torch.int64), torch.ones(devices, 1, dtype=torch.bool)
        ),
        preparation=Preparation(),
        plan=tuple(plan),
        seen_labels=torch.ones(devices, model.classes, dtype=torch.bool),
        state={},
    )
    return replace(made, **changes)


def device_of(block: Tensors, number: int) -> dict[str, Tensor]:
    """One device of a block, as a block of one."""
    return {name: tensor[number : number + 1] for name, tensor in block.items()}


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Whatever a test draws without saying from where is the same in every run."""
    torch.manual_seed(0)


@pytest.fixture
def double() -> Iterator[None]:
    """Everything is float64 by default."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.fixture(scope="session")
def tiny_model() -> Callable[..., Model]:
    return build_tiny


@pytest.fixture(scope="session")
def world() -> Callable[..., World]:
    return build_world


@pytest.fixture(scope="session")
def world_for() -> Callable[..., World]:
    return build_world_for


@pytest.fixture(scope="session")
def scripted() -> type[ScriptedEngine]:
    return ScriptedEngine


@pytest.fixture(scope="session")
def meddling() -> type[MeddlingEngine]:
    return MeddlingEngine


@pytest.fixture(scope="session")
def bits_equal() -> Callable[[Tensor, Tensor], bool]:
    return same_bits


@pytest.fixture(scope="session")
def parcels_equal() -> Callable[[Parcel, Parcel], bool]:
    return same_parcel


@pytest.fixture(scope="session")
def difference() -> Callable[[Parcel, Parcel], float]:
    return largest_difference


@pytest.fixture(scope="session")
def block_weights() -> Callable[..., dict[str, Tensor]]:
    return random_block


@pytest.fixture(scope="session")
def client_for() -> Callable[..., Client]:
    return build_client


@pytest.fixture(scope="session")
def pick_device() -> Callable[[Tensors, int], dict[str, Tensor]]:
    return device_of
