"""How a command ends: its exit code, what it writes to which stream, and what an interrupted run leaves behind."""

import contextlib
import gc
import json

import pytest

from fedloom.methods.heterofl import HeteroFL
from fedloom.runs.folder import RunWriter, read_manifest, read_rows

RAISES_IN_ROUND_2 = """
from dataclasses import dataclass

from fedloom.fleet import tier_slices
from fedloom.methods import Method


@dataclass(frozen=True)
class Mine(Method):
    def start(self, fleet, seed, warm_start=None):
        return {"weights": fleet.global_model.initial_weights(seed)}

    def round(self, server, context):
        if context.number == 2:
            raise ZeroDivisionError("my own mistake")
        return server

    def eval_targets(self, server):
        return {"server": tier_slices(server["weights"])}


METHODS = {"mine": Mine}
"""


@pytest.fixture
def raise_in_round_2(monkeypatch):
    """Replace HeteroFL's round by one that works once and then raises."""
    whole = HeteroFL.round

    def patch(error):
        def round(self, server, context):
            if context.number == 2:
                raise error
            return whole(self, server, context)

        monkeypatch.setattr(HeteroFL, "round", round)

    return patch


def test_run_text_data_on_stdout_progress_on_stderr(fedloom, write):
    write()
    result = fedloom("run", "my.toml", "--out", "run")
    assert result.code == 0
    assert [line.split("  ")[:2] for line in result.err.splitlines()] == [
        ["heterofl", "round 1/2"],
        ["heterofl", "round 2/2"],
    ]
    assert "round 1/2" not in result.out
    assert result.out.startswith("model ")
    assert result.out.endswith("\nrun: run\n")


def test_run_progress_line_has_accuracy_replies_bytes_and_time(fedloom, write):
    write()
    line = fedloom("run", "my.toml", "--set", "rounds=1").err
    assert "large " in line
    assert "small " in line
    assert " %  " in line
    assert "4/4 replies" in line
    assert "1.79 kB down 1.8 kB up" in line
    assert line.endswith(" s\n")


@pytest.mark.parametrize("format", ["text", "json"])
def test_run_quiet_has_no_progress(format, fedloom, write):
    write()
    result = fedloom("run", "my.toml", "--quiet", "--format", format)
    assert (result.code, result.err) == (0, "")
    assert result.out


def test_run_json_is_one_object_besides_progress(fedloom, write):
    write()
    result = fedloom("run", "my.toml", "--format", "json")
    assert result.code == 0
    assert result.data["final"]
    assert len(result.err.splitlines()) == 2


@pytest.mark.parametrize("format", ["text", "json"])
def test_run_interrupted_is_exit_130(format, fedloom, write, raise_in_round_2, tmp_path):
    write()
    raise_in_round_2(KeyboardInterrupt())
    result = fedloom("run", "my.toml", "--out", "run", "--format", format)
    assert result.code == 130
    assert "Traceback" not in result.err
    if format == "json":
        assert result.failure["error_code"] == "INTERRUPTED"
    else:
        saved, error = result.err.splitlines()[1:]
        assert (result.out, error) == ("", "error INTERRUPTED: interrupted")
        assert saved.startswith("all finished rounds are saved in run; fedloom resume run goes on")
    assert read_manifest(tmp_path / "run")["status"] == "interrupted"
    assert {row.round for row in read_rows(tmp_path / "run")} == {1}
    assert not (tmp_path / "run" / "errors").exists()


def test_run_interrupted_between_rounds_is_recorded(fedloom, write, monkeypatch, tmp_path):
    write()

    def interrupt(name, result):
        raise KeyboardInterrupt

    monkeypatch.setattr("fedloom.api.progress.format_round", interrupt)
    result = fedloom("run", "my.toml", "--out", "run")
    gc.collect()
    assert result.code == 130
    assert read_manifest(tmp_path / "run")["status"] == "interrupted"


def test_run_interrupted_during_imports_is_exit_130(fedloom, write, files, monkeypatch):
    write()
    before = files()

    @contextlib.contextmanager
    def exits(format, quiet):
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr("fedloom.cli.options.exits", exits)
    result = fedloom("run", "my.toml")
    assert result.code == 130
    assert "Traceback" not in result.err
    assert files() == before


@pytest.mark.parametrize("format", ["text", "json"])
def test_run_exception_in_user_code_is_exit_1(format, fedloom, write, tmp_path):
    write(('name = "heterofl"', 'name = "mine"'))
    (tmp_path / "my.py").write_text(RAISES_IN_ROUND_2)
    result = fedloom("run", "my.toml", "--with", "my.py", "--out", "run", "--format", format)
    assert result.code == 1
    assert f'{tmp_path / "my.py"}", line 15, in round' in result.err
    if format == "json":
        assert result.failure["error_code"] == "USER_CODE"
        assert result.failure["message"] == "ZeroDivisionError: my own mistake"
        assert "your own file" in result.failure["hint"]
    else:
        assert result.out == ""
        assert "error USER_CODE: ZeroDivisionError: my own mistake\n" in result.err
    run = tmp_path / "run"
    assert read_manifest(run)["status"] == "failed"
    assert "ZeroDivisionError: my own mistake" in (run / "errors" / "traceback.txt").read_text()
    assert {row.round for row in read_rows(run)} == {1}
    assert not (run / "models").exists()


@pytest.mark.parametrize("format", ["text", "json"])
def test_run_exception_in_fedloom_is_exit_5(format, fedloom, write, raise_in_round_2, tmp_path):
    write()
    raise_in_round_2(RuntimeError("this should never be"))
    result = fedloom("run", "my.toml", "--out", "run", "--format", format)
    assert result.code == 5
    assert "Traceback (most recent call last)" in result.err
    if format == "json":
        assert result.failure["error_code"] == "BUG"
        assert result.failure["message"] == "RuntimeError: this should never be"
        assert result.failure["hint"] == "please report this"
    else:
        assert result.out == ""
        assert result.err.endswith("error BUG: RuntimeError: this should never be\n  hint: please report this\n")
    assert read_manifest(tmp_path / "run")["status"] == "failed"
    assert "this should never be" in (tmp_path / "run" / "errors" / "traceback.txt").read_text()


@pytest.mark.parametrize("format", ["text", "json"])
def test_run_full_disk_is_exit_1(format, fedloom, write, monkeypatch, tmp_path):
    write()

    def full(self, rows):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RunWriter, "write_rows", full)
    result = fedloom("run", "my.toml", "--out", "run", "--format", format)
    assert result.code == 1
    assert "Traceback" not in result.err
    if format == "json":
        assert result.failure["error_code"] == "SYSTEM"
        assert "No space left on device" in result.failure["message"]
    else:
        assert "error SYSTEM: [Errno 28] No space left on device\n" in result.err
    assert read_manifest(tmp_path / "run")["status"] == "failed"


def test_run_diverging_training_is_no_bug(fedloom, write, tmp_path):
    """Weights so large that a batch's statistics overflow: a run may fail or finish, but there is no bug to report."""
    write(("batch_size = 100", "optimizer = { kind = 'sgd', lr = 1e20 }"))
    result = fedloom("run", "my.toml", "--out", "run", "--format", "json")
    assert "Traceback" not in result.err
    assert result.code in (0, 1)
    assert result.json["status"] == ("ok" if result.code == 0 else "error")
    assert read_manifest(tmp_path / "run")["status"] == ("finished" if result.code == 0 else "failed")


def test_run_round_without_large_device_continues(fedloom, write, tmp_path):
    write(
        ("share = 0.5\nwidth = 1.0", "share = 0.001\nwidth = 1.0"),
        ("share = 0.5\nwidth = 0.5", "share = 0.999\nwidth = 0.5"),
        ("[method]", "[fleet]\nassignment = 'redrawn'\n[evaluation]\nstatistics.query = 'per_device'\n[method]"),
    )
    result = fedloom("run", "my.toml", "--out", "run", "--format", "json")
    assert (result.code, "Traceback" in result.err) == (0, False)
    assert read_manifest(tmp_path / "run")["status"] == "finished"


def test_run_devices_without_test_examples_json_is_valid(fedloom, write, tmp_path):
    """360 test images for 400 devices leave some without a local accuracy; JSON has no NaN."""
    write(("devices = 4", "devices = 400"), ("rounds = 2", "rounds = 1"))
    result = fedloom("run", "my.toml", "--out", "run", "--format", "json")
    assert result.code == 0
    assert {one["tier"] for one in result.data["final"]} == {"large", "small"}
    for line in (tmp_path / "run" / "rows.jsonl").read_text().splitlines():
        assert json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
