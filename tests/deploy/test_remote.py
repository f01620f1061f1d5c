"""Complete runs over Flower's messages: the rows of an in-process run, and the same bits after a crash."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedloom.flower

pytest.importorskip("flwr")

from fedloom.data import DATASETS, Dataset, Partition
from fedloom.deploy.remote import attach_engine, attach_flower, build_node_registry
from fedloom.deploy.runtime import build_runtime, describe_device
from fedloom.flower.client_state import ClientStateFiles
from fedloom.flower.engine import Flower
from fedloom.flower.nodes import REPLY_TIMEOUT
from fedloom.recipe.errors import RecipeError
from fedloom.recipe.load import load
from fedloom.recipe.registries import Registries
from fedloom.runs.build import assemble
from fedloom.runs.experiment import Experiment
from fedloom.runs.folder import read_manifest, read_rows
from fedloom.runs.recorder import record_rounds
from fedloom.runs.resume import read_resume_point
from fedloom.tensors import fingerprint
from fedloom.testing.world import consecutive_rows as rows_in_turn
from tests import chaos
from tests.in_memory_grid import FIRST_NODE, InMemoryGrid

Recipe = Callable[..., dict[str, Any]]


def build_experiment(document: dict[str, Any], disks: Path, data: str = "") -> Experiment:
    """An experiment whose devices are on an in-memory grid, each with its own folder and optionally its own data."""
    from fedloom.flower.apps import client_app

    def app(number: int) -> Any:
        folder = disks / str(number)
        config = {"device": number, "folder": str(folder), "data-dir": str(folder / data if data else disks)}
        return client_app(lambda recipe, _: build_runtime(recipe, config), lambda _: describe_device(config))

    experiment = assemble(load(document, Registries()), Registries(), disks.parent / "server" if data else disks)
    apps = {FIRST_NODE + number: app(number) for number in range(experiment.fleet.size)}
    nodes = build_node_registry(InMemoryGrid(apps), experiment.fleet)
    nodes.client.poll_interval = 0.0
    return attach_flower(experiment, nodes)


def run(document: dict[str, Any], folder: Path, disks: Path) -> None:
    for _ in record_rounds(build_experiment(document, disks), folder):
        pass


def resume(document: dict[str, Any], folder: Path, disks: Path) -> None:
    experiment = build_experiment(document, disks)
    for _ in record_rounds(experiment, folder, read_resume_point(folder, experiment)):
        pass


def read_client_states(disks: Path) -> dict[str, str]:
    """Fingerprints of the newest state of every device."""
    states = {}
    for folder in sorted(disks.glob("*/*/*")):
        newest = max(path.name for path in folder.glob("*.state"))
        saved = ClientStateFiles(folder).read((int(newest[:6]), int(newest[7:11])))
        assert saved is not None and saved.task is not None
        states[folder.name] = fingerprint(saved.task)
    return states


SETTINGS: dict[str, dict[str, Any]] = {
    "heterofl": {
        "model": {"hidden": [2, 4], "normalization": "static_batch"},
        "evaluation": {"statistics": {"query": "per_device"}, "fine_tune": {"epochs": 1}, "per_device": "always"},
        "admission": {"norm": 100.0},
    },
    "standalone": {"evaluation": {"per_device": "always"}},
    "fedavg": {
        "tiers": [{"name": "all", "share": 1.0}],
        "compression": {"uplink": {"kind": "top_k", "share": 0.3}, "downlink": {"kind": "float16"}},
    },
}


@pytest.mark.parametrize("method", SETTINGS)
def test_attach_flower_rows_equal_in_process(method: str, tmp_path: Path) -> None:
    document = {
        **chaos.recipe("heterofl", 2),
        "method": {"name": method},
        "engine": {"devices_per_block": 1},
        **SETTINGS[method],
    }
    document["evaluation"] = {"every": 1, **document["evaluation"]}
    here = fedloom.run(document, out=tmp_path / "here")
    run(document, tmp_path / "there", tmp_path / "disks")
    assert read_manifest(tmp_path / "there")["sha256"] == read_manifest(here.folder)["sha256"]
    assert (tmp_path / "there" / "rows.jsonl").read_text() == (here.folder / "rows.jsonl").read_text()
    assert (tmp_path / "there" / "events.jsonl").read_text() == ""


def run_killed_in(document: dict[str, Any], folder: Path, disks: Path, round_number: int) -> None:
    """Run in a child process that is killed after all replies of a round and before its commit."""
    child = os.fork()
    if child == 0:
        experiment = build_experiment(document, disks)
        commit = experiment.engine.commit

        def die(number: int) -> None:
            if number == round_number:
                os.kill(os.getpid(), signal.SIGKILL)
            commit(number)

        experiment.engine.commit = die  # type: ignore[method-assign]
        try:
            for _ in record_rounds(experiment, folder):
                pass
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL


@pytest.mark.parametrize("family", ["fedhenn"])
def test_attach_flower_server_killed_before_commit_resumes_to_the_same_bits(family: str, tmp_path: Path) -> None:
    document = {**chaos.recipe(family, 4), "fleet": {"participation": 1.0}, "checkpoints": {"every": 0}}
    run(document, tmp_path / "undisturbed", tmp_path / "disks")
    run_killed_in(document, tmp_path / "killed", tmp_path / "others", round_number=3)
    resume(document, tmp_path / "killed", tmp_path / "others")
    undisturbed, killed = chaos.outcome(tmp_path / "undisturbed"), chaos.outcome(tmp_path / "killed")
    assert killed == undisturbed
    assert read_client_states(tmp_path / "others") == read_client_states(tmp_path / "disks")


def test_attach_flower_client_state_on_disk_equals_in_process(tmp_path: Path) -> None:
    document = {**chaos.recipe("fedhenn", 2), "engine": {"devices_per_block": 1}}
    experiment = assemble(load(document, Registries()), Registries(), tmp_path)
    for _ in record_rounds(experiment, tmp_path / "here"):
        pass
    run(document, tmp_path / "there", tmp_path / "disks")
    expected = {name: fingerprint(parcel) for name, parcel in experiment.client_states.committed.items()}
    assert read_client_states(tmp_path / "disks") == expected


def save(folder: Path, train: Dataset, rows: Any, tests: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    x, y = train.train.x.numpy(), train.train.y.numpy()
    np.savez(folder / "own.npz", x_train=x[rows], y_train=y[rows], x_test=x[tests], y_test=y[tests])


def test_attach_flower_devices_with_own_data_equal_a_partition_of_it(tmp_path: Path) -> None:
    """They are evaluated on their own test sets, which the server does not have."""
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
        "data": {**data, "partition": {"kind": "file", "path": str(tmp_path / "map.json")}},
        "engine": {"devices_per_block": 1},
    }  # fmt: skip
    here = fedloom.run(document, out=tmp_path / "here", data_dir=tmp_path / "all")
    away = {
        **document,
        "data": {**data, "partition": {"kind": "own"}},
        "engine": {"devices_per_block": 1, "kind": "flower"},
    }
    experiment = build_experiment(away, tmp_path / "disks", "data")
    for _ in record_rounds(experiment, tmp_path / "there"):
        pass
    assert read_manifest(tmp_path / "there")["sha256"] == read_manifest(here.folder)["sha256"]
    tier_of = {device.name: device.tier for device in experiment.fleet.devices(1)}
    expected = {
        (row.round, row.device): row.value
        for row in read_rows(here.folder)
        if row.test == "local" and row.metric == "accuracy" and row.device and row.tier == tier_of[row.device]
    }
    actual = {
        (row.round, row.device): row.value
        for row in read_rows(tmp_path / "there")
        if row.test == "local" and row.metric == "accuracy" and row.device
    }
    assert actual == expected != {}


@pytest.mark.parametrize(("deadline", "seconds"), [(None, REPLY_TIMEOUT), (1.0, REPLY_TIMEOUT), (9e3, 9e3)])
def test_attach_flower_waits_for_busy_devices_until_the_deadline(
    deadline: float | None, seconds: float, tmp_path: Path
) -> None:
    """After the server was restarted, they first finish what they were asked before."""
    document = {**chaos.recipe("heterofl", 1), "engine": {"kind": "flower"}}
    engine = build_experiment({**document, "faults": {"deadline": deadline} if deadline else {}}, tmp_path).engine
    assert isinstance(engine, Flower) and engine.nodes.reply_timeout == seconds


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"engine": {"kind": "flower"}}, "DEPLOYMENT"),
        ({"engine": {"kind": "flower-sim"}, "faults": {"dropout": 0.5}}, "SIMULATION_ONLY"),
    ],
)
def test_attach_engine_unsupported_recipe_is_refused_before_writing(
    changes: dict[str, Any], code: str, tmp_path: Path
) -> None:
    document = {**chaos.recipe("heterofl", 1), **changes}
    experiment = assemble(load(document, Registries()), Registries(), tmp_path)
    with pytest.raises(RecipeError) as raised:
        attach_engine(experiment, Registries(), tmp_path, tmp_path / "run")
    assert [issue.code for issue in raised.value.issues] == [code]
    assert not (tmp_path / "run").exists()


def test_attach_engine_names_without_a_file_are_refused(tmp_path: Path) -> None:
    registries = Registries().with_names(methods={"mine": Registries().methods["heterofl"]})
    document = {**chaos.recipe("heterofl", 1), "engine": {"kind": "flower-sim"}, "method": {"name": "mine"}}
    with pytest.raises(RecipeError, match="this process only"):
        attach_engine(
            assemble(load(document, registries), registries, tmp_path), registries, tmp_path, tmp_path / "run"
        )
