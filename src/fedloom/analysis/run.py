"""The public handle of a finished run."""

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
    """A finished run, read from its folder.

    `registry` and `data` are needed for its models if the run used names of the user's or another data folder.
    """

    folder: Path
    registry: Registry = field(default_factory=Registry)
    data: Path = field(default_factory=resolve_data_folder)

    def rows(self) -> list[Row]:
        return list(read_rows(self.folder))

    def columns(self) -> dict[str, list[Any]]:
        """The rows as columns, as most table libraries take them."""
        rows = self.rows()
        return {column.name: [getattr(row, column.name) for row in rows] for column in fields(Row)}

    def frame(self) -> Any:
        """The rows as a pandas data frame; pandas must be installed."""
        return import_module("pandas").DataFrame(self.columns())

    def model(self, tier: str | None = None, *, device: str | None = None, macs: int | None = None) -> nn.Module:
        """A model for inference, which takes examples as they are stored.

        By default the largest tier's; or that of a tier, of a device, or the largest sub-net of at most `macs`
        multiply-adds.
        """
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
        """Write a model, selected as in `model`, to a file with a model card; its output is checked."""
        folder = None if out is None else Path(out)
        return export(self.folder, ModelSelector(tier, device, macs), to, folder, input_kind, self.registry, self.data)

    @property
    def final(self) -> list[Final]:
        return [final for final in summarize(self.rows()) if final.candidate]
