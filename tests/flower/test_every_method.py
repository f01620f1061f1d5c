"""Every method learns over Flower's messages what it learns in process."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedloom.flower.client_state import ClientStateFiles
from fedloom.flower.engine import Flower
from fedloom.methods import Method
from fedloom.tensors import Parcel, fingerprint
from tests.desk import connect

SIZES = (8, 5, 9, 8)
LABELS = [[0, 1], [1, 2], [0, 1, 2, 3], [0, 3]]


def memories(engine: Flower, folder: Path) -> dict[str, Parcel]:
    """What devices have on their disks and what the server says counts."""
    found = {}
    for name in engine.memory.stamps:
        stamp = engine.memory.newest(name)
        assert stamp is not None
        kept = ClientStateFiles(folder / name / engine.run() / name).read(stamp)
        assert kept is not None and kept.task is not None
        found[name] = kept.task
    return found


@pytest.mark.usefixtures("double")
def test_as_in_process(
    method: Method, world_for: Callable[..., Any], difference: Callable[[Parcel, Parcel], float], tmp_path: Path
) -> None:
    place = world_for(method, None, sizes=SIZES, labels=LABELS)
    here, there = place.engine(method), connect(place, method, tmp_path)
    assert difference(place.play(method, there), place.play(method, here)) <= 1e-8
    kept = memories(there, tmp_path)
    assert kept.keys() == here.memory.committed.keys()
    for name, parcel in kept.items():
        assert difference(parcel, here.memory.committed[name]) <= 1e-8
    assert place.refusals == []


@pytest.mark.parametrize("name", ["heterofl", "fedhenn", "fedsup"])
def test_one_sha256_where_devices_run_one_by_one(name: str, world_for: Callable[..., Any], tmp_path: Path) -> None:
    from tests.conftest import build_method

    method = build_method(name)
    place = world_for(method, None, sizes=SIZES, labels=LABELS)
    here, there = place.engine(method, devices_per_block=1), connect(place, method, tmp_path, block=1)
    assert fingerprint(place.play(method, there)) == fingerprint(place.play(method, here))
    assert memories(there, tmp_path).keys() == here.memory.committed.keys()
    for device, parcel in memories(there, tmp_path).items():
        assert fingerprint(parcel) == fingerprint(here.memory.committed[device])
