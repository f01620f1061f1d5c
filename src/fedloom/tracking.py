"""Experiment trackers: a run's rows as CSV, in TensorBoard, MLflow and Weights & Biases, in addition to rows.jsonl.

Their libraries are imported only when chosen.
"""

import csv
import json
import logging
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from .evaluation import Row
from .files import write_atomic
from .registry import Registry

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrackedRun:
    """The run that a tracker follows.

    Parameters
    ----------
    folder : Path
        The run's folder. A tracker may write files of its own there.
    name : str
        The name of the run: that of its folder, or in a comparison that of the arm and the seed.
    recipe : Mapping[str, Any]
        The recipe with all defaults filled in, as nested tables.
    kept : Sequence[Row]
        The rows of the rounds before, if the run is resumed. They are not passed to `Tracker.rows` again.
    resumed : bool
        Whether the run continues after an interruption.
    test : str
        The test that the method is for: "local" for personal models, else "global". Its rows come first.
    """

    folder: Path
    name: str
    recipe: Mapping[str, Any]
    kept: Sequence[Row] = ()
    resumed: bool = False
    test: str = "global"


@runtime_checkable
class Tracker(Protocol):
    """Receives everything that is written to rows.jsonl.

    Any object with these three methods is a tracker; a subclass may leave out those that it does not need. An exception
    in one of them is logged and ends the tracker, not the run.

    Examples
    --------
    >>> class Best(Tracker):
    ...     value = 0.0
    ...
    ...     def rows(self, rows):
    ...         self.value = max([self.value, *(row.value for row in rows if row.metric == "accuracy")])
    """

    def begin(self, run: TrackedRun) -> None:
        """Called once, before the first round.

        Parameters
        ----------
        run : TrackedRun
            The run, with the rows of earlier rounds if it is resumed.
        """
        return

    def rows(self, rows: Sequence[Row]) -> None:
        """Called after each round.

        Parameters
        ----------
        rows : Sequence[Row]
            All rows of the round; values may be NaN or infinite.
        """
        return

    def end(self, status: str) -> None:
        """Called once, after the last round.

        Parameters
        ----------
        status : str
            That of the manifest: finished, failed or interrupted.
        """
        return


def _curve_name(row: Row) -> str:
    """One name per curve, from the general to the particular."""
    device = f"device {row.device}" if row.device else ""
    return "/".join(filter(None, (row.candidate, row.tier, device, row.test, row.metric)))


def _finite(rows: Sequence[Row]) -> list[Row]:
    """A value that is not finite is a gap in a curve; rows.jsonl has it as null."""
    return [row for row in rows if math.isfinite(row.value)]


def _by_round(rows: Sequence[Row]) -> dict[int, dict[str, float]]:
    """round -> curve -> value, without values that are not finite."""
    rounds: dict[int, dict[str, float]] = {}
    for row in _finite(rows):
        rounds.setdefault(row.round, {})[_curve_name(row)] = row.value
    return rounds


@dataclass
class CSV:
    """A table in the run's folder: one line per round and one column per curve, as spreadsheets expect it.

    Parameters
    ----------
    file : str
        The name of the file. Cells of values that are not finite, or not measured in that round, are empty.
    per_device : bool
        Whether curves of single devices get columns too. Large fleets exceed what spreadsheets can show.
    """

    file: str = "rows.csv"
    per_device: bool = True
    _path: Path = field(init=False, repr=False, compare=False)
    _columns: list[str] = field(init=False, repr=False, compare=False)

    def begin(self, run: TrackedRun) -> None:
        """Of a resumed run everything is written again: no round twice, and none missing that was untracked before."""
        self._path, self._columns = run.folder / self.file, ["round"]
        self._write_all([])
        self.rows(run.kept)

    def rows(self, rows: Sequence[Row]) -> None:
        rounds = _by_round([row for row in rows if self.per_device or not row.device])
        lines: list[dict[str, Any]] = [{"round": number, **values} for number, values in rounds.items()]
        new = [name for name in dict.fromkeys(name for line in lines for name in line) if name not in self._columns]
        if new:  # the header changes, so that all lines are written again
            with self._path.open(encoding="utf-8", newline="") as file:
                lines = [*csv.DictReader(file), *lines]
            self._columns += new
            self._write_all(lines)
        else:
            with self._path.open("a", encoding="utf-8", newline="") as file:
                csv.DictWriter(file, self._columns).writerows(lines)

    def end(self, status: str) -> None:
        pass  # nothing is left open

    def _write_all(self, lines: Sequence[Mapping[str, Any]]) -> None:
        temporary = self._path.with_name(self._path.name + ".new")
        with temporary.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, self._columns)
            writer.writeheader()
            writer.writerows(lines)
        temporary.replace(self._path)


class TensorBoard:
    """Event files in the folder `tensorboard` of the run."""

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
    """Metrics of an MLflow run, with the recipe's keys as its parameters.

    Parameters
    ----------
    experiment : str | None
        Default: MLFLOW_EXPERIMENT_NAME, then `fedloom`.
    tracking_uri : str | None
        Default: MLFLOW_TRACKING_URI, then the folder `mlflow` of the run.
    """

    def __init__(self, experiment: str | None = None, tracking_uri: str | None = None) -> None:
        for name, value in MLFLOW_DEFAULTS.items():
            os.environ.setdefault(name, value)  # before the import, which reads them
        self._library, self._entities = import_module("mlflow"), import_module("mlflow.entities")
        self._experiment, self._uri = experiment, tracking_uri
        self._client: Any = None
        self._run = ""
        self._logged = 0

    def begin(self, run: TrackedRun) -> None:
        """A resumed run continues its MLflow run; rounds that are logged there already are not logged again, since they
        would come out the same."""
        self._client = self._library.MlflowClient(tracking_uri=self._uri or _mlflow_uri(run.folder))
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
        name = self._experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME", "fedloom")
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


WANDB_NOTE = "wandb.json"  # in the run's folder: the id of the W&B run, and what it has
WANDB_EXIT_CODES = {"finished": 0, "failed": 1, "interrupted": 255}  # 255: W&B's own for Ctrl-C
WANDB_DEFAULTS = {
    "WANDB_ERROR_REPORTING": "false",  # it would report errors to its makers
    "WANDB_CONSOLE": "off",  # stdout and stderr stay as they are
    "WANDB_SILENT": "true",
    "WANDB_LOGIN_TIMEOUT": "60",  # seconds; nothing may delay a run for long
    "WANDB_INIT_TIMEOUT": "20",
    "WANDB_FINISH_TIMEOUT": "60",
}


class WeightsAndBiases:
    """The history of a Weights & Biases run, with the recipe as its config and rounds as its steps.

    Files are written to the folder `wandb` of the run. With `mode="offline"` nothing is sent; `wandb sync` uploads the
    files later.

    Parameters
    ----------
    project : str | None
        Default: WANDB_PROJECT, then `fedloom`.
    entity : str | None
        The user or team. Default: WANDB_ENTITY, then that of the login.
    mode : {"online", "offline", "disabled"} | None
        Default: WANDB_MODE, then online.
    """

    def __init__(
        self,
        project: str | None = None,
        entity: str | None = None,
        mode: Literal["online", "offline", "disabled"] | None = None,
    ) -> None:
        for name, value in WANDB_DEFAULTS.items():
            os.environ.setdefault(name, value)  # before the import, which reads them
        self._library = import_module("wandb")
        import_module("wandb.sdk")  # fails if `wandb` was merely a folder of its files in the working directory
        self._project, self._entity, self._mode = project, entity, mode
        self._run: Any = None
        self._note = Path()
        self._logged = 0

    def begin(self, run: TrackedRun) -> None:
        """A resumed run continues its W&B run; rounds that are logged there already are not logged again, since they
        would come out the same."""
        self._note = run.folder / WANDB_NOTE
        known = json.loads(self._note.read_text(encoding="utf-8")) if run.resumed and self._note.is_file() else {}
        _remove_torn_files(run.folder / "wandb", known.get("open", ""))
        self._run = self._library.init(
            project=self._project or os.environ.get("WANDB_PROJECT", "fedloom"),
            entity=self._entity,
            mode=self._mode or os.environ.get("WANDB_MODE"),
            dir=str(run.folder),
            name=run.name,
            config=dict(run.recipe),
            id=known.get("run"),
            resume="allow",
            allow_val_change=True,
            reinit="create_new",  # the runs of a comparison are open side by side
        )
        if self._run.offline:
            self._logged = known.get("round", 0)
        else:  # a server that does not know the run has none of its rounds, whatever was logged offline
            self._logged = self._run.step - 1 if self._run.resumed else 0
            logger.info("wandb: %s", self._run.url)
        self._write_note(open_files=Path(self._run.dir).parent.name)
        self.rows(run.kept)

    def rows(self, rows: Sequence[Row]) -> None:
        new = [row for row in rows if row.round > self._logged]
        for number, values in sorted(_by_round(new).items()):
            self._run.log(values, step=number, commit=True)
        if new:
            self._logged = max(row.round for row in new)

    def end(self, status: str) -> None:
        self._run.summary["status"] = status
        self._run.finish(exit_code=WANDB_EXIT_CODES[status])
        self._write_note(open_files="")

    def _write_note(self, open_files: str) -> None:
        if self._run.disabled:
            return  # nothing is logged anywhere
        note = {"run": self._run.id, "round": self._logged, "open": open_files}
        write_atomic(self._note, (json.dumps(note) + "\n").encode())


def _remove_torn_files(home: Path, name: str) -> None:
    """Remove the offline files of a run that was killed: W&B keeps rounds in memory for seconds, so that some are lost.
    They are logged again. Files that have been uploaded meanwhile stay."""
    files = home / Path(name).name  # never outside of it, whatever the note says
    if files.name.startswith("offline-run-") and not any(files.glob("*.synced")):
        shutil.rmtree(files, ignore_errors=True)


TRACKERS: Registry[Callable[..., Tracker]] = Registry(
    "trackers", {"csv": CSV, "tensorboard": TensorBoard, "mlflow": MLflow, "wandb": WeightsAndBiases}
)

EXTRAS = {"tensorboard": "fedloom[track]", "mlflow": "fedloom[track]", "wandb": "fedloom[wandb]"}
"""What to install for a tracker."""
