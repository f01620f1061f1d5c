"""Where a run's rows go besides its own folder, and how a run is kept safe from that.

Rows as metrics of an MLflow run: in the run's folder, or wherever MLFLOW_TRACKING_URI says.

Rows as TensorBoard's event files, in the run's folder.

A run's rows in other people's tools, beside rows.jsonl. Their libraries are imported only when they are chosen.
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
class Beginning:
    """The run that is about to be followed. `kept` are the rows of rounds that are over: none, unless it is resumed."""

    folder: Path
    name: str
    recipe: Mapping[str, Any]
    kept: Sequence[Row] = ()
    resumed: bool = False


class Tracker(Protocol):
    """Is told all that is written to rows.jsonl. Whatever it raises ends its own work, never the run."""

    def begin(self, run: Beginning) -> None: ...

    def rows(self, rows: Sequence[Row]) -> None: ...

    def end(self, status: str) -> None:
        """`status` is the manifest's: finished, failed or interrupted."""


@dataclass
class Trackers:
    """Those that follow one run. One that fails is told of once, and asked nothing more."""

    name: str = ""  # of the run; empty: as its folder
    each: dict[str, Tracker] = field(default_factory=dict)

    @contextmanager
    def told(self, folder: Path, recipe: Mapping[str, Any], resumed: bool) -> Iterator[None]:
        """Of a run from its beginning to its end, whatever that is."""
        kept = list(read_rows(folder)) if self.each else []
        beginning = Beginning(folder, self.name or folder.resolve().name, recipe, kept, resumed)
        self._all(lambda one: one.begin(beginning))
        status = "interrupted"
        try:
            yield
            status = "finished"
        except Exception:
            status = "failed"
            raise
        finally:
            self._all(lambda one: one.end(status))

    def rows(self, rows: Sequence[Row]) -> None:
        self._all(lambda one: one.rows(rows))

    def _all(self, tell: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self.each.items()):
            try:
                tell(tracker)
            except Exception as error:  # of a library that is none of ours
                del self.each[name]
                logger.warning("%s follows no further: %s: %s", name, type(error).__name__, error)


NONE = Trackers()


def title(row: Row) -> str:
    """One name for each curve: what was judged, from the general to the particular."""
    device = f"device {row.device}" if row.device else ""
    return "/".join(filter(None, (row.candidate, row.tier, device, row.test, row.metric)))


def finite(rows: Sequence[Row]) -> list[Row]:
    """A loss that is no number is a gap in a curve; rows.jsonl has it as null."""
    return [row for row in rows if math.isfinite(row.value)]


FOLDER, NOTE = "mlflow", "mlflow.json"
WRITTEN = "fedloom.round"  # the tag that says up to which round all is there
STATUS = {"finished": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}
AT_ONCE, LONGEST = 100, 500  # parameters and metrics in a message, letters of a parameter: what every server takes
UNLESS_SAID = {
    "MLFLOW_DISABLE_TELEMETRY": "true",  # it would tell its makers of every run
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",  # a server that does not answer must not hold a run up for minutes
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}


class MLflow:
    def __init__(self) -> None:
        for name, value in UNLESS_SAID.items():
            os.environ.setdefault(name, value)  # before the import, which reads them
        self._library, self._entities = import_module("mlflow"), import_module("mlflow.entities")
        self._client: Any = None
        self._run = ""
        self._written = 0

    def begin(self, run: Beginning) -> None:
        """A run that is resumed goes on where it is known; rounds that are there already, which would come out the
        same, are not written again."""
        self._client = self._library.MlflowClient(tracking_uri=_place(run.folder))
        known = self._known(run.folder / NOTE) if run.resumed else None
        self._run, self._written = known or self._new(run)
        write_atomic(run.folder / NOTE, (json.dumps({"run": self._run}) + "\n").encode())
        self.rows(run.kept)

    def rows(self, rows: Sequence[Row]) -> None:
        new = [row for row in rows if row.round > self._written]
        now = int(time.time() * 1000)
        for some in _pieces(finite(new)):
            metrics = [self._entities.Metric(_plain(title(row)), row.value, now, row.round) for row in some]
            self._client.log_batch(self._run, metrics=metrics)
        if new:
            self._written = max(row.round for row in new)
            self._client.set_tag(self._run, WRITTEN, str(self._written))

    def end(self, status: str) -> None:
        self._client.set_terminated(self._run, STATUS[status])

    def _known(self, note: Path) -> tuple[str, int] | None:
        """None: it was not followed so far, or elsewhere."""
        if not note.is_file():
            return None
        name = json.loads(note.read_text(encoding="utf-8"))["run"]
        try:
            found = self._client.get_run(name)
        except self._library.MlflowException:
            return None
        self._client.update_run(name, "RUNNING")
        return name, int(found.data.tags.get(WRITTEN, 0))

    def _new(self, run: Beginning) -> tuple[str, int]:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "fedloom")
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self._client.create_experiment(name)
        made: str = self._client.create_run(experiment, run_name=run.name).info.run_id
        said = [self._entities.Param(_plain(key), value[:LONGEST]) for key, value in _settings(run.recipe)]
        for some in _pieces(said):
            self._client.log_batch(made, params=some)
        return made, 0


def _place(folder: Path) -> str | None:
    """None: as the environment says."""
    if os.environ.get("MLFLOW_TRACKING_URI"):
        return None
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # newer releases want to be asked for plain files
    return (folder.resolve() / FOLDER).as_uri()


def _settings(recipe: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    """Every key of the recipe with its value, tables within tables joined by dots."""
    for key, value in recipe.items():
        if isinstance(value, Mapping):
            yield from _settings(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value if isinstance(value, str) else json.dumps(value)


def _pieces(many: Sequence[Any]) -> Iterator[Sequence[Any]]:
    return (many[start : start + AT_ONCE] for start in range(0, len(many), AT_ONCE))


def _plain(name: str) -> str:
    """Only with the letters that it allows in names."""
    return re.sub(r"[^\w\-. /]", "_", name)


TENSORBOARD_FOLDER = "tensorboard"


class TensorBoard:
    def __init__(self) -> None:
        self._writer_into = import_module("torch.utils.tensorboard").SummaryWriter
        self._writer: Any = None

    def begin(self, run: Beginning) -> None:
        """Of a run that is resumed all is written anew: no round is there twice, and none is missing that was not
        followed the first time."""
        place = run.folder / TENSORBOARD_FOLDER
        for old in place.glob("events.out.tfevents.*"):
            old.unlink()
        self._writer = self._writer_into(str(place), purge_step=1 if run.resumed else None)
        self._writer.add_text("recipe", _as_code(run.folder / "recipe.toml"))
        self.rows(run.kept)

    def rows(self, rows: Sequence[Row]) -> None:
        for row in finite(rows):
            self._writer.add_scalar(title(row), row.value, row.round)
        self._writer.flush()

    def end(self, status: str) -> None:
        self._writer.close()


def _as_code(path: Path) -> str:
    return "".join(f"    {line}\n" for line in path.read_text(encoding="utf-8").splitlines())


TRACKERS: Mapping[str, Callable[[], Tracker]] = {"tensorboard": TensorBoard, "mlflow": MLflow}


class TrackerMissing(Exception):  # noqa: N818 - named for what is wrong
    """A tracker whose library is not there."""

    def __init__(self, name: str, error: ImportError):
        super().__init__(f"{name} is not installed: {error}")
        self.hint = "pip install 'fedloom[track]'"


def build_trackers(names: Sequence[str], run: str = "") -> Trackers:
    """The trackers of these names, for one run."""
    return Trackers(run, {name: _opened(name) for name in names})


def _opened(name: str) -> Tracker:
    try:
        return TRACKERS[name]()
    except ImportError as error:
        raise TrackerMissing(name, error) from None
