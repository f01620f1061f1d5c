"""--track: every row of a run goes further, be it run, resumed or compared; rows.jsonl stays what it is."""

import pytest

from fedloom.cli.options import TrackerName
from fedloom.runs.folder import read_manifest, read_rows
from fedloom.runs.trackers import TRACKERS

SOON = ("--no-report", "--workers", "1")


class ClientStateFiles:
    """A tracker that keeps all it is told; the third call and those after it fail if it is to fail."""

    def __init__(self, all_of_them, fails):
        self.said, self.fails = [], fails
        all_of_them.append(self)

    def _note(self, *said):
        if self.fails and len(self.said) == 2:
            raise OSError("the disk is full")
        self.said.append(said)

    def begin(self, run):
        self._note("begin", run.name, run.recipe["method"]["name"], list(run.kept), run.resumed)

    def rows(self, rows):
        self._note("rows", list(rows))

    def end(self, status):
        self._note("end", status)

    @property
    def written(self):
        """The rows it has, those from before it came included."""
        kept = [row for said in self.said if said[0] == "begin" for row in said[3]]
        return kept + [row for said in self.said if said[0] == "rows" for row in said[1]]


@pytest.fixture
def diaries(monkeypatch):
    """Those that were begun, for MLflow stands a diary."""
    made, fails = [], []
    monkeypatch.setitem(TRACKERS, "mlflow", lambda: ClientStateFiles(made, bool(fails)))

    class Made:
        @property
        def begun(self):
            return [one for one in made if one.said]

        def fail(self):
            fails.append(True)

    return Made()


def test_track_choices_are_the_registered_trackers():
    assert [one.value for one in TrackerName] == list(TRACKERS)


def test_track_run_sends_every_row_and_the_end(diaries, fedloom, write, tmp_path):
    write()
    assert (
        fedloom("run", "my.toml", "--out", "my-run", "--track", "mlflow", "--track", "mlflow", "--no-report").code == 0
    )
    (one,) = diaries.begun
    assert one.said[0] == ("begin", "my-run", "heterofl", [], False)
    assert one.said[-1] == ("end", "finished")
    assert one.written == list(read_rows(tmp_path / "my-run"))


def test_track_failing_tracker_warns_once_and_changes_nothing(diaries, fedloom, write, tmp_path):
    write()
    diaries.fail()
    said = fedloom("run", "my.toml", "--out", "failed", "--track", "mlflow", "--quiet", *SOON)
    assert (said.code, said.err) == (0, "mlflow follows no further: OSError: the disk is full\n")
    fedloom("run", "my.toml", "--out", "without", "--quiet", *SOON)
    hashes = [read_manifest(tmp_path / name)["sha256"] for name in ("failed", "without")]
    assert hashes[0] == hashes[1]
    assert (tmp_path / "failed" / "rows.jsonl").read_bytes() == (tmp_path / "without" / "rows.jsonl").read_bytes()


def test_track_resumed_run_sends_earlier_rows(diaries, fedloom, write, tmp_path, monkeypatch):
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
    first, second = diaries.begun
    assert first.said[-1] == ("end", "interrupted")
    assert second.said[0][4] is True
    assert {row.round for row in second.said[0][3]} == {1, 2}
    assert second.written == list(read_rows(tmp_path / "run"))


def test_track_comparison_follows_every_run(diaries, fedloom, write, tmp_path):
    write(("rounds = 2", "rounds = 1"))
    said = fedloom("compare", "my.toml", "--controls", "small-for-all", "--out", "both", "--track", "mlflow", *SOON)
    assert said.code == 0
    assert [one.said[0][1] for one in diaries.begun] == ["heterofl", "small-for-all"]
    for one in diaries.begun:
        assert one.written == list(read_rows(tmp_path / "both" / one.said[0][1] / "seed-0"))


@pytest.mark.parametrize("verb", ["run", "compare", "resume"])
def test_track_missing_library_is_refused_before_any_run(verb, fedloom, write, files, monkeypatch):
    def absent():
        raise ImportError("No module named 'tensorboard'")

    monkeypatch.setitem(TRACKERS, "tensorboard", absent)
    write()
    before = files()
    said = fedloom(verb, "my.toml", "--track", "tensorboard")
    assert said.code == 4
    (problem,) = said.problems
    assert (problem.where, problem.code) == ("--track", "TRACKER_MISSING")
    assert problem.hint == "pip install 'fedloom[track]'"
    assert files() == before


def test_track_unknown_tracker_is_refused(fedloom, write):
    write()
    said = fedloom("run", "my.toml", "--track", "paper")
    assert (said.code, "'paper' is not one of" in said.err) == (4, True)
