"""The public handle of a run in its folder."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from torch import nn

from ..analysis.export_run import ExportResult, export, load_model
from ..analysis.trained import ModelSelector
from ..evaluation import Row
from ..exporting import InputKind
from ..recipe.paths import require_place, resolve_data_folder
from ..recipe.registries import Registries
from ..reporting.page import FIGURES, REFRESH_SECONDS, Page, build_page, figures_folder
from ..reporting.report_data import read_report_data
from ..reporting.search import is_search
from ..reporting.search_page import build_search_page, read_search_report
from ..results import Record, Result, line_chart
from ..runs.folder import Final, read_headline_test, read_manifest, read_metrics, read_rows, summarize

__all__ = ["Rows", "Run"]


REPORT = "report.html"


def write_report(
    folders: Sequence[Path], file: Path, test: str | None = None, metric: str | None = None,
    refresh: float = REFRESH_SECONDS,
) -> Page:  # fmt: skip
    """Write the page of a run, a comparison, a search or several runs.

    Parameters
    ----------
    folders : of the runs, or of the comparison or search.
    file : the page.
    test, metric : as for `report`.
    refresh : seconds after which the page of a run that goes on is brought up to date.

    Returns
    -------
    Page
        The page, which knows whether it is about something that goes on.
    """
    page = build_report(folders, test, metric, figures_folder(file), refresh)
    require_place(file)
    page.write(file)
    return page


def build_report(
    folders: Sequence[Path], test: str | None = None, metric: str | None = None, figures: str = FIGURES,
    refresh: float = REFRESH_SECONDS,
) -> Page:  # fmt: skip
    """The page of a run, a comparison, a search or several runs.

    Parameters
    ----------
    folders, test, metric, refresh : as for `write_report`.
    figures : the folder of its CSV files.
    """
    if len(folders) == 1 and is_search(folders[0]):
        return build_search_page(read_search_report(folders[0]), figures, refresh)
    return build_page(read_report_data(list(folders), test, metric), figures, refresh)


def default_report_file(folders: Sequence[Path]) -> Path:
    """The page of a run or comparison is in its folder; that of several is beside the first, named after them.

    Parameters
    ----------
    folders : of the runs, or of the comparison.
    """
    if len(folders) == 1:
        return folders[0] / REPORT
    names = [folder.resolve().name for folder in folders]
    listed = "-".join(names) if len(names) <= 4 else f"{'-'.join(names[:3])}-and-{len(names) - 3}-more"
    return folders[0].resolve().parent / f"report-{listed}.html"


@dataclass(frozen=True, repr=False)
class Run(Result):
    """A run, read from its folder.

    Parameters
    ----------
    folder : of the run.
    registries : names of your own that its models need.
    data : the folder of the data sets, which its models are checked with.
    resumed_after : the round after which it was resumed just now.
    owner : the simulation whose temporary folder it is, which is deleted with the simulation.
    """

    folder: Path
    registries: Registries = field(default_factory=Registries)
    data: Path = field(default_factory=resolve_data_folder)
    resumed_after: int | None = None
    owner: object = field(default=None, compare=False)

    @property
    def manifest(self) -> dict[str, Any]:
        """Seed, versions, status, and the sha256 of the data, the partition, the server and the devices."""
        return read_manifest(self.folder)

    def rows(self) -> list[Row]:
        """Everything that was measured, a row per round, model, test and metric."""
        return list(read_rows(self.folder))

    def columns(self) -> dict[str, list[Any]]:
        """The rows as columns, as most table libraries take them."""
        rows = self.rows()
        return {column.name: [getattr(row, column.name) for row in rows] for column in fields(Row)}

    def to_frame(self) -> Any:
        """The rows as a pandas data frame; pandas must be installed."""
        return Rows(self.rows()).to_frame()

    @property
    def final(self) -> list[Final]:
        """The last and the best value of each metric of each model; those on the headline test first."""
        rows = self.rows()
        finals = [one for one in summarize(rows, read_metrics(read_manifest(self.folder))) if one.candidate]
        test = read_headline_test(self.folder, rows)
        return sorted(finals, key=lambda one: one.test != test)

    @property
    def headline_test(self) -> str:
        """The test that its method is for: "local" for personal models, else "global"."""
        return read_headline_test(self.folder, self.rows())

    def model(self, tier: str | None = None, *, device: str | None = None, macs: int | None = None) -> nn.Module:
        """A model for inference, which takes examples as they are stored.

        Parameters
        ----------
        tier : whose model; default: the largest tier's.
        device : the personal model of this device instead.
        macs : the largest subnet with at most so many multiply-adds instead.
        """
        return load_model(self.folder, ModelSelector(tier, device, macs), self.registries, self.data)

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
        """Write a model to a file with a model card, and check that its outputs are the run's.

        Parameters
        ----------
        to : the format: "safetensors", "pt2", "onnx" or "executorch".
        tier, device, macs : whose model, as in `model`.
        out : a new folder. Default: exports/… in the run's folder.
        input_kind : "stored": the file preprocesses examples itself; "prepared": the caller does.
        """
        folder, selector = None if out is None else Path(out), ModelSelector(tier, device, macs)
        return export(self.folder, selector, to, folder, input_kind, self.registries, self.data)

    def report(self, out: str | Path | None = None) -> Path:
        """Write the report, one HTML page, and return its path.

        Parameters
        ----------
        out : the page. Default: report.html in the run's folder.
        """
        file = self.folder / REPORT if out is None else Path(out)
        write_report([self.folder], file)
        return file

    @property
    def title(self) -> str:
        manifest = self.manifest
        return f"run {self.folder}, seed {manifest['seed']}: {manifest['status']}; headline: {self.headline_test} test"

    def records(self) -> list[Record]:
        """The last value of each metric, by model and test."""
        columns = ("candidate", "tier", "test", "metric", "value", "best", "best_round")
        return [{name: getattr(final, name) for name in columns} for final in self.final]

    def content(self) -> dict[str, Any]:
        return {"run": str(self.folder), **self.manifest, "final": [asdict(final) for final in self.final]}

    def picture(self) -> str:
        curves: dict[str, list[tuple[float, float]]] = {}
        rows = [row for row in self.rows() if row.candidate and not row.device]
        metric = next((row.metric for row in rows), "")
        test = read_headline_test(self.folder, rows)
        several = len({row.candidate for row in rows}) > 1
        for row in rows:
            if (row.metric, row.test) == (metric, test):
                name = f"{row.candidate} {row.tier}" if several else row.tier
                curves.setdefault(name, []).append((float(row.round), row.value))
        return line_chart(curves, f"{metric} on the {test} test")


@dataclass(frozen=True, repr=False)
class Rows(Result):
    """Rows as a table.

    Parameters
    ----------
    rows : the rows.
    """

    rows: list[Row]

    def records(self) -> list[Record]:
        return [asdict(row) for row in self.rows]
