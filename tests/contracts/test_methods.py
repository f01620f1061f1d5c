"""The contract of every method, with every model family: the checks of `fedloom.testing`, one test each."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from fedloom.client import Schedule
from fedloom.methods import METHODS, Method, fleet_problem
from fedloom.testing import METHOD_CHECKS
from fedloom.testing.methods import (
    DEVICE_LABELS,
    DEVICE_SIZES,
    check_blocks_train_alike,
    check_method,
    check_missing_replies,
    check_redrawn_tiers,
)
from fedloom.testing.world import TINY_METHODS

ON_EVERY_FAMILY = (
    "check_uploads",
    "check_repeated_run",
    "check_blocks_evaluate_alike",
    "check_evaluation",
    "check_evaluation_changes_nothing",
)
BELOW = ("check_blocks_train_alike", "check_missing_replies")  # with further cases
ELSEWHERE = ("check_compression", "check_messages")  # in other files of this folder
ON_ONE_FAMILY = [name for name in METHOD_CHECKS if name not in (*ON_EVERY_FAMILY, *BELOW, *ELSEWHERE)]


@pytest.mark.parametrize("check", ON_EVERY_FAMILY)
def test_method_on_every_family_passes(check: str, method: Method, family: str, world_for: Callable[..., Any]) -> None:
    METHOD_CHECKS[check](method, world_for(method, family, sizes=DEVICE_SIZES, labels=DEVICE_LABELS))


TRIED_BELOW = ("check_redrawn_tiers", "check_training_changes_state", "check_unequal_steps")  # or with batching modes


@pytest.mark.parametrize(
    "check", [pytest.param(name, marks=[pytest.mark.slow] * (name in TRIED_BELOW)) for name in ON_ONE_FAMILY]
)
def test_method_on_its_family_passes(check: str, method: Method, world_for: Callable[..., Any]) -> None:
    METHOD_CHECKS[check](method, world_for(method, None, sizes=DEVICE_SIZES, labels=DEVICE_LABELS))


def test_block_of_devices_learns_as_alone(method: Method, family: str, world_for: Callable[..., Any]) -> None:
    """With last batches that are incomplete; in test_batching_modes.py they are filled up."""
    sim = world_for(method, family, sizes=DEVICE_SIZES, labels=DEVICE_LABELS, schedule=Schedule(4, 2, "keep"))
    check_blocks_train_alike(method, sim)


@pytest.mark.parametrize("kept", [1, *(pytest.param(kept, marks=pytest.mark.slow) for kept in (0, 2))])
def test_round_missing_replies_continues(kept: int, method: Method, world_for: Callable[..., Any]) -> None:
    check_missing_replies(method, world_for(method, None, sizes=DEVICE_SIZES, labels=DEVICE_LABELS), kept)


@pytest.mark.parametrize("name", sorted(METHODS))
def test_method_info_is_complete(name: str) -> None:
    kind = METHODS[name]
    assert kind.info.produces in ("global", "personalized")
    for text in (kind.info.paper, kind.info.uploads, kind.info.client_state):
        assert text.strip() == text != ""
    assert hash(kind()) == hash(kind())  # all hyperparameters have defaults and are immutable


NESTED = [
    "heterofl", "fedrolex", "fjord", "fedhen", "noside", "decouple", "fedsup", "efedsup", "depthfl", "scalefl",
]  # fmt: skip


@pytest.mark.parametrize("name", [NESTED[0], *(pytest.param(name, marks=pytest.mark.slow) for name in NESTED[1:])])
def test_redrawn_tiers_are_trained(name: str, family: str, world: Callable[..., Any]) -> None:
    pooled = {"exit_pool": "global"} if family == "preactresnet" else {}  # windows cannot roll after a flattened map
    sim = world(family, widths=(1.0, 0.5), sizes=DEVICE_SIZES, labels=DEVICE_LABELS, **pooled)
    redrawn = replace(sim.fleet, assignment="redrawn")
    if name in ("fedhen", "noside", "depthfl", "scalefl") and family not in ("columnnet", "preactresnet", "unet"):
        assert "is about early exits" in str(fleet_problem(METHODS[name](), redrawn))
        return
    assert fleet_problem(METHODS[name](), redrawn) is None
    tiers = [{redrawn.device(index, number).tier for number in (1, 2, 3)} for index in range(redrawn.size)]
    assert {"a", "b"} in tiers  # some device is of both
    assert check_redrawn_tiers(METHODS[name](), sim) is None
    engine = sim.engine(METHODS[name]())
    replace(sim, fleet=redrawn).play(METHODS[name](), engine, rounds=2, participation=0.6)
    assert not any(engine.client_states.committed.values())  # nothing that belongs to an earlier tier


@pytest.mark.slow  # its checks are tried one by one above
@pytest.mark.parametrize("name", METHODS)
def test_check_method_of_class_with_settings_passes(name: str) -> None:
    report = check_method(METHODS[name], settings=TINY_METHODS.get(name))
    assert report.passed == tuple(METHOD_CHECKS)
