"""A finished run, opened from its folder."""

from dataclasses import dataclass, field, fields
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import nn

from ..evaluation import Row
from ..recipe.paths import data_folder
from ..recipe.registry import Registry
from ..runs.folder import Final, read_rows, summarize
from .export_run import Exported, export, model_of
from .trained import Input, ModelSelector


@dataclass(frozen=True)
class Run:
    """A finished run, read from its folder. `tables` and `data` are the names and the data it was made with, where
    those are not the usual ones: its models need them."""

    folder: Path
    tables: Registry = field(default_factory=Registry)
    data: Path = field(default_factory=data_folder)

    def rows(self) -> list[Row]:
        return list(read_rows(self.folder))

    def columns(self) -> dict[str, list[Any]]:
        """The rows, column by column: what every library for tables takes."""
        rows = self.rows()
        return {one.name: [getattr(row, one.name) for row in rows] for one in fields(Row)}

    def frame(self) -> Any:
        """The rows as a data frame of pandas, which must be installed."""
        return import_module("pandas").DataFrame(self.columns())

    def model(self, tier: str | None = None, *, device: str | None = None, macs: int | None = None) -> nn.Module:
        """A tier's model, that of the largest if nothing is said; the one a device keeps; or the largest sub-net of at
        most so many multiply-adds. It takes examples as they are stored, and is ready to be used, not to be trained."""

        return model_of(self.folder, ModelSelector(tier, device, macs), self.tables, self.data)

    def export(
        self,
        to: str,
        tier: str | None = None,
        *,
        device: str | None = None,
        macs: int | None = None,
        out: str | Path | None = None,
        given: Input = "stored",
    ) -> Exported:
        """The same as a file in a format, with a card, proved to make what the run's model makes."""

        place = None if out is None else Path(out)
        return export(self.folder, ModelSelector(tier, device, macs), to, place, given, self.tables, self.data)

    @property
    def final(self) -> list[Final]:
        return [one for one in summarize(self.rows()) if one.candidate]
