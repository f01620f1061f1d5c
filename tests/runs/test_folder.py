"""A run's folder: written while the run goes, and never half."""

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from fedloom.evaluation import Row
from fedloom.runs.folder import RunWriter, read_manifest, read_rows

ROWS = [Row(1, "server", "large", "", "global", "accuracy", 12.5), Row(2, "", "", "", "", "bytes_down", 1e12)]


@pytest.fixture
def writer(tmp_path):
    made = RunWriter(tmp_path / "runs" / "one")
    made.open("rounds = 1\n", {"seed": 7})
    return made


def test_writer_open_creates_initial_files(writer):
    assert sorted(path.name for path in writer.folder.iterdir()) == [
        "events.jsonl", "manifest.json", "participation.jsonl", "recipe.toml", "rows.jsonl", "timings.jsonl",
    ]  # fmt: skip
    assert (writer.folder / "recipe.toml").read_text() == "rounds = 1\n"
    manifest = read_manifest(writer.folder)
    assert (manifest["seed"], manifest["status"]) == (7, "running")
    assert {"python", "torch", "numpy", "machine", "threads"} <= manifest.keys()
    assert list(read_rows(writer.folder)) == []


def test_writer_open_existing_folder_is_refused(writer):
    before = {path.name: path.read_bytes() for path in writer.folder.iterdir()}
    with pytest.raises(FileExistsError):
        writer.open("rounds = 2\n", {"seed": 8})
    assert {path.name: path.read_bytes() for path in writer.folder.iterdir()} == before


def test_writer_rows_are_appended(writer):
    writer.write_rows(ROWS[:1])
    writer.write_rows(ROWS[1:])
    assert list(read_rows(writer.folder)) == ROWS


def test_writer_nonfinite_value_is_null(writer):
    writer.write_rows([Row(1, "server", "large", "", "global", "loss", value) for value in (math.nan, math.inf, 2.0)])
    lines = (writer.folder / "rows.jsonl").read_text().splitlines()
    assert [json.loads(line, parse_constant=lambda word: pytest.fail(word))["value"] for line in lines][2] == 2.0
    values = [row.value for row in read_rows(writer.folder)]
    assert not any(map(math.isfinite, values[:2]))
    assert values[2] == 2.0


@given(
    st.lists(
        st.builds(
            Row, *[st.integers(1, 999), *[st.text(max_size=5)] * 5, st.floats(allow_nan=False, allow_infinity=False)]
        )
    )
)
def test_writer_any_rows_roundtrip(tmp_path_factory, rows):
    writer = RunWriter(tmp_path_factory.mktemp("rows") / "run")
    writer.open("", {})
    writer.write_rows(rows)
    assert list(read_rows(writer.folder)) == rows


def test_writer_events_are_appended(writer):
    writer.write_events([{"round": 1, "code": "SHAPE"}])
    writer.write_events([{"round": 2, "code": "KEYS"}])
    lines = (writer.folder / "events.jsonl").read_text().splitlines()
    assert [json.loads(line)["code"] for line in lines] == ["SHAPE", "KEYS"]


def test_writer_update_replaces_manifest_atomically(writer):
    writer.update(status="finished", sha256="0f")
    manifest = read_manifest(writer.folder)
    assert (manifest["seed"], manifest["status"], manifest["sha256"]) == (7, "finished", "0f")
    assert not list(writer.folder.glob("manifest.json.*"))


def test_writer_update_failure_keeps_old_manifest(writer):
    with pytest.raises(TypeError):
        writer.update(status=object())
    assert read_manifest(writer.folder)["status"] == "running"


def test_record_failure_without_error_changes_nothing(writer):
    with writer.record_failure():
        pass
    assert read_manifest(writer.folder)["status"] == "running"
    assert not (writer.folder / "errors").exists()


def test_record_failure_exception_writes_status_and_traceback(writer):
    with pytest.raises(ZeroDivisionError), writer.record_failure():
        raise ZeroDivisionError("at last")
    assert read_manifest(writer.folder)["status"] == "failed"
    text = (writer.folder / "errors" / "traceback.txt").read_text()
    assert text.startswith("Traceback (most recent call last)")
    assert text.endswith("ZeroDivisionError: at last\n")


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_record_failure_interrupt_writes_status(interrupt, writer):
    with pytest.raises(interrupt), writer.record_failure():
        raise interrupt
    assert read_manifest(writer.folder)["status"] == "interrupted"
    assert not (writer.folder / "errors").exists()


def test_writer_models_roundtrip_deterministically(writer):
    whole = torch.arange(12.0).reshape(3, 4)
    weights = {"slice": whole[:2, :2], "turned": whole.T, "same": whole[:2, :2], "leaf": whole.clone().requires_grad_()}
    about = {"tier": "small", "family": "mlp", "settings": "{}", "more": ""}
    writer.write_model("small", weights, about)
    read = load_file(writer.folder / "models" / "small.safetensors")
    assert read.keys() == weights.keys()
    assert all(torch.equal(read[name], weight) for name, weight in weights.items())
    with safe_open(writer.folder / "models" / "small.safetensors", "pt") as file:
        assert json.loads(file.metadata()["about"]) == about
    first = (writer.folder / "models" / "small.safetensors").read_bytes()
    for _ in range(5):  # the library alone would shuffle the metadata
        writer.write_model("small", dict(reversed(weights.items())), dict(reversed(about.items())))
        assert (writer.folder / "models" / "small.safetensors").read_bytes() == first
