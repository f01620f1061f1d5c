"""Trackers get every row once, and their failures never stop a run."""

import json
import math
import os
import socket

import pytest

from fedloom.evaluation import Row
from fedloom.runs.folder import RunWriter
from fedloom.runs.trackers import TRACKERS, TrackerMissing, Trackers, build_trackers

RECIPE = {"seed": 0, "method": {"name": "heterofl", "only_seen_rows": True}, "tiers": [{"name": "large"}]}


def rows_of(number):
    return [
        Row(number, "server", "large", "", "global", "accuracy", 10.0 * number),
        Row(number, "server", "large", "3", "local", "accuracy", 11.0 * number),
        Row(number, "server", "large", "", "global", "loss", math.nan),
        Row(number, "", "", "", "", "bytes_down", 100.0),
    ]


TITLES = {"server/large/global/accuracy", "server/large/device 3/local/accuracy", "bytes_down"}


@pytest.fixture
def writer(tmp_path):
    made = RunWriter(tmp_path / "my-run")
    made.open('seed = 0\n[method]\nname = "heterofl"\n', {"seed": 0})
    return made


def write(writer, trackers, numbers, resumed=False):
    """Rounds as a run writes them: into its folder first, then to the trackers."""
    with trackers.follow(writer.folder, RECIPE, resumed):
        for number in numbers:
            writer.write_rows(rows_of(number))
            trackers.rows(rows_of(number))


def write_and_die(writer, trackers, numbers):
    with pytest.raises(KeyboardInterrupt), trackers.follow(writer.folder, RECIPE, False):
        for number in numbers:
            writer.write_rows(rows_of(number))
            trackers.rows(rows_of(number))
        raise KeyboardInterrupt


def back_to(writer, number):
    """Cut the folder back to a checkpoint of this round."""
    text = (writer.folder / "rows.jsonl").read_text().splitlines(keepends=True)
    kept = sum(len(line) for line in text if json.loads(line)["round"] <= number)
    writer.reopen({"rows.jsonl": kept})


class Recording:
    """Records its calls, and fails from the call number `fails_at` on."""

    def __init__(self, fails_at=math.inf):
        self.calls, self.fails_at = [], fails_at

    def _call(self, *call):
        self.calls.append(call)
        if len(self.calls) >= self.fails_at:
            raise ConnectionError("no connection")

    def begin(self, run):
        self._call("begin", run.name, len(run.kept), run.resumed)

    def rows(self, rows):
        self._call("rows", rows[0].round)

    def end(self, status):
        self._call("end", status)


def test_trackers_get_all_rows_in_order(writer):
    one = Recording()
    write(writer, Trackers("", {"one": one}), (1, 2))
    assert one.calls == [("begin", "my-run", 0, False), ("rows", 1), ("rows", 2), ("end", "finished")]


def test_trackers_get_status_of_ended_run(writer):
    ends = []
    for error in (KeyboardInterrupt, ValueError):
        one = Recording()
        with pytest.raises(error), Trackers("", {"one": one}).follow(writer.folder, RECIPE, False):
            raise error
        ends.append(one.calls[-1])
    assert ends == [("end", "interrupted"), ("end", "failed")]


@pytest.mark.parametrize("fails_at", [1, 2, 4])
def test_trackers_failing_one_is_reported_once_and_dropped(fails_at, writer, caplog):
    bad, good = Recording(fails_at), Recording()
    write(writer, Trackers("", {"bad": bad, "good": good}), (1, 2))
    assert caplog.messages == ["bad is dropped for the rest of the run: ConnectionError: no connection"]
    assert len(bad.calls) == fails_at
    assert good.calls[-1] == ("end", "finished")


def test_trackers_missing_library_is_named_with_install_hint(monkeypatch):
    def absent():
        raise ImportError("no module named 'this'")

    monkeypatch.setitem(TRACKERS, "tensorboard", absent)
    with pytest.raises(TrackerMissing, match="tensorboard is not installed") as refused:
        build_trackers(["tensorboard"])
    assert refused.value.hint == "pip install 'fedloom[track]'"


@pytest.fixture
def curves():
    """What TensorBoard reads in a folder: title -> its steps and values, as they lie in the files."""
    pytest.importorskip("tensorboard", reason="TensorBoard comes with fedloom[track]")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def read(folder):
        found = EventAccumulator(str(folder / "tensorboard"), purge_orphaned_data=False).Reload()
        return {
            name: [(one.step, pytest.approx(one.value)) for one in found.Scalars(name)]
            for name in found.Tags()["scalars"]
        }

    return read


def test_tensorboard_has_every_finite_row(writer, curves):
    write(writer, build_trackers(["tensorboard"]), (1, 2))
    found = curves(writer.folder)
    assert found.keys() == TITLES
    assert found["server/large/global/accuracy"] == [(1, 10.0), (2, 20.0)]


def test_tensorboard_of_resumed_run_has_each_round_once(writer, curves):
    write_and_die(writer, build_trackers(["tensorboard"]), (1, 2, 3))
    back_to(writer, 2)
    write(writer, build_trackers(["tensorboard"]), (3, 4), resumed=True)
    assert curves(writer.folder)["bytes_down"] == [(number, 100.0) for number in (1, 2, 3, 4)]


def test_tensorboard_added_on_resume_has_earlier_rounds(writer, curves):
    write_and_die(writer, Trackers(), (1, 2))
    write(writer, build_trackers(["tensorboard"]), (3,), resumed=True)
    assert [step for step, _ in curves(writer.folder)["bytes_down"]] == [1, 2, 3]


@pytest.fixture
def mlflow(monkeypatch):
    """Its runs, read from a run's folder; no name of the environment is left behind, and there is no network."""
    pytest.importorskip("mlflow", reason="MLflow comes with fedloom[track]")
    from fedloom.runs.trackers import MLFLOW_DEFAULTS

    for name in (*MLFLOW_DEFAULTS, "MLFLOW_ALLOW_FILE_STORE", "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(socket.socket, "connect", lambda *call: pytest.fail("it called somebody"))

    def read(folder):
        from mlflow import MlflowClient

        client = MlflowClient(tracking_uri=(folder / "mlflow").as_uri())
        (experiment,) = [one for one in client.search_experiments() if one.name == "fedloom"]
        return client, client.search_runs([experiment.experiment_id])

    return read


def steps(client, run, name):
    return [one.step for one in client.get_metric_history(run.info.run_id, name)]


def test_mlflow_has_every_finite_row_and_the_recipe(writer, mlflow):
    write(writer, build_trackers(["mlflow"], "heterofl seed 1"), (1, 2))
    client, (run,) = mlflow(writer.folder)
    assert (run.info.run_name, run.info.status) == ("heterofl seed 1", "FINISHED")
    assert run.data.metrics.keys() == TITLES
    assert run.data.metrics["server/large/global/accuracy"] == 20.0
    assert run.data.params == {
        "seed": "0", "method.name": "heterofl", "method.only_seen_rows": "true", "tiers": '[{"name": "large"}]',
    }  # fmt: skip
    assert steps(client, run, "bytes_down") == [1, 2]


def test_mlflow_telemetry_is_off_unless_enabled(mlflow, monkeypatch):
    build_trackers(["mlflow"])
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "false")
    build_trackers(["mlflow"])
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "false"


def test_mlflow_of_resumed_run_has_each_round_once(writer, mlflow):
    write_and_die(writer, build_trackers(["mlflow"]), (1, 2, 3))
    assert mlflow(writer.folder)[1][0].info.status == "KILLED"
    back_to(writer, 2)
    write(writer, build_trackers(["mlflow"]), (3, 4), resumed=True)
    client, (run,) = mlflow(writer.folder)
    assert (steps(client, run, "bytes_down"), run.info.status) == ([1, 2, 3, 4], "FINISHED")


def test_mlflow_added_on_resume_has_earlier_rounds(writer, mlflow):
    write_and_die(writer, Trackers(), (1, 2))
    write(writer, build_trackers(["mlflow"]), (3,), resumed=True)
    client, (run,) = mlflow(writer.folder)
    assert steps(client, run, "bytes_down") == [1, 2, 3]


def test_mlflow_uses_tracking_uri_of_environment(writer, mlflow, monkeypatch, tmp_path):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "all" / "mlflow").as_uri())
    write(writer, build_trackers(["mlflow"]), (1,))
    assert not (writer.folder / "mlflow").exists()
    assert len(mlflow(tmp_path / "all")[1]) == 1


def test_mlflow_invalid_metric_names_are_replaced(writer, mlflow):
    trackers = build_trackers(["mlflow"])
    with trackers.follow(writer.folder, RECIPE, False):
        trackers.rows([Row(1, "server", "a+b", "", "global", "accuracy", 1.0)])
    assert list(mlflow(writer.folder)[1][0].data.metrics) == ["server/a_b/global/accuracy"]
