"""Experiment trackers: a run's rows in TensorBoard and MLflow, in addition to rows.jsonl.

Their libraries are imported only when chosen, and a tracker that fails never stops the run.
"""

import json
import logging
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from ..evaluation import Row
from ..files import write_atomic
from .folder import read_rows

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrackedRun:
    """The run that a tracker follows. `kept` are the rows of earlier rounds if the run is resumed."""

    folder: Path
    name: str
    recipe: Mapping[str, Any]
    kept: Sequence[Row] = ()
    resumed: bool = False


class Tracker(Protocol):
    """Gets everything that is written to rows.jsonl. An exception ends the tracker, not the run."""

    def begin(self, run: TrackedRun) -> None: ...

    def rows(self, rows: Sequence[Row]) -> None: ...

    def end(self, status: str) -> None:
        """`status` is the manifest's: finished, failed or interrupted."""


@dataclass
class Trackers:
    """The trackers of one run. One that fails is reported once and then dropped."""

    name: str = ""  # of the run; empty: the name of its folder
    each: dict[str, Tracker] = field(default_factory=dict)

    @contextmanager
    def follow(self, folder: Path, recipe: Mapping[str, Any], resumed: bool) -> Iterator[None]:
        """Begin with the run, and end with its status however it ends."""
        kept = list(read_rows(folder)) if self.each else []
        run = TrackedRun(folder, self.name or folder.resolve().name, recipe, kept, resumed)
        self._call_each(lambda tracker: tracker.begin(run))
        status = "interrupted"
        try:
            yield
            status = "finished"
        except Exception:
            status = "failed"
            raise
        finally:
            self._call_each(lambda tracker: tracker.end(status))

    def rows(self, rows: Sequence[Row]) -> None:
        self._call_each(lambda tracker: tracker.rows(rows))

    def _call_each(self, call: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self.each.items()):
            try:
                call(tracker)
            except Exception as error:  # any error of a third-party library
                del self.each[name]
                logger.warning("%s is dropped for the rest of the run: %s: %s", name, type(error).__name__, error)


NONE = Trackers()


class TrackerMissing(Exception):  # noqa: N818 - named for what is wrong
    """The library of a tracker is not installed."""

    def __init__(self, name: str, error: ImportError):
        super().__init__(f"{name} is not installed: {error}")
        self.hint = "pip install 'fedloom[track]'"


def build_trackers(names: Sequence[str], run: str = "") -> Trackers:
    """The trackers of these names, for one run."""
    return Trackers(run, {name: _build_tracker(name) for name in names})


def _build_tracker(name: str) -> Tracker:
    try:
        return TRACKERS[name]()
    except ImportError as error:
        raise TrackerMissing(name, error) from None


def _curve_name(row: Row) -> str:
    """One name per curve, from the general to the particular."""
    device = f"device {row.device}" if row.device else ""
    return "/".join(filter(None, (row.candidate, row.tier, device, row.test, row.metric)))


def _finite(rows: Sequence[Row]) -> list[Row]:
    """A value that is not finite is a gap in a curve; rows.jsonl has it as null."""
    return [row for row in rows if math.isfinite(row.value)]


class TensorBoard:
    """Event files in the run's folder."""

    def __init__(self) -> None:
        self._open_writer = import_module("torch.utils.tensorboard").SummaryWriter
        self._writer: Any = None

    def begin(self, run: TrackedRun) -> None:
        """Of a resumed run everything is written again: no round twice, and none missing that was untracked before."""
        folder = run.folder / "tensorboard"
        for old in folder.glob("events.out.tfevents.*"):
            old.unlink()
        self._writer = self._open_writer(str(folder), purge_step=1 if run.resumed else None)
        lines = (run.folder / "recipe.toml").read_text(encoding="utf-8").splitlines()
        self._writer.add_text("recipe", "".join(f"    {line}\n" for line in lines))  # indented: code in Markdown
        self.rows(run.kept)

    def rows(self, rows: Sequence[Row]) -> None:
        for row in _finite(rows):
            self._writer.add_scalar(_curve_name(row), row.value, row.round)
        self._writer.flush()

    def end(self, status: str) -> None:
        self._writer.close()


MLFLOW_NOTE = "mlflow.json"  # in the run's folder: the id of the MLflow run
MLFLOW_ROUND = "fedloom.round"  # the tag with the last round that is logged completely
MLFLOW_STATUS = {"finished": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}
MLFLOW_BATCH, MLFLOW_VALUE_LENGTH = 100, 500  # limits that every server accepts
MLFLOW_DEFAULTS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",  # it would report every run to its makers
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",  # a server that does not answer must not delay a run by minutes
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}


class MLflow:
    """Metrics of an MLflow run: in the run's folder, or where MLFLOW_TRACKING_URI points."""

    def __init__(self) -> None:
        for name, value in MLFLOW_DEFAULTS.items():
            os.environ.setdefault(name, value)  # before the import, which reads them
        self._library, self._entities = import_module("mlflow"), import_module("mlflow.entities")
        self._client: Any = None
        self._run = ""
        self._logged = 0

    def begin(self, run: TrackedRun) -> None:
        """A resumed run continues its MLflow run; rounds that are logged there already are not logged again, since they
        would come out the same."""
        self._client = self._library.MlflowClient(tracking_uri=_mlflow_uri(run.folder))
        known = self._find(run.folder / MLFLOW_NOTE) if run.resumed else None
        self._run, self._logged = known or (self._create(run), 0)
        write_atomic(run.folder / MLFLOW_NOTE, (json.dumps({"run": self._run}) + "\n").encode())
        self.rows(run.kept)

    def rows(self, rows: Sequence[Row]) -> None:
        new = [row for row in rows if row.round > self._logged]
        now = int(time.time() * 1000)
        for batch in _batches(_finite(new)):
            metrics = [self._entities.Metric(_mlflow_name(_curve_name(r)), r.value, now, r.round) for r in batch]
            self._client.log_batch(self._run, metrics=metrics)
        if new:
            self._logged = max(row.round for row in new)
            self._client.set_tag(self._run, MLFLOW_ROUND, str(self._logged))

    def end(self, status: str) -> None:
        self._client.set_terminated(self._run, MLFLOW_STATUS[status])

    def _find(self, note: Path) -> tuple[str, int] | None:
        """(id, last logged round) of the MLflow run; None if there was none so far, or on another server."""
        if not note.is_file():
            return None
        run_id = json.loads(note.read_text(encoding="utf-8"))["run"]
        try:
            run = self._client.get_run(run_id)
        except self._library.MlflowException:
            return None
        self._client.update_run(run_id, "RUNNING")
        return run_id, int(run.data.tags.get(MLFLOW_ROUND, 0))

    def _create(self, run: TrackedRun) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "fedloom")
        known = self._client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else self._client.create_experiment(name)
        run_id: str = self._client.create_run(experiment, run_name=run.name).info.run_id
        settings = _flatten(run.recipe)
        params = [self._entities.Param(_mlflow_name(key), value[:MLFLOW_VALUE_LENGTH]) for key, value in settings]
        for batch in _batches(params):
            self._client.log_batch(run_id, params=batch)
        return run_id


def _mlflow_uri(folder: Path) -> str | None:
    """None: as the environment says."""
    if os.environ.get("MLFLOW_TRACKING_URI"):
        return None
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # newer releases require this for plain files
    return (folder.resolve() / "mlflow").as_uri()


def _flatten(recipe: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Every key of the recipe with its value, nested tables joined by dots."""
    for key, value in recipe.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value)


def _batches(items: Sequence[Any]) -> Iterator[Sequence[Any]]:
    return (items[start : start + MLFLOW_BATCH] for start in range(0, len(items), MLFLOW_BATCH))


def _mlflow_name(name: str) -> str:
    """With only the characters that MLflow allows in names."""
    return re.sub(r"[^\w\-. /]", "_", name)


TRACKERS: Mapping[str, Callable[[], Tracker]] = {"tensorboard": TensorBoard, "mlflow": MLflow}
