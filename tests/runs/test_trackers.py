"""Trackers get every row once, and their failures never stop a run."""

import csv
import json
import math
import os
import signal
import socket
import struct
import subprocess
import sys
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.evaluation import Row
from fedloom.recipe.errors import RecipeError
from fedloom.registry import Choice, Entry
from fedloom.runs.folder import RunWriter
from fedloom.runs.trackers import FunctionTracker, Trackers, as_tracker, build_trackers
from fedloom.settings import FrozenDict
from fedloom.tracking import CSV, TRACKERS, TrackedRun, Tracker, WeightsAndBiases

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
    writer.reopen({"rows.jsonl": kept}, (writer.folder / "recipe.toml").read_text())


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


@pytest.mark.parametrize(
    ("name", "package"), [("tensorboard", "fedloom[track]"), ("wandb", "fedloom[wandb]"), ("mine", "this")]
)
def test_build_trackers_missing_library_is_named_with_install_hint(name, package, monkeypatch):
    def absent():
        raise ImportError("no module named 'this'", name="this")

    monkeypatch.setattr("fedloom.runs.trackers.TRACKERS", {**TRACKERS, name: absent})
    with pytest.raises(RecipeError, match=f"{name} is not installed") as refused:
        build_trackers([name])
    (issue,) = refused.value.issues
    assert (issue.code, issue.hint) == ("TRACKER_MISSING", f"pip install '{package}'")


@pytest.mark.parametrize(("name", "hint"), [("paper", "known: csv, mlflow, tensorboard, wandb"), ("CVS", "known")])
def test_build_trackers_unknown_name_is_refused_with_known_ones(name, hint):
    with pytest.raises(RecipeError, match=f"there is no tracker '{name}'") as refused:
        build_trackers(["csv", name])
    (issue,) = refused.value.issues
    assert issue.code == "TRACKER_NAME"
    assert issue.hint.startswith(hint)


@pytest.mark.parametrize("wrong", [3, None, lambda: 3])
def test_build_trackers_entry_that_is_no_tracker_is_refused(wrong):
    with pytest.raises(RecipeError, match="is not a tracker") as refused:
        build_trackers([Entry("trackers", "mine", wrong) if callable(wrong) else wrong])
    assert refused.value.issues[0].code == "TRACKER_FORM"


def test_as_tracker_accepts_names_settings_classes_trackers_and_functions():
    one = Recording()
    assert as_tracker(one) is one
    assert isinstance(as_tracker(Recording), Recording)
    assert isinstance(as_tracker(Entry("trackers", "mine", lambda: one)), Recording)
    assert as_tracker("csv") == CSV()
    assert as_tracker(Choice("trackers", "csv", FrozenDict(per_device=False))) == CSV(per_device=False)
    assert as_tracker(print) == FunctionTracker(print)


def test_build_trackers_mixed_choices_all_get_rows(writer):
    one, seen = Recording(), []
    trackers = build_trackers(["csv", "csv", one, Recording, seen.extend, lambda rows: seen.extend(rows)])
    assert list(trackers.each) == ["csv", "Recording", "Recording 2", "extend", "<lambda>"]
    write(writer, trackers, (1, 2))
    assert one.calls[-1] == trackers.each["Recording 2"].calls[-1] == ("end", "finished")
    assert [row.round for row in seen] == [1] * 8 + [2] * 8
    assert (writer.folder / "rows.csv").is_file()


def test_build_trackers_of_several_runs_shares_no_tracker():
    with pytest.raises(RecipeError, match="one Recording cannot follow several runs") as refused:
        build_trackers(["csv", Recording()], several_runs=True)
    assert refused.value.issues[0].code == "TRACKER_SHARED"
    with pytest.raises(RecipeError, match="one print cannot follow several runs"):
        build_trackers([print], several_runs=True)
    choices = ["csv", Recording, Choice("trackers", "csv"), Entry("trackers", "mine", Recording)]
    first, second = (build_trackers(choices, several_runs=True).each for _ in range(2))
    assert first.keys() == second.keys()
    assert all(first[name] is not second[name] for name in first)


def test_tracker_subclass_may_leave_out_methods(writer):
    class Rounds(Tracker):
        def __init__(self):
            self.seen = []

        def rows(self, rows):
            self.seen.append(rows[0].round)

    one = Rounds()
    write(writer, build_trackers([one]), (1, 2))
    assert one.seen == [1, 2]


def test_function_of_resumed_run_gets_only_new_rounds(writer):
    seen = []
    write_and_die(writer, Trackers(), (1, 2))
    write(writer, build_trackers([seen.extend]), (3,), resumed=True)
    assert {row.round for row in seen} == {3}


def read_csv(folder):
    with (folder / "rows.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_csv_has_one_line_per_round_and_one_column_per_curve(writer):
    write(writer, build_trackers(["csv"]), (1, 2))
    first, second = read_csv(writer.folder)
    assert first.keys() == {"round", *TITLES}
    assert (first["round"], first["server/large/global/accuracy"]) == ("1", "10.0")
    assert (second["round"], second["server/large/device 3/local/accuracy"]) == ("2", "22.0")


def test_csv_without_devices_has_no_columns_of_theirs(writer):
    write(writer, build_trackers([CSV(per_device=False)]), (1,))
    assert list(read_csv(writer.folder)[0]) == ["round", "server/large/global/accuracy", "bytes_down"]


def test_csv_added_on_resume_has_earlier_rounds(writer):
    write_and_die(writer, Trackers(), (1, 2))
    write(writer, build_trackers(["csv"]), (3,), resumed=True)
    assert [line["round"] for line in read_csv(writer.folder)] == ["1", "2", "3"]


VALUES = st.floats(allow_nan=True, allow_infinity=True)
ROUNDS = st.lists(st.dictionaries(st.sampled_from(["loss", "a,b", 'say "hi"', "two\nlines"]), VALUES), max_size=6)


@settings(max_examples=60, deadline=None)
@given(ROUNDS, st.data())
def test_csv_of_resumed_run_is_that_of_one_run_and_keeps_every_value(tmp_path_factory, rounds, data):
    """Whatever curves a round has, wherever the run stops and however far the last checkpoint is behind."""
    rows = [
        [Row(number, "", "", "", "", metric, value) for metric, value in values.items()]
        for number, values in enumerate(rounds, 1)
    ]
    stopped = data.draw(st.integers(0, len(rows)))
    kept = data.draw(st.integers(0, stopped))

    def track(folder, earlier, later):
        tracker = CSV()
        tracker.begin(TrackedRun(folder, "my-run", {}, [row for some in earlier for row in some], bool(earlier)))
        for some in later:
            tracker.rows(some)

    once, twice = tmp_path_factory.mktemp("once"), tmp_path_factory.mktemp("twice")
    track(once, [], rows)
    track(twice, [], rows[:stopped])
    track(twice, rows[:kept], rows[kept:])
    assert (once / "rows.csv").read_bytes() == (twice / "rows.csv").read_bytes()
    found = [
        (int(line["round"]), name, float(cell))
        for line in read_csv(once)
        for name, cell in line.items()
        if name != "round" and cell
    ]
    wanted = [(row.round, row.metric, row.value) for some in rows for row in some if math.isfinite(row.value)]
    assert sorted(found) == sorted(wanted)


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
    from fedloom.tracking import MLFLOW_DEFAULTS

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


def test_mlflow_settings_choose_experiment_and_server(writer, mlflow, monkeypatch, tmp_path):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = (tmp_path / "all" / "mlflow").as_uri()
    choice = Choice("trackers", "mlflow", FrozenDict(experiment="mine", tracking_uri=uri))
    write(writer, build_trackers([choice]), (1,))
    from mlflow import MlflowClient

    assert MlflowClient(tracking_uri=uri).get_experiment_by_name("mine") is not None
    assert not (writer.folder / "mlflow").exists()


@pytest.fixture
def wandb(monkeypatch, tmp_path):
    """Reads the files of offline runs; no name of the environment is left behind, and the server is never called."""
    library = pytest.importorskip("wandb", reason="Weights & Biases comes with fedloom[wandb]")
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    from fedloom.tracking import WANDB_DEFAULTS

    for name in (*WANDB_DEFAULTS, "WANDB_SERVICE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for kind in ("CACHE", "CONFIG", "DATA"):
        monkeypatch.setenv(f"WANDB_{kind}_DIR", str(tmp_path / kind))
    library.teardown()  # so that the next run reads the environment
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setenv("WANDB_MODE", "offline")
        yield wandb_files
        library.teardown()
        with pytest.raises(BlockingIOError):
            server.accept()


def wandb_files(folder):
    """The records of each file, oldest first."""
    return [list(wandb_records(file)) for file in sorted((folder / "wandb").glob("offline-run-*/run-*.wandb"))]


def wandb_records(file):
    """A header of 7 bytes, then LevelDB's log: blocks of 32 KiB, records in pieces of checksum, length and kind."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, at, record = file.read_bytes(), 7, b""
    while at + 7 <= len(content):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        record += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            parsed = Record()
            parsed.ParseFromString(record)
            yield parsed
            record = b""


def wandb_parts(records, kind):
    return [getattr(record, kind) for record in records if record.WhichOneof("record_type") == kind]


def wandb_history(records):
    """step -> curve -> value; a step that is logged twice fails."""
    steps = {}
    for part in wandb_parts(records, "history"):
        items = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in part.item}
        step = items["_step"]
        assert step not in steps
        steps[step] = {name: value for name, value in items.items() if not name.startswith("_")}
    return steps


def wandb_summary(records):
    updates = [item for part in wandb_parts(records, "summary") for item in part.update]
    return {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in updates}


def test_wandb_has_every_finite_row_and_the_recipe(writer, wandb, capfd):
    write(writer, build_trackers(["wandb"], "heterofl seed 1"), (1, 2))
    (records,) = wandb(writer.folder)
    (run,) = wandb_parts(records, "run")
    assert (run.project, run.display_name) == ("fedloom", "heterofl seed 1")
    config = {item.key: json.loads(item.value_json) for item in run.config.update if not item.key.startswith("_")}
    assert config == RECIPE
    history = wandb_history(records)
    assert {step: values.keys() for step, values in history.items()} == {1: TITLES, 2: TITLES}
    assert history[2]["server/large/global/accuracy"] == 20.0
    assert wandb_summary(records)["status"] == "finished"
    assert [part.exit_code for part in wandb_parts(records, "exit")] == [0]
    assert capfd.readouterr() == ("", "")


def test_wandb_of_resumed_run_has_each_round_once(writer, wandb):
    write_and_die(writer, build_trackers(["wandb"]), (1, 2, 3))
    back_to(writer, 2)
    write(writer, build_trackers(["wandb"]), (3, 4), resumed=True)
    first, second = sorted(wandb(writer.folder), key=lambda records: min(wandb_history(records)))
    assert (list(wandb_history(first)), list(wandb_history(second))) == ([1, 2, 3], [4])
    assert len({run.run_id for records in (first, second) for run in wandb_parts(records, "run")}) == 1
    assert [wandb_summary(records)["status"] for records in (first, second)] == ["interrupted", "finished"]
    assert [part.exit_code for part in wandb_parts(first, "exit")] == [255]


@pytest.mark.parametrize("uploaded", [False, True])
def test_wandb_files_left_open_are_written_again_unless_uploaded(uploaded, writer, wandb):
    write_and_die(writer, build_trackers(["wandb"]), (1, 2))
    (files,) = (writer.folder / "wandb").glob("offline-run-*")
    note = writer.folder / "wandb.json"
    assert json.loads(note.read_text()) == {"run": files.name.split("-")[-1], "round": 2, "open": ""}
    note.write_text(json.dumps({"run": files.name.split("-")[-1], "round": 0, "open": files.name}))
    if uploaded:
        (files / f"run-{files.name.split('-')[-1]}.wandb.synced").touch()
    write(writer, build_trackers(["wandb"]), (3,), resumed=True)
    segments = sorted(list(wandb_history(records)) for records in wandb(writer.folder))
    assert segments == ([[1, 2], [1, 2, 3]] if uploaded else [[1, 2, 3]])


def test_wandb_note_cannot_remove_files_elsewhere(writer, wandb, tmp_path):
    other = tmp_path / "offline-run-other"
    other.mkdir()
    (writer.folder / "wandb").mkdir()
    (writer.folder / "wandb" / "offline-run-x").mkdir()
    note = {"run": "abc", "round": 0, "open": "offline-run-x/../../../offline-run-other"}
    (writer.folder / "wandb.json").write_text(json.dumps(note))
    write(writer, build_trackers(["wandb"]), (1,), resumed=True)
    assert other.is_dir()
    assert [list(wandb_history(records)) for records in wandb(writer.folder)] == [[1]]


def test_wandb_disabled_is_followed_by_complete_offline_run(writer, wandb):
    disabled = Choice("trackers", "wandb", FrozenDict(mode="disabled"))
    write_and_die(writer, build_trackers([disabled]), (1, 2))
    write(writer, build_trackers(["wandb"]), (3,), resumed=True)
    assert [list(wandb_history(records)) for records in wandb(writer.folder)] == [[1, 2, 3]]


KILLED = """
import os, signal, sys
from pathlib import Path

from fedloom.evaluation import Row
from fedloom.runs.folder import RunWriter
from fedloom.runs.trackers import build_trackers

writer, trackers = RunWriter(Path(sys.argv[1])), build_trackers(["wandb"])
with trackers.follow(writer.folder, {}, True):
    rows = [Row(3, "", "", "", "", "bytes_down", 100.0)]
    writer.write_rows(rows)
    trackers.rows(rows)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_wandb_of_killed_run_has_each_round_once(writer, wandb):
    """W&B loses what a killed process has logged last."""
    write_and_die(writer, build_trackers(["wandb"]), (1, 2))
    alone = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}  # not this process's service
    child = subprocess.run([sys.executable, "-c", KILLED, writer.folder], env=alone, timeout=60, check=False)
    assert child.returncode == -signal.SIGKILL
    write(writer, build_trackers(["wandb"]), (4, 5), resumed=True)
    assert sorted(list(wandb_history(records)) for records in wandb(writer.folder)) == [[1, 2], [3, 4, 5]]


def test_wandb_follows_several_runs_side_by_side(wandb, tmp_path):
    writers = [RunWriter(tmp_path / name) for name in ("one", "two")]
    for made in writers:
        made.open("seed = 0\n", {"seed": 0})
    one, two = (build_trackers(["wandb"], made.folder.name, several_runs=True) for made in writers)
    with one.follow(writers[0].folder, RECIPE, False), two.follow(writers[1].folder, RECIPE, False):
        one.rows(rows_of(1))
        two.rows(rows_of(2))
        one.rows(rows_of(3))
    assert [list(wandb_history(wandb(made.folder)[0])) for made in writers] == [[1, 3], [2]]


class FakeWandB:
    """A server that knows two rounds of a run, or nothing; keeps what is logged."""

    def __init__(self, known):
        self.known, self.steps, self.ids = known, [], []

    def init(self, **settings):
        self.ids.append(settings["id"])
        return SimpleNamespace(
            id="abc", url="https://server/abc", dir="wandb/run-abc/files", offline=False, disabled=False,
            resumed=self.known, step=3, summary={},
            log=lambda values, step, commit: self.steps.append(step), finish=lambda exit_code: None,
        )  # fmt: skip


@pytest.mark.parametrize(("known", "steps"), [(True, [3, 4]), (False, [1, 2, 3, 4])])
def test_wandb_resumed_on_server_logs_what_the_server_lacks(known, steps, writer, wandb):
    def tracker(fake):
        made = WeightsAndBiases()
        made._library = fake
        return made

    first, second = FakeWandB(False), FakeWandB(known)
    write_and_die(writer, build_trackers([tracker(first)]), (1, 2, 3))
    write(writer, build_trackers([tracker(second)]), (4,), resumed=True)
    assert (first.steps, first.ids) == ([1, 2, 3], [None])
    assert (second.steps, second.ids) == (steps, ["abc"])


def test_wandb_folder_of_that_name_is_not_the_library(tmp_path, monkeypatch):
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    for name in [name for name in sys.modules if name.split(".")[0] == "wandb"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(RecipeError, match="wandb is not installed"):
        build_trackers(["wandb"])
    del sys.modules["wandb"]
