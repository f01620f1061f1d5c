"""Rows as TensorBoard's event files, in the run's folder."""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from ...evaluation import Row
from .tracker import Beginning, finite, title

FOLDER = "tensorboard"


class TensorBoard:
    def __init__(self) -> None:
        self._writer_into = import_module("torch.utils.tensorboard").SummaryWriter
        self._writer: Any = None

    def begin(self, run: Beginning) -> None:
        """Of a run that is resumed all is written anew: no round is there twice, and none is missing that was not
        followed the first time."""
        place = run.folder / FOLDER
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
