"""Rows as metrics of an MLflow run: in the run's folder, or wherever MLFLOW_TRACKING_URI says."""

import json
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from ...durable import write_whole
from ...evaluation import Row
from .tracker import Beginning, finite, title

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
        write_whole(run.folder / NOTE, (json.dumps({"run": self._run}) + "\n").encode())
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
