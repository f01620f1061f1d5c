"""A finished run, opened from its folder."""

from dataclasses import dataclass, field, fields
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import nn

from ..evaluation import Row
from ..recipe.paths import resolve_data_folder
from ..recipe.registry import Registry
from ..runs.folder import Final, read_rows, summarize
from .export_run import ExportResult, export, load_model
from .trained import InputKind, ModelSelector


@dataclass(frozen=True)
class Run:
    """A finished run, read from its folder. `registry` and `data` are the names and the data it was made with, where
    those are not the usual ones: its models need them."""

    folder: Path
    registry: Registry = field(default_factory=Registry)
    data: Path = field(default_factory=resolve_data_folder)

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

        return load_model(self.folder, ModelSelector(tier, device, macs), self.registry, self.data)

    def export(
        self,
        to: str,
        tier: str | None = None,
        *,
        device: str | None = None,
        macs: int | None = None,
        out: str | Path | None = None,
        input_kind: InputKind = "stored",
    ) -> ExportResult:
        """The same as a file in a format, with a card, proved to make what the run's model makes."""

        place = None if out is None else Path(out)
        return export(self.folder, ModelSelector(tier, device, macs), to, place, input_kind, self.registry, self.data)

    @property
    def final(self) -> list[Final]:
        return [one for one in summarize(self.rows()) if one.candidate]
