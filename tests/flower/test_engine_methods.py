"""Every method gives over Flower's messages the result it gives in process."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedloom.flower.client_state import ClientStateFiles
from fedloom.flower.engine import Flower
from fedloom.methods import Method
from fedloom.tensors import Parcel, fingerprint
from tests.in_memory_grid import connect

SIZES = (8, 5, 9, 8)
LABELS = [[0, 1], [1, 2], [0, 1, 2, 3], [0, 3]]


def read_client_states(engine: Flower, folder: Path) -> dict[str, Parcel]:
    """The state files of all devices, in the versions that the server has committed."""
    states = {}
    for name in engine.client_states.versions:
        version = engine.client_states.newest(name)
        assert version is not None
        saved = ClientStateFiles(folder / name / engine.run() / name).read(version)
        assert saved is not None and saved.task is not None
        states[name] = saved.task
    return states


@pytest.mark.usefixtures("double")
def test_engine_every_method_equals_in_process(
    method: Method, world_for: Callable[..., Any], difference: Callable[[Parcel, Parcel], float], tmp_path: Path
) -> None:
    small_world = world_for(method, None, sizes=SIZES, labels=LABELS)
    here, there = small_world.engine(method), connect(small_world, method, tmp_path)
    assert difference(small_world.play(method, there), small_world.play(method, here)) <= 1e-8
    states = read_client_states(there, tmp_path)
    assert states.keys() == here.client_states.committed.keys()
    for name, parcel in states.items():
        assert difference(parcel, here.client_states.committed[name]) <= 1e-8
    assert small_world.refusals == []


@pytest.mark.parametrize("name", ["heterofl", "fedhenn", "fedsup"])
def test_engine_blocks_of_one_equal_in_process_bits(name: str, world_for: Callable[..., Any], tmp_path: Path) -> None:
    from tests.conftest import build_method

    method = build_method(name)
    small_world = world_for(method, None, sizes=SIZES, labels=LABELS)
    here, there = small_world.engine(method, devices_per_block=1), connect(small_world, method, tmp_path, block=1)
    assert fingerprint(small_world.play(method, there)) == fingerprint(small_world.play(method, here))
    assert read_client_states(there, tmp_path).keys() == here.client_states.committed.keys()
    for device, parcel in read_client_states(there, tmp_path).items():
        assert fingerprint(parcel) == fingerprint(here.client_states.committed[device])
