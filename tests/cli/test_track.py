"""--track: rows of runs, resumed runs and comparisons also go to a tracker; rows.jsonl does not change."""

import json

import pytest

from fedloom.runs.folder import read_manifest, read_rows
from fedloom.tracking import TRACKERS, WANDB_DEFAULTS

SOON = ("--no-report", "--workers", "1")
ARMS = ("heterofl", "small-for-all")


class RecordingTracker:
    """A tracker that keeps its calls; with `fails`, the third and later calls raise."""

    def __init__(self, created, fails):
        self.calls, self.fails = [], fails
        created.append(self)

    def _record(self, *call):
        if self.fails and len(self.calls) == 2:
            raise OSError("the disk is full")
        self.calls.append(call)

    def begin(self, run):
        self._record("begin", run.name, run.recipe["method"]["name"], list(run.kept), run.resumed)

    def rows(self, rows):
        self._record("rows", list(rows))

    def end(self, status):
        self._record("end", status)

    @property
    def written(self):
        """All rows it received, those of earlier rounds included."""
        kept = [row for call in self.calls if call[0] == "begin" for row in call[3]]
        return kept + [row for call in self.calls if call[0] == "rows" for row in call[1]]


@pytest.fixture
def recordings(monkeypatch):
    """Replace MLflow by trackers that record their calls."""
    made, fails = [], []
    record = lambda: RecordingTracker(made, bool(fails))  # noqa: E731
    monkeypatch.setitem(TRACKERS._entries, "mlflow", record)

    class Made:
        @property
        def begun(self):
            return [one for one in made if one.calls]

        def fail(self):
            fails.append(True)

    return Made()


def test_track_help_names_the_built_in_trackers(fedloom):
    text = " ".join(fedloom("run", "--help").out.split())
    assert all(name in text for name in TRACKERS)


def test_track_run_sends_every_row_and_the_end(recordings, fedloom, write, tmp_path):
    write()
    assert (
        fedloom("run", "my.toml", "--out", "my-run", "--track", "mlflow", "--track", "mlflow", "--no-report").code == 0
    )
    (one,) = recordings.begun
    assert one.calls[0] == ("begin", "my-run", "heterofl", [], False)
    assert one.calls[-1] == ("end", "finished")
    assert one.written == list(read_rows(tmp_path / "my-run"))


def test_track_failing_tracker_warns_once_and_changes_nothing(recordings, fedloom, write, tmp_path):
    write()
    recordings.fail()
    result = fedloom("run", "my.toml", "--out", "failed", "--track", "mlflow", "--quiet", *SOON)
    assert (result.code, result.err) == (0, "mlflow is dropped for the rest of the run: OSError: the disk is full\n")
    fedloom("run", "my.toml", "--out", "without", "--quiet", *SOON)
    hashes = [read_manifest(tmp_path / name)["sha256"] for name in ("failed", "without")]
    assert hashes[0] == hashes[1]
    assert (tmp_path / "failed" / "rows.jsonl").read_bytes() == (tmp_path / "without" / "rows.jsonl").read_bytes()


def test_track_resumed_run_sends_earlier_rows(recordings, fedloom, write, tmp_path, monkeypatch):
    from fedloom.methods import METHODS

    whole = METHODS["heterofl"].round

    def round_with_an_end(self, server, context):
        if context.number == 3:
            raise KeyboardInterrupt
        return whole(self, server, context)

    write(("rounds = 2", "rounds = 4\n[checkpoints]\nevery = 1\n"))
    with monkeypatch.context() as patch:
        patch.setattr(METHODS["heterofl"], "round", round_with_an_end)
        assert fedloom("run", "my.toml", "--out", "run", "--track", "mlflow", *SOON).code == 130
    assert fedloom("resume", "run", "--track", "mlflow", *SOON).code == 0
    first, second = recordings.begun
    assert first.calls[-1] == ("end", "interrupted")
    assert second.calls[0][4] is True
    assert {row.round for row in second.calls[0][3]} == {1, 2}
    assert second.written == list(read_rows(tmp_path / "run"))


def test_track_comparison_follows_every_run(recordings, fedloom, write, tmp_path):
    write(("rounds = 2", "rounds = 1"))
    result = fedloom("compare", "my.toml", "--controls", "small-for-all", "--out", "both", "--track", "mlflow", *SOON)
    assert result.code == 0
    assert [one.calls[0][1] for one in recordings.begun] == ["heterofl", "small-for-all"]
    for one in recordings.begun:
        assert one.written == list(read_rows(tmp_path / "both" / one.calls[0][1] / "seed-0"))


@pytest.mark.parametrize("verb", ["run", "compare", "resume"])
def test_track_missing_library_is_refused_before_any_run(verb, fedloom, write, files, monkeypatch):
    def absent():
        raise ImportError("No module named 'tensorboard'")

    monkeypatch.setitem(TRACKERS._entries, "tensorboard", absent)
    write()
    before = files()
    result = fedloom(verb, "my.toml", "--track", "tensorboard")
    assert result.code == 4
    (issue,) = result.issues
    assert (issue.where, issue.code) == ("--track", "TRACKER_MISSING")
    assert issue.hint == "pip install 'fedloom[track]'"
    assert files() == before


def test_track_unknown_tracker_is_refused_with_the_known_ones(fedloom, write, files):
    write()
    before = files()
    result = fedloom("run", "my.toml", "--track", "paper")
    assert result.code == 4
    (issue,) = result.issues
    assert (issue.where, issue.code) == ("--track", "TRACKER_NAME")
    assert (issue.message, issue.hint) == ("there is no tracker 'paper'", "known: csv, mlflow, tensorboard, wandb")
    assert files() == before


MINE = """
import json

from fedloom.tracking import Tracker


class Lines(Tracker):
    def begin(self, run):
        self.file = run.folder / "mine.jsonl"

    def rows(self, rows):
        with self.file.open("a") as file:
            file.writelines(json.dumps([row.round, row.metric]) + "\\n" for row in rows)


def lines():
    return Lines()


TRACKERS = {"lines": lines}
"""


@pytest.mark.parametrize("verb", ["run", "compare"])
def test_track_name_of_own_file_gets_every_row(verb, fedloom, write, tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    write()
    more = ("--controls", "small-for-all") if verb == "compare" else ()
    result = fedloom(verb, "my.toml", *more, "--out", "out", "--with", "mine.py", "--track", "lines", *SOON)
    assert result.code == 0
    folders = [tmp_path / "out"] if verb == "run" else [tmp_path / "out" / arm / "seed-0" for arm in ARMS]
    for folder in folders:
        written = [json.loads(line) for line in (folder / "mine.jsonl").read_text().splitlines()]
        assert written == [[row.round, row.metric] for row in read_rows(folder)]


def test_track_misspelled_name_of_own_file_is_suggested(fedloom, write, tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    write()
    result = fedloom("run", "my.toml", "--with", "mine.py", "--track", "linse")
    assert (result.code, [issue.hint for issue in result.issues]) == (4, ["did you mean 'lines'?"])


def test_track_csv_and_wandb_write_to_the_run_folder(fedloom, write, tmp_path, monkeypatch):
    library = pytest.importorskip("wandb", reason="Weights & Biases comes with fedloom[wandb]")
    for name, value in WANDB_DEFAULTS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("WANDB_MODE", "offline")
    for kind in ("CACHE", "CONFIG", "DATA"):
        monkeypatch.setenv(f"WANDB_{kind}_DIR", str(tmp_path / kind))
    write()
    result = fedloom("run", "my.toml", "--out", "run", "--track", "csv", "--track", "wandb", "--quiet", *SOON)
    library.teardown()
    assert (result.code, result.err) == (0, "")
    lines = (tmp_path / "run" / "rows.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in lines] == ["round", "1", "2"]
    assert json.loads((tmp_path / "run" / "wandb.json").read_text())["round"] == 2
    assert len(list((tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb"))) == 1
