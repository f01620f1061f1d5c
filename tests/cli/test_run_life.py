"""A run's life: ended early, prolonged, replaced, listed; and what the obvious mistakes say."""

import json

import pytest

from fedloom.runs.folder import read_manifest, read_rows


@pytest.fixture
def interrupted(fedloom, write, monkeypatch, tmp_path):
    """A run of four rounds that Ctrl-C ends after the second."""
    write(("rounds = 2", "rounds = 4"))
    seen = []

    def interrupt(name, result):
        seen.append(result.number)
        if result.number == 2:
            raise KeyboardInterrupt
        return ""

    with monkeypatch.context() as patched:
        patched.setattr("fedloom.api.progress.format_round", interrupt)
        result = fedloom("run", "my.toml", "--out", "run")
    assert (result.code, seen) == (130, [1, 2])
    return result


def rows(folder):
    return [repr(row) for row in read_rows(folder)]


def shas(folder):
    manifest = read_manifest(folder)
    return manifest["sha256"], manifest["devices_sha256"]


def test_interrupt_says_what_is_saved_and_how_to_go_on(interrupted):
    assert "all finished rounds are saved in run" in interrupted.err
    assert "fedloom resume run goes on, fedloom finish run ends it there" in interrupted.err


STOPPED = """
from fedloom.methods import METHODS as KNOWN


class Stopped(KNOWN["heterofl"]):
    def round(self, server, context):
        raise KeyboardInterrupt


METHODS = {"stopped": Stopped}
"""


def test_interrupt_before_the_first_round_ends_says_so_and_names_own_files(fedloom, write, tmp_path):
    write()
    (tmp_path / "own.py").write_text(STOPPED)
    result = fedloom("run", "my.toml", "--with", "own.py", "--set", "method.name=stopped", "--out", "run")
    assert result.code == 130
    command = f"fedloom resume run --with {tmp_path.resolve() / 'own.py'}"
    assert f"no round was finished; {command} starts again\n" in result.err and "finish run" not in result.err
    again = fedloom(*command.split()[1:])
    assert again.code == 130 and "continues after round 0" in again.err


def test_interrupt_of_comparison_says_what_is_saved_and_how_to_go_on(fedloom, write, monkeypatch, tmp_path):
    write()
    shown = []

    def interrupt(name, result):
        shown.append((name, result.number))
        if len(shown) == 3:
            raise KeyboardInterrupt
        return ""

    with monkeypatch.context() as patched:
        patched.setattr("fedloom.api.progress.format_round", interrupt)
        result = fedloom("compare", "my.toml", "--controls", "standalone", "--out", "both")
    assert result.code == 130
    assert "all finished rounds are saved in both; fedloom resume both goes on\n" in result.err
    assert read_manifest(tmp_path / "both")["status"] == "interrupted"
    assert fedloom("resume", "both").code == 0
    assert read_manifest(tmp_path / "both")["status"] == "finished"


def test_finish_equals_a_run_of_that_many_rounds(interrupted, fedloom, tmp_path):
    result = fedloom("finish", "run", "--format", "json")
    assert (result.code, result.data["run"]) == (0, "run")
    assert fedloom("run", "my.toml", "--set", "rounds=2", "--out", "short").code == 0
    assert shas(tmp_path / "run") == shas(tmp_path / "short")
    assert rows(tmp_path / "run") == rows(tmp_path / "short")
    assert fedloom("export", "run", "--to", "safetensors").code == 0
    assert fedloom("verify", "run").code == 0
    assert fedloom("finish", "run").code == 4
    assert fedloom("run", "my.toml", "--set", "start.from=run", "--set", "rounds=1", "--out", "next").code == 0


def test_unfinished_run_given_to_start_from_names_the_way_out(interrupted, fedloom, files):
    before = files()
    result = fedloom("run", "my.toml", "--set", "start.from=run", "--out", "next")
    (issue,) = result.issues
    assert (result.code, issue.what, issue.code) == (4, "start.from", "FILE_MISSING")
    assert "fedloom finish run" in issue.hint
    assert files() == before


def test_resume_with_rounds_prolongs_a_finished_run(fedloom, write, tmp_path):
    write()
    assert fedloom("run", "my.toml", "--out", "run").code == 0
    assert fedloom("resume", "run", "--rounds", "2").code == 4
    assert fedloom("resume", "run", "--rounds", "4").code == 0
    assert fedloom("run", "my.toml", "--set", "rounds=4", "--out", "long").code == 0
    assert shas(tmp_path / "run") == shas(tmp_path / "long")
    assert rows(tmp_path / "run") == rows(tmp_path / "long")


@pytest.mark.parametrize("command", ["run my.toml", "compare my.toml --controls standalone --no-report"])
def test_resume_with_nothing_left_is_refused(command, fedloom, write, tmp_path):
    write(("rounds = 2", "rounds = 1"))
    assert fedloom(*command.split(), "--out", "runs/one").code == 0
    result = fedloom("resume")
    assert (result.code, result.out) == (4, "")
    assert "every run here has finished" in result.err and "--rounds" in result.err


def test_force_replaces_a_run_and_nothing_else(fedloom, write, tmp_path):
    write()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").write_text("keep")
    assert fedloom("run", "my.toml", "--out", "mine", "--force").code == 4
    assert (tmp_path / "mine/notes.txt").read_text() == "keep"
    assert fedloom("run", "my.toml", "--out", "run").code == 0
    refused = fedloom("run", "my.toml", "--out", "run")
    assert refused.code == 4 and "--force" in refused.err
    assert fedloom("run", "my.toml", "--out", "run", "--force", "--seed", "7").code == 0
    assert read_manifest(tmp_path / "run")["seed"] == 7


@pytest.mark.parametrize("arguments", [("export", "runs", "--to", "pt2"), ("verify", "runs"), ("subnet", "runs")])
def test_comparison_instead_of_a_run_names_the_runs_inside(arguments, fedloom, tmp_path):
    folder = tmp_path / "runs/heterofl/seed-0"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")
    (tmp_path / "runs/manifest.json").write_text(json.dumps({"kind": "comparison", "arms": {}, "status": "finished"}))
    result = fedloom(*arguments)
    assert result.code == 4 and "runs/heterofl/seed-0" in result.err


def test_unfinished_run_given_to_export_names_both_ways_out(interrupted, fedloom):
    result = fedloom("export", "run", "--to", "pt2")
    assert result.code == 4
    assert "fedloom resume run" in result.err and "fedloom finish run" in result.err


def test_list_runs_shows_the_latest_first(fedloom, write):
    write()
    assert fedloom("list", "runs").out == "there is no run in runs\n"
    for name in ("a", "b"):
        fedloom("run", "my.toml", "--out", f"runs/{name}")
    names = [one["name"] for one in fedloom("list", "runs", "--format", "json").data]
    assert sorted(names) == ["runs/a", "runs/b"]
    assert "run, finished" in fedloom("list", "runs").out


FAILING = """
def broken():
    def loss(logits, labels):
        raise ValueError("not today")
    return loss

LOSSES = {"broken": broken}
"""


def test_run_that_failed_in_its_first_round_does_not_block_its_folder(fedloom, write, tmp_path):
    write()
    (tmp_path / "broken.py").write_text(FAILING)
    failing = ("run", "my.toml", "--with", "broken.py", "--set", "training.loss={kind='broken'}", "--out", "run")
    assert fedloom(*failing, "--quiet").code == 1
    assert json.loads((tmp_path / "run" / "manifest.json").read_text())["status"] == "failed"
    done = fedloom("run", "my.toml", "--out", "run", "--no-report")
    assert done.code == 0 and "run holds a run that ended before its first round was finished" in done.err
    assert fedloom("run", "my.toml", "--out", "run").code == 4  # a run with rounds stays


def test_verify_interrupted_run_says_how_to_end_it(fedloom, write, tmp_path):
    write()
    assert fedloom("run", "my.toml", "--out", "run", "--quiet", "--no-report").code == 0
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    (tmp_path / "run" / "manifest.json").write_text(json.dumps({**manifest, "status": "interrupted"}))
    (issue,) = fedloom("verify", "run").issues
    assert issue.message == "this run is not finished, it is interrupted"
    assert "fedloom finish run" in issue.hint
