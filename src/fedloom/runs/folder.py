"""A run's folder: what was asked for, what happened, what came of it. Plain files, written as the run goes.

The end of a run in a few numbers: the last and the best value of everything that was judged.
"""

import json
import math
import platform
import statistics
import tempfile
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from ..evaluation import Row
from ..evaluation.metrics import metric_sign
from ..files import read_json_lines, sync_files, write_atomic
from ..tensors import to_safetensors

MANIFEST = "manifest.json"
LINES = ("rows.jsonl", "events.jsonl", "participation.jsonl", "timings.jsonl")


@dataclass(frozen=True)
class RunWriter:
    folder: Path

    def open(self, recipe: str, manifest: Mapping[str, Any]) -> None:
        """Make the folder, whole at once; a run never writes into one that is there."""
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        if self.folder.exists():
            raise FileExistsError(f"{self.folder} is there already")
        new = RunWriter(Path(tempfile.mkdtemp(prefix=".new-", dir=self.folder.parent)))
        new.folder.chmod(0o755)
        (new.folder / "recipe.toml").write_text(recipe, encoding="utf-8")
        new.manifest({**manifest, **versions(), "status": "running"})
        for name in LINES:
            (new.folder / name).touch()
        new.folder.rename(self.folder)

    def reopen(self, sizes: Mapping[str, int]) -> None:
        """Go on after a crash: lines that were written later than this are dropped."""
        for name in LINES:
            (self.folder / name).touch()  # a run of an older release lacks some
            with (self.folder / name).open("r+b") as file:
                file.truncate(sizes.get(name, 0))
        self.update(status="running")

    def sync(self) -> None:
        """All lines are on the disk."""
        sync_files(self.folder / name for name in LINES)

    def sizes(self) -> dict[str, int]:
        """How many bytes of lines there are."""
        return {name: (self.folder / name).stat().st_size for name in LINES}

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Whatever ends a run early is said in its folder."""
        try:
            yield
        except BaseException as error:
            if isinstance(error, Exception):
                (self.folder / "errors").mkdir(exist_ok=True)
                (self.folder / "errors" / "traceback.txt").write_text(traceback.format_exc(), encoding="utf-8")
            self.update(status="failed" if isinstance(error, Exception) else "interrupted")
            raise

    def manifest(self, content: Mapping[str, Any]) -> None:
        write_atomic(self.folder / MANIFEST, (json.dumps(content, indent=2) + "\n").encode())

    def update(self, **content: Any) -> None:
        self.manifest({**read_manifest(self.folder), **content})

    def rows(self, rows: Iterable[Row]) -> None:
        self._append("rows.jsonl", (asdict(row) for row in rows))

    def events(self, events: Iterable[Mapping[str, Any]]) -> None:
        self._append("events.jsonl", events)

    def participation(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Who was asked in a round, and what came of it."""
        self._append("participation.jsonl", lines)

    def timings(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """What another machine, or the same one on another day, would not say again."""
        self._append("timings.jsonl", lines)

    def document(self, name: str, content: Any) -> None:
        write_atomic(self.folder / name, (json.dumps(content, allow_nan=False) + "\n").encode())

    def model(self, name: str, weights: Mapping[str, Tensor], about: Mapping[str, str]) -> None:
        (self.folder / "models").mkdir(exist_ok=True)
        self.tensors(f"models/{name}.safetensors", weights, about)

    def tensors(self, file: str, weights: Mapping[str, Tensor], about: Mapping[str, str] | None = None) -> None:
        write_atomic(self.folder / file, to_safetensors(weights, about))

    def _append(self, name: str, lines: Iterable[Mapping[str, Any]]) -> None:
        with (self.folder / name).open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(_plain(line), allow_nan=False) + "\n" for line in lines)


def read_manifest(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    return content


def read_rows(folder: Path, strict: bool = True) -> Iterator[Row]:
    """The rows of a run; unless `strict`, a run that is still being written."""
    for row in read_json_lines(folder / "rows.jsonl", strict):
        yield Row(**{**row, "value": math.nan if row["value"] is None else row["value"]})


def _plain(line: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has no word for a loss that is not a finite number; null is."""
    return {key: None if isinstance(one, float) and not math.isfinite(one) else one for key, one in line.items()}


def peak_memory() -> int | None:
    """The most that this process has held so far, in bytes; None where the system does not say."""
    try:
        import resource
    except ImportError:  # not there on every system
        return None
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if platform.system() == "Darwin" else 1024 * most


def versions() -> dict[str, Any]:
    """What a result can depend on besides its recipe."""
    return {
        "fedloom": version("fedloom"),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": numpy.__version__,
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
    }


@dataclass(frozen=True)
class Final:
    """`best` is the highest accuracy of any judged round; papers often print it, claims should use `value`."""

    candidate: str
    tier: str
    test: str
    metric: str
    value: float
    best: float
    best_round: int
    mean_of_10: float  # of the last ten judgements


def summarize(rows: Iterable[Row]) -> list[Final]:
    """Per candidate, tier and test; devices' own rows are left out."""
    series: dict[tuple[str, str, str, str], list[Row]] = {}
    for row in rows:
        if not row.device:
            series.setdefault((row.candidate, row.tier, row.test, row.metric), []).append(row)
    return [_final(*key, judged) for key, judged in series.items()]


def _final(candidate: str, tier: str, test: str, metric: str, judged: list[Row]) -> Final:
    sign = metric_sign(metric)
    best = max(judged, key=lambda row: -math.inf if math.isnan(row.value) else sign * row.value)
    mean = statistics.fmean(row.value for row in judged[-10:])
    return Final(candidate, tier, test, metric, judged[-1].value, best.value, best.round, mean)
