"""Fixtures that many tests share: most hand out a part of `fedloom.testing`."""

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from inspect import signature
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import settings
from torch import Tensor

from fedloom import testing
from fedloom.client import Client
from fedloom.engines import FaultInjector, FaultPlan, InProcess, Refusal
from fedloom.fleet import UNCOMPRESSED, ByteCounter, Responses
from fedloom.methods import METHODS, Method
from fedloom.models import MODELS, Model
from fedloom.tensors import Parcel, Tensors
from fedloom.testing import InterceptingEngine, ScriptedEngine, TinyWorld
from fedloom.testing.world import (
    SMALLER_SETTINGS,
    TINY_METHODS,
    TINY_SETTINGS,
    home_family,
    takes_family,
    takes_setting,
)

# as every run has it; sums come out otherwise with more, also where make did not start the tests
torch.set_num_threads(1)

# drawing takes longer than these runs; whoever tests reports asks for them
os.environ.setdefault("FEDLOOM_REPORT", "off")

# every run tries the same cases, so a failure seen once is seen again
settings.register_profile("fedloom", deadline=None, max_examples=40, derandomize=True, database=None)
settings.load_profile("fedloom")

# the families that read rows of tokens
TOKENS = tuple(name for name, build in MODELS.items() if "tokens" in signature(build).parameters)


def build_method(name: str, **settings: Any) -> Method:
    """A method as it is by default, but for what makes it small."""
    made: Method = METHODS[name].from_settings({**TINY_METHODS.get(name, {}), **settings}, METHODS)
    return made


def smaller_size(family: str) -> dict[str, Any]:
    """Settings of a smaller size: half the width, or what a family without widths has instead."""
    has_width = takes_setting(signature(MODELS[family]).parameters, "width")
    return {"width": 0.5} if has_width else SMALLER_SETTINGS[family]


# besides a family that many methods admit, those that methods were made for; every other pair is slow
MADE_FOR_EACH_OTHER = {
    ("heterofl", "transformer"), ("inclusivefl", "transformer"), ("fedhen", "preactresnet"), ("fedhenn", "lstm"),
    ("standalone", "lenet"), ("everytier", "columnnet"),
}  # fmt: skip


# what `make test` tries of every contract: the five systems, and one method of each other kind
IN_EVERY_RUN = {
    "heterofl", "fedhen", "fedsup", "efedsup", "fedhenn", "fedin",
    "fedavg", "standalone", "ditto", "depthfl", "fedproto", "fml", "scaffold", "everytier",
}  # fmt: skip
TRY_ALL_METHODS = {"cli", "contracts", "engines", "flower", "recipe", "runs"}
METHOD_NAMES = {METHODS[name]: name for name in METHODS}
_NO_PARAMETERS = SimpleNamespace(params={})


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
    metafunc.parametrize(("method", "family"), methods_and_families())


@cache
def methods_and_families() -> list[Any]:
    """Every method with every family that it takes."""
    assert set(MODELS) == set(TINY_SETTINGS), "every family has a tiny size, so that every contract runs on it"
    pairs = []
    for name, method in ((name, build_method(name)) for name in sorted(METHODS)):
        home = home_family(method)
        for family in sorted(MODELS):
            if takes_family(method, family):
                marks = [] if family == home or (name, family) in MADE_FOR_EACH_OTHER else [pytest.mark.slow]
                pairs.append(pytest.param(method, family, id=f"{name}-{family}", marks=marks))
    return pairs


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests of other methods than those of every run as slow, in the folders of tests that try all methods.

    The one test that takes as long as all others together begins first, so that nobody waits for it alone.
    """
    for item in items:
        if isinstance(item, pytest.Function) and TRY_ALL_METHODS & set(item.path.parts):
            tried = {_method_name(value) for value in getattr(item, "callspec", _NO_PARAMETERS).params.values()}
            if tried - {None} and not tried & IN_EVERY_RUN:
                item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: item.path.name != "test_superlink.py")


def _method_name(value: Any) -> str | None:
    """The name of a method that a test gets, as such or by its name."""
    return value if isinstance(value, str) and value in METHODS else METHOD_NAMES.get(type(value))


def explicit_parameters(metafunc: pytest.Metafunc) -> set[str]:
    """What the test names itself."""
    marks = metafunc.definition.iter_markers("parametrize")
    named = [mark.args[0] for mark in marks]
    return {one.strip() for names in named for one in (names.split(",") if isinstance(names, str) else names)}


def inject_faults(
    engine: InProcess, plan: FaultPlan, seconds: Any = None, report: Callable[[Refusal], None] = lambda refusal: None,
    wire: ByteCounter = UNCOMPRESSED,
) -> FaultInjector:  # fmt: skip
    return FaultInjector(plan, seconds, engine.client_data.count, wire, Responses(), report)


def with_lanes(world: TinyWorld) -> TinyWorld:
    """The same world, whose models run by the lane kernels where they can."""
    tiers = tuple(replace(tier, model=replace(tier.model, kernels="lanes")) for tier in world.fleet.tiers)
    return replace(world, fleet=replace(world.fleet, tiers=tiers))


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
    return testing.tiny_model


@pytest.fixture(scope="session")
def world() -> Callable[..., TinyWorld]:
    return TinyWorld.make


@pytest.fixture(scope="session")
def world_for() -> Callable[..., TinyWorld]:
    return TinyWorld.for_method


@pytest.fixture(scope="session")
def scripted() -> type[ScriptedEngine]:
    return ScriptedEngine


@pytest.fixture(scope="session")
def meddling() -> type[InterceptingEngine]:
    return InterceptingEngine


@pytest.fixture(scope="session")
def bits_equal() -> Callable[[Tensor, Tensor], bool]:
    return testing.same_bits


@pytest.fixture(scope="session")
def parcels_equal() -> Callable[[Parcel, Parcel], bool]:
    return testing.same_parcel


@pytest.fixture(scope="session")
def difference() -> Callable[[Parcel, Parcel], float]:
    return testing.largest_difference


@pytest.fixture(scope="session")
def block_weights() -> Callable[..., dict[str, Tensor]]:
    return testing.random_block


@pytest.fixture(scope="session")
def client_for() -> Callable[..., Client]:
    return testing.build_client


@pytest.fixture(scope="session")
def pick_device() -> Callable[[Tensors, int], dict[str, Tensor]]:
    return device_of
