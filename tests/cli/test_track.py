"""--track: rows of runs, resumed runs and comparisons also go to a tracker; rows.jsonl does not change."""

import pytest

from fedloom.cli.options import TrackerName
from fedloom.runs.folder import read_manifest, read_rows
from fedloom.runs.trackers import TRACKERS

SOON = ("--no-report", "--workers", "1")


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
    monkeypatch.setitem(TRACKERS, "mlflow", lambda: RecordingTracker(made, bool(fails)))

    class Made:
        @property
        def begun(self):
            return [one for one in made if one.calls]

        def fail(self):
            fails.append(True)

    return Made()


def test_track_choices_are_the_registered_trackers():
    assert [one.value for one in TrackerName] == list(TRACKERS)


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

    monkeypatch.setitem(TRACKERS, "tensorboard", absent)
    write()
    before = files()
    result = fedloom(verb, "my.toml", "--track", "tensorboard")
    assert result.code == 4
    (issue,) = result.issues
    assert (issue.where, issue.code) == ("--track", "TRACKER_MISSING")
    assert issue.hint == "pip install 'fedloom[track]'"
    assert files() == before


def test_track_unknown_tracker_is_refused(fedloom, write):
    write()
    result = fedloom("run", "my.toml", "--track", "paper")
    assert (result.code, "'paper' is not one of" in result.err) == (4, True)
