"""Whole runs over Flower's messages: the rows of a run in process, and the same bits after a crash."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedloom
from fedloom.data import DATASETS, Dataset, Partition
from fedloom.deploy.remote import attach_engine, build_node_registry, over_flower
from fedloom.deploy.runtime import build_runtime, describe_device
from fedloom.flower.client_state import ClientStateFiles
from fedloom.recipe.errors import RecipeError
from fedloom.recipe.load import load
from fedloom.recipe.registry import Registry
from fedloom.runs.build import Experiment, assemble
from fedloom.runs.folder import read_manifest, read_rows
from fedloom.runs.recorder import recorded
from fedloom.runs.resume import standing_of
from fedloom.tensors import fingerprint
from tests import chaos
from tests.conftest import rows_in_turn
from tests.desk import FIRST, Desk

Recipe = Callable[..., dict[str, Any]]


def experiment(document: dict[str, Any], disks: Path, data: str = "") -> Experiment:
    """Its devices are at a desk, each with a disk of its own, and perhaps data."""
    from fedloom.flower.apps import client_app

    def app(number: int) -> Any:
        folder = disks / str(number)
        config = {"device": number, "folder": str(folder), "data-dir": str(folder / data if data else disks)}
        return client_app(lambda recipe, _: build_runtime(recipe, config), lambda _: describe_device(config))

    made = assemble(load(document, Registry()), Registry(), disks.parent / "server" if data else disks)
    apps = {FIRST + number: app(number) for number in range(made.fleet.size)}
    nodes = build_node_registry(Desk(apps), made.fleet)
    nodes.client.poll_interval = 0.0
    return over_flower(made, nodes)


def run(document: dict[str, Any], folder: Path, disks: Path) -> None:
    for _ in recorded(experiment(document, disks), folder):
        pass


def go_on(document: dict[str, Any], folder: Path, disks: Path) -> None:
    made = experiment(document, disks)
    for _ in recorded(made, folder, standing_of(folder, made)):
        pass


def remembered(folder: Path, disks: Path) -> dict[str, str]:
    """What devices have on their disks at last."""
    found = {}
    for place in sorted(disks.glob("*/*/*")):
        newest = max(path.name for path in place.glob("*.memory"))
        entry = ClientStateFiles(place).read((int(newest[:6]), int(newest[7:11])))
        assert entry is not None and entry.task is not None
        found[place.name] = fingerprint(entry.task)
    return found


JUDGED: dict[str, dict[str, Any]] = {
    "heterofl": {
        "model": {"hidden": [2, 4], "normalization": "static_batch"},
        "evaluation": {"statistics": {"query": "per_device"}, "fine_tune": {"epochs": 1}, "per_device": "always"},
    },
    "standalone": {"evaluation": {"per_device": "always"}, "admission": {"norm": 100.0}},
    "fedavg": {
        "tiers": [{"name": "all", "share": 1.0}],
        "compression": {"uplink": {"kind": "top_k", "share": 0.3}, "downlink": {"kind": "float16"}},
    },
}


@pytest.mark.parametrize("method", JUDGED)
def test_the_rows_are_those_of_a_run_in_process(method: str, tmp_path: Path) -> None:
    document = {
        **chaos.recipe("heterofl", 2),
        "method": {"name": method},
        "engine": {"devices_per_block": 1},
        **JUDGED[method],
    }
    document["evaluation"] = {"every": 1, **document["evaluation"]}
    here = fedloom.run(document, out=tmp_path / "here")
    run(document, tmp_path / "there", tmp_path / "disks")
    assert read_manifest(tmp_path / "there")["sha256"] == read_manifest(here.folder)["sha256"]
    assert (tmp_path / "there" / "rows.jsonl").read_text() == (here.folder / "rows.jsonl").read_text()
    assert (tmp_path / "there" / "events.jsonl").read_text() == ""


def killed_in(document: dict[str, Any], folder: Path, disks: Path, round_number: int) -> None:
    """A process that dies when all devices have answered, but nothing counts yet."""
    child = os.fork()
    if child == 0:
        made = experiment(document, disks)
        commit = made.engine.commit

        def die(number: int) -> None:
            if number == round_number:
                os.kill(os.getpid(), signal.SIGKILL)
            commit(number)

        made.engine.commit = die  # type: ignore[method-assign]
        try:
            for _ in recorded(made, folder):
                pass
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL


@pytest.mark.parametrize("family", ["fedhenn"])
def test_a_server_that_dies_between_answers_and_commit_goes_on_to_the_same_bits(family: str, tmp_path: Path) -> None:
    document = {**chaos.recipe(family, 4), "fleet": {"participation": 1.0}, "checkpoints": {"every": 0}}
    run(document, tmp_path / "whole", tmp_path / "disks")
    killed_in(document, tmp_path / "killed", tmp_path / "others", round_number=3)
    go_on(document, tmp_path / "killed", tmp_path / "others")
    whole, killed = chaos.outcome(tmp_path / "whole"), chaos.outcome(tmp_path / "killed")
    assert killed == whole
    assert remembered(tmp_path / "killed", tmp_path / "others") == remembered(tmp_path / "whole", tmp_path / "disks")


def test_memories_on_disk_are_those_in_process(tmp_path: Path) -> None:
    document = {**chaos.recipe("fedhenn", 2), "engine": {"devices_per_block": 1}}
    made = assemble(load(document, Registry()), Registry(), tmp_path)
    for _ in recorded(made, tmp_path / "here"):
        pass
    run(document, tmp_path / "there", tmp_path / "disks")
    kept = {name: fingerprint(parcel) for name, parcel in made.memory.committed.items()}
    assert remembered(tmp_path / "there", tmp_path / "disks") == kept


def save(folder: Path, train: Dataset, rows: Any, tests: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    x, y = train.train.x.numpy(), train.train.y.numpy()
    np.savez(folder / "own.npz", x_train=x[rows], y_train=y[rows], x_test=x[tests], y_test=y[tests])


def test_devices_with_data_of_their_own_learn_as_if_it_had_been_dealt_to_them(tmp_path: Path) -> None:
    """And they judge on their own tests, of which the server knows nothing."""
    digits, sizes = DATASETS["digits"](), (12, 9, 14)
    train, tests = rows_in_turn(sizes), [np.arange(100 + 10 * number, 110 + 10 * number) for number in range(3)]
    everything = np.concatenate(tests)
    save(tmp_path / "all", digits, np.arange(sum(sizes)), everything)
    save(tmp_path / "server", digits, np.arange(90, 95), everything)
    for number in range(3):
        save(tmp_path / "disks" / str(number) / "data", digits, train[number], tests[number])
    Partition(train, tuple(rows_in_turn([10] * 3))).save(tmp_path / "map.json")
    data = {"dataset": "npz", "file": "own.npz", "classes": 10, "devices": 3}
    document = {
        **chaos.recipe("heterofl", 2), "fleet": {}, "evaluation": {"per_device": "always"},
        "data": {**data, "partition": {"kind": "file", "path": str(tmp_path / "map.json")}}, "engine": {"devices_per_block": 1},
    }  # fmt: skip
    here = fedloom.run(document, out=tmp_path / "here", data_dir=tmp_path / "all")
    away = {
        **document,
        "data": {**data, "partition": {"kind": "own"}},
        "engine": {"devices_per_block": 1, "kind": "flower"},
    }
    made = experiment(away, tmp_path / "disks", "data")
    for _ in recorded(made, tmp_path / "there"):
        pass
    assert read_manifest(tmp_path / "there")["sha256"] == read_manifest(here.folder)["sha256"]
    tier_of = {device.name: device.tier for device in made.fleet.devices(1)}
    expected = {
        (row.round, row.device): row.value
        for row in read_rows(here.folder)
        if row.test == "local" and row.metric == "accuracy" and row.device and row.tier == tier_of[row.device]
    }
    found = {
        (row.round, row.device): row.value
        for row in read_rows(tmp_path / "there")
        if row.test == "local" and row.metric == "accuracy" and row.device
    }
    assert found == expected != {}


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"engine": {"kind": "flower"}}, "DEPLOYMENT"),
        ({"engine": {"kind": "flower-sim"}, "faults": {"dropout": 0.5}}, "SIMULATION_ONLY"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(
    changes: dict[str, Any], code: str, tmp_path: Path
) -> None:
    document = {**chaos.recipe("heterofl", 1), **changes}
    made = assemble(load(document, Registry()), Registry(), tmp_path)
    with pytest.raises(RecipeError) as raised:
        attach_engine(made, Registry(), tmp_path, tmp_path / "run")
    assert [problem.code for problem in raised.value.issues] == [code]
    assert not (tmp_path / "run").exists()


def test_names_of_this_process_alone_do_not_travel(tmp_path: Path) -> None:
    registry = Registry().with_names(methods={"mine": Registry().methods["heterofl"]})
    document = {**chaos.recipe("heterofl", 1), "engine": {"kind": "flower-sim"}, "method": {"name": "mine"}}
    with pytest.raises(RecipeError, match="this process only"):
        attach_engine(assemble(load(document, registry), registry, tmp_path), registry, tmp_path, tmp_path / "run")
