"""A run's folder: plain files, written while the run goes, read back and summarized."""

import json
import math
import os
import platform
import statistics
import tempfile
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from .. import __version__
from ..evaluation import Row
from ..evaluation.metrics import NOTHING_DECLARED, MetricInfo, metric_info
from ..files import read_json_lines, sync_files, write_atomic
from ..methods import headline_test
from ..tensors import to_safetensors

MANIFEST, FLEET_FILE = "manifest.json", "fleet.json"
LINES = ("rows.jsonl", "events.jsonl", "participation.jsonl", "timings.jsonl")


@dataclass(frozen=True)
class RunWriter:
    """Writes the files of one run. Lines are appended, everything else is replaced atomically."""

    folder: Path

    def open(self, recipe: str, manifest: Mapping[str, Any]) -> None:
        """Create the folder with its first files in one step; an existing folder is an error."""
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        if self.folder.exists():
            raise FileExistsError(f"{self.folder} exists already")
        new = RunWriter(Path(tempfile.mkdtemp(prefix=".new-", dir=self.folder.parent)))
        new.folder.chmod(0o755)
        (new.folder / "recipe.toml").write_text(recipe, encoding="utf-8")
        new.write_manifest({**manifest, **collect_versions(), "status": "running"})
        for name in LINES:
            (new.folder / name).touch()
        new.folder.rename(self.folder)

    def reopen(self, sizes: Mapping[str, int], recipe: str) -> None:
        """Resume after a crash: cut every file of lines to its size at the checkpoint.

        The recipe is written again, since a run may go on for more rounds, or be ended after fewer.
        """
        if (self.folder / "recipe.toml").read_text(encoding="utf-8") != recipe:
            write_atomic(self.folder / "recipe.toml", recipe.encode())
        for name in LINES:
            (self.folder / name).touch()  # runs of older releases lack some
            with (self.folder / name).open("r+b") as file:
                file.truncate(min(sizes.get(name, 0), file.seek(0, os.SEEK_END)))
        self.update(status="running")

    def sync(self) -> None:
        """Force all lines to disk."""
        sync_files(self.folder / name for name in LINES)

    def sizes(self) -> dict[str, int]:
        """Bytes of every file of lines."""
        return {name: (self.folder / name).stat().st_size for name in LINES}

    @contextmanager
    def record_failure(self) -> Iterator[None]:
        """Set the manifest's status, and write the traceback, if an exception ends the run."""
        try:
            yield
        except BaseException as error:
            if isinstance(error, Exception):
                (self.folder / "errors").mkdir(exist_ok=True)
                (self.folder / "errors" / "traceback.txt").write_text(traceback.format_exc(), encoding="utf-8")
            self.update(status="failed" if isinstance(error, Exception) else "interrupted")
            raise

    def write_manifest(self, content: Mapping[str, Any]) -> None:
        write_atomic(self.folder / MANIFEST, (json.dumps(content, indent=2) + "\n").encode())

    def update(self, **content: Any) -> None:
        self.write_manifest({**read_manifest(self.folder), **content})

    def write_rows(self, rows: Iterable[Row]) -> None:
        self._append("rows.jsonl", (asdict(row) for row in rows))

    def replace_rows(self, number: int, rows: Iterable[Row]) -> None:
        """Replace the rows of the last round, which has this number."""
        lines = (self.folder / "rows.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
        kept = "".join(line for line in lines if json.loads(line)["round"] != number)
        write_atomic(self.folder / "rows.jsonl", kept.encode())
        self.write_rows(rows)

    def write_events(self, events: Iterable[Mapping[str, Any]]) -> None:
        self._append("events.jsonl", events)

    def write_participation(self, lines: Iterable[Mapping[str, Any]]) -> None:
        self._append("participation.jsonl", lines)

    def write_timings(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Measurements that differ from machine to machine and from day to day."""
        self._append("timings.jsonl", lines)

    def write_document(self, name: str, content: Any) -> None:
        write_atomic(self.folder / name, (json.dumps(content, allow_nan=False) + "\n").encode())

    def write_model(self, name: str, weights: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
        (self.folder / "models").mkdir(exist_ok=True)
        self.write_tensors(f"models/{name}.safetensors", weights, about)

    def write_tensors(self, file: str, weights: Mapping[str, Tensor], about: Mapping[str, Any] | None = None) -> None:
        write_atomic(self.folder / file, to_safetensors(weights, about))

    def _append(self, name: str, lines: Iterable[Mapping[str, Any]]) -> None:
        with (self.folder / name).open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(_without_nonfinite(line), allow_nan=False) + "\n" for line in lines)


def read_manifest(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    return content


def read_metrics(manifest: Mapping[str, Any]) -> dict[str, MetricInfo]:
    """Direction and unit of a run's metrics, by name; empty for runs of older releases, whose metrics are built in."""
    return {name: MetricInfo(**info) for name, info in manifest.get("metrics", {}).items()}


def read_rows(folder: Path, strict: bool = True) -> Iterator[Row]:
    """The rows of a run; with `strict=False`, a last line that is still being written is skipped."""
    for row in read_json_lines(folder / "rows.jsonl", strict):
        yield Row(**{**row, "value": math.nan if row["value"] is None else row["value"]})


def read_headline_test(folder: Path, rows: Iterable[Row]) -> str:
    """The test that a run's method is for, among those of its rows; "global" for runs of older releases."""
    path = folder / FLEET_FILE
    method = json.loads(path.read_text(encoding="utf-8"))["method"] if path.is_file() else {}
    return headline_test(method.get("produces", "global"), evaluated_tests(rows))


def evaluated_tests(rows: Iterable[Row]) -> set[str]:
    """The tests that rows of whole tiers are about; holdout devices are no test of their own."""
    return {row.test for row in rows if row.candidate and not row.device} & {"global", "local"}


def _without_nonfinite(line: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has no NaN or infinity: null stands for both."""
    return {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in line.items()}


def peak_memory() -> int | None:
    """Peak resident memory of this process in bytes; None where the system does not report it."""
    try:
        import resource
    except ImportError:  # not on every system
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if platform.system() == "Darwin" else 1024 * peak


def collect_versions() -> dict[str, Any]:
    """What a result can depend on besides the recipe."""
    return {
        "fedloom": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": numpy.__version__,
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
    }


@dataclass(frozen=True)
class Final:
    """The end of one series of rows. `best` is the best of all rounds: papers often report it, claims should use
    `value`, that of the last round. It is NaN, of round 0, for a metric that does not say which direction is better."""

    candidate: str
    tier: str
    test: str
    metric: str
    value: float
    best: float
    best_round: int
    mean_of_10: float  # of the last ten evaluations


def summarize(rows: Iterable[Row], declared: Mapping[str, MetricInfo] = NOTHING_DECLARED) -> list[Final]:
    """Per candidate, tier, test and metric; rows of single devices are left out."""
    series: dict[tuple[str, str, str, str], list[Row]] = {}
    for row in rows:
        if not row.device:
            series.setdefault((row.candidate, row.tier, row.test, row.metric), []).append(row)
    return [
        _summarize_series(*key, values, metric_info(key[-1], declared).higher_is_better)
        for key, values in series.items()
    ]


def _summarize_series(
    candidate: str, tier: str, test: str, metric: str, rows: list[Row], higher_is_better: bool | None
) -> Final:
    mean = statistics.fmean(row.value for row in rows[-10:])
    last = partial(Final, candidate, tier, test, metric, rows[-1].value, mean_of_10=mean)
    if higher_is_better is None:
        return last(best=math.nan, best_round=0)
    sign = 1 if higher_is_better else -1
    best = max(rows, key=lambda row: -math.inf if math.isnan(row.value) else sign * row.value)
    return last(best=best.value, best_round=best.round)
