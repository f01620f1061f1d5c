"""The files of a finished run."""

import json
import platform
import re
import tomllib
from pathlib import Path

import numpy
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import fedloom
from fedloom.api.run import Run
from fedloom.data import Partition
from fedloom.recipe.load import load
from fedloom.recipe.registries import Registries
from fedloom.runs.recorder import NothingAdmitted
from fedloom.tensors import fingerprint

SHA256 = re.compile("[0-9a-f]{64}")


@pytest.fixture(scope="module")
def finished(document, tmp_path_factory):
    """Two rounds of HeteroFL on devices with half of the labels each."""
    document_used = document(data__partition={"kind": "label_shards", "labels_per_device": 5}, evaluation={"every": 2})
    folder = tmp_path_factory.mktemp("run") / "run"
    return fedloom.run(document_used, out=folder), document_used


def lines(run, name):
    return [json.loads(line) for line in (run.folder / name).read_text().splitlines()]


def test_run_folder_has_expected_files(finished):
    run, _ = finished
    found = [path.relative_to(run.folder) for path in run.folder.rglob("*") if path.is_file()]
    assert Path("checkpoints/LATEST") in found
    assert sorted(str(path) for path in found if path.parts[0] != "checkpoints") == [
        "cka.json", "correct.json", "events.jsonl", "fleet.json", "manifest.json", "models/large.safetensors",
        "models/small.safetensors", "participation.jsonl", "partition.json", "recipe.toml", "rows.jsonl",
        "timings.jsonl",
    ]  # fmt: skip


def test_run_folder_recipe_with_defaults_equals_recipe(finished):
    run, document_used = finished
    written = tomllib.loads((run.folder / "recipe.toml").read_text())
    assert written["training"] == {
        "epochs": 1,
        "batch_size": 100,
        "last_batch": "keep",
        "shuffle": True,
        "optimizer": {"kind": "sgd"},
        "lr_schedule": {"kind": "constant"},
    }
    assert load(run.folder / "recipe.toml", Registries()).recipe == load(document_used, Registries()).recipe


def test_manifest_has_status_versions_and_fingerprints(finished):
    run, _ = finished
    manifest = json.loads((run.folder / "manifest.json").read_text())
    assert manifest["status"] == "finished"
    assert manifest["seed"] == 0
    assert manifest["test_examples"] == 360
    assert manifest["python"] == platform.python_version()
    assert manifest["torch"] == torch.__version__
    assert manifest["numpy"] == numpy.__version__
    for key in ("data", "partition", "sha256"):
        assert SHA256.fullmatch(manifest[key])
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", manifest["started"])


def test_manifest_has_package_version(finished):
    run, _ = finished
    assert json.loads((run.folder / "manifest.json").read_text())["fedloom"] == fedloom.__version__


def test_manifest_threads_is_one_and_restored(run):
    """Always one thread; the previous number is restored afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        done = run(rounds=1)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert json.loads((done.folder / "manifest.json").read_text())["threads"] == 1


def test_rows_have_all_keys(finished):
    run, _ = finished
    rows = lines(run, "rows.jsonl")
    assert all(list(row) == ["round", "candidate", "tier", "device", "test", "metric", "value"] for row in rows)
    assert [row.value for row in run.rows()] == [row["value"] for row in rows]
    evaluated = [row for row in rows if row["candidate"]]
    assert {row["round"] for row in evaluated} == {2}
    assert {(row["tier"], row["test"], row["metric"]) for row in evaluated if not row["device"]} == {
        (tier, test, metric)
        for tier in ("large", "small")
        for test, metric in (("global", "accuracy"), ("global", "loss"), ("local", "accuracy"))
    }
    assert {row["device"] for row in evaluated} == {"", "0", "1", "2", "3"}
    assert all(0 <= row["value"] <= 100 for row in evaluated if row["metric"] == "accuracy")


def test_rows_report_bytes_of_every_round(finished):
    run, _ = finished
    moved = [(row["round"], row["metric"], row["value"]) for row in lines(run, "rows.jsonl") if not row["candidate"]]
    down, labels = 2 * 4 * (158 + 66), 4 * 2
    assert moved == [
        (n, metric, down + extra) for n in (1, 2) for metric, extra in (("bytes_down", 0), ("bytes_up", labels))
    ]


def test_events_of_clean_run_are_empty(finished):
    run, _ = finished
    assert lines(run, "events.jsonl") == []


def test_run_without_admitted_reply_fails_with_reason(run, tmp_path):
    """A learning rate so large that weights become NaN: every reply is refused."""
    with pytest.raises(NothingAdmitted, match="no reply was ever admitted; device 0: NONFINITE") as caught:
        run(training__optimizer={"kind": "sgd", "lr": 1e38})
    assert "events.jsonl" in caught.value.hint
    done = Run(next(path.parent for path in tmp_path.rglob("events.jsonl")))
    assert json.loads((done.folder / "manifest.json").read_text())["status"] == "failed"
    events = lines(done, "events.jsonl")
    assert [(event["round"], event["device"], event["code"]) for event in events] == [
        (number, device, "NONFINITE") for number in (1, 2) for device in "0123"
    ]
    assert all(list(event) == ["round", "device", "code", "reason"] and event["reason"] for event in events)
    assert [row.value for row in done.rows() if row.metric == "bytes_up"] == [0, 0]


def test_run_folder_partition_can_be_reused(finished, run):
    first, document_used = finished
    partition = Partition.load(first.folder / "partition.json")
    manifest = json.loads((first.folder / "manifest.json").read_text())
    assert partition.fingerprint() == manifest["partition"]
    assert len(partition.train) == len(partition.test) == 4
    again = run(**{**document_used, "data__partition": {"kind": "file", "path": str(first.folder / "partition.json")}})
    assert json.loads((again.folder / "manifest.json").read_text())["sha256"] == manifest["sha256"]


def test_saved_models_are_slices_of_largest(finished):
    run, _ = finished
    large, small = (load_file(run.folder / "models" / f"{tier}.safetensors") for tier in ("large", "small"))
    assert large.keys() == small.keys()
    statistics = {name for name in large if name.endswith(("running_mean", "running_var"))}
    assert len(statistics) == 4
    for name in large.keys() - statistics:
        block = tuple(slice(0, size) for size in small[name].shape)
        assert torch.equal(large[name][block], small[name])
    assert sum(weight.numel() for name, weight in large.items() if name not in statistics) == 158
    assert all((large[name] > 0).all() for name in statistics if name.endswith("running_var"))


def test_saved_largest_model_has_run_fingerprint(finished):
    run, _ = finished
    large = load_file(run.folder / "models" / "large.safetensors")
    weights = {name: weight for name, weight in large.items() if "running" not in name}
    manifest = json.loads((run.folder / "manifest.json").read_text())
    assert fingerprint({"weights": weights}) == manifest["sha256"]


def test_saved_model_metadata_describes_model(finished):
    run, _ = finished
    with safe_open(run.folder / "models" / "small.safetensors", "pt") as file:
        about = json.loads(file.metadata()["about"])
    assert (about["family"], about["tier"]) == ("convnet", "small")
    assert (about["settings"]["width"], about["output"]["classes"], about["input"]["stored_shape"]) == (
        0.5,
        10,
        [1, 8, 8],
    )


def test_run_without_server_model_saves_none(run):
    done = run(method={"name": "standalone"}, rounds=1)
    assert not (done.folder / "models").exists()
    assert {(row.candidate, row.tier) for row in done.rows() if row.candidate} == {
        ("personal", "large"), ("personal", "small"),
    }  # fmt: skip


def test_run_final_lists_every_series(finished):
    run, _ = finished
    assert [(one.tier, one.test, one.metric) for one in run.final] == [
        *((tier, "global", metric) for tier in ("large", "small") for metric in ("accuracy", "loss")),
        *((tier, "local", "accuracy") for tier in ("large", "small")),
    ]
    assert all(one.best_round == 2 for one in run.final)
